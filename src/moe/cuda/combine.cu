// Returns each token's sum to its rank. Ranks sum the rows of their own experts, and push that to the token's
// rank. Chunk by chunk, that rank sums what has come, by rank. Rows that need no such sum, and that lie in
// the area, are lent instead: the token's rank reads them where they lie.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/api.hpp"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/sums.cuh"

namespace unisono::moe::gpu {
namespace {

template <class T, int kEach>
__device__ inline Pack<T, kEach> load(const byte* row, std::size_t i) {
  return reinterpret_cast<const Pack<T, kEach>*>(row)[i];
}

// Sets this rank's part of a token, from vector i on in steps of a warp: the sum of its rows, weighted or
// not. A row alone without a weight keeps its bits.
template <class T, int kEach, int kColumns>
__device__ inline void weigh(const Rows& rows, int count, bool weighted, std::size_t i, std::size_t end,
                             Pack<T, kEach> (&out)[kColumns]) {
  constexpr int kAhead = 4;  // rows that are loaded before the first is added
  using Vector = Pack<T, kEach>;
  const auto read = [&](int row, Vector(&to)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (i + 32 * c < end) to[c] = load<T, kEach>(rows.at[row], i + 32 * c);
  };
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = {};
  if (count == 1 && !weighted) return read(0, out);
  if (count == 0) return;
  Sum<T, kEach> sums[kColumns];
  for (int first = 0; first < count; first += kAhead) {
    Vector some[kAhead][kColumns];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (first + u < count) read(first + u, some[u]);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u >= count) continue;
      const float weight = rows.weights[first + u];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (weighted) sums[c].add(some[u][c], weight);
        else sums[c].add(some[u][c]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = sums[c].rounded();
}

// The vectors of a row that a warp has.
template <class T, int kEach>
struct Vectors {
  __device__ Vectors(const Combine& combine, unsigned segment, unsigned segments) {
    const std::size_t all = combine.bytes / sizeof(Pack<T, kEach>);
    const Part part((all + 31) / 32, segment, segments);
    first = part.first * 32 + lane();
    end = min(part.end * 32, all);
  }
  std::size_t first, end;
};

__device__ inline std::size_t sums_of(const Work& work, std::uint32_t combines) {
  return work.space.sums + combines % 2 * work.space.sums_bytes;
}
// Returns where a rank is told where `lender` lends its rows.
__device__ inline std::uint64_t* lent_by(const Work& work, int rank, int lender, std::uint32_t combines) {
  return at<std::uint64_t>(work, rank, work.space.lent) + combines % 2 * work.dims.ranks + lender;
}

// How work is shared: items of rows, each in segments, by the warps of the grid.
struct Share {
  __device__ explicit Share(unsigned rows) : segments(segments_of(rows)), items(rows * segments) {}
  unsigned segments, items;
};

// Whether the tokens of every rank are one chunk.
__device__ inline bool one_chunk(const Work& work, const Combine& combine) {
  return work.space.chunks == 1 || combine.one_chunk;
}

// The tokens of a source that lie in a chunk, by their positions here.
struct Range {
  __device__ Range(const Work& work, const Combine& combine, int source, int chunk) {
    const Dims& d = work.dims;
    end = static_cast<unsigned>(table<std::int32_t>(work, work.space.source_rows)[source]);
    if (one_chunk(work, combine)) return;
    const auto* const counts = table<std::uint32_t>(work, work.space.matrix) + source * work.space.columns +
                               d.experts + d.rank * work.space.chunks;
    for (int c = 0; c < chunk; ++c) first += counts[c];
    first = min(first, end);
    end = min(first + counts[chunk], end);
  }
  unsigned first = 0, end = 0;
};

// Writes a segment of this rank's part of a token, with a bias or none.
template <class T, int kEach>
__device__ void combine_rows(const Combine& combine, const Rows& rows, int count, bool weighted, byte* to,
                             const byte* bias, unsigned segment, unsigned segments) {
  constexpr int kColumns = 2;
  if (count == 1 && !weighted && !bias)
    return copy_row(rows.at[0], &to, 1, combine.bytes, kEach > 1 ? 16 : static_cast<int>(sizeof(T)), segment,
                    segments);
  const Vectors<T, kEach> vectors(combine, segment, segments);
  for (std::size_t i = vectors.first; i < vectors.end; i += 32 * kColumns) {
    Pack<T, kEach> parts[kColumns];
    weigh<T, kEach, kColumns>(rows, count, weighted, i, vectors.end, parts);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (i + 32 * c >= vectors.end) continue;
      if (bias) {
        Sum<T, kEach> sum;
        sum.add(parts[c]);
        sum.add(load<T, kEach>(bias, i + 32 * c));
        parts[c] = sum.rounded();
      }
      reinterpret_cast<Pack<T, kEach>*>(to)[i + 32 * c] = parts[c];
    }
  }
}

template <class T, int kEach>
__device__ void push_row(const Work& work, const Combine& combine, Rows& rows, int source, unsigned position,
                         std::size_t sums, unsigned segment, unsigned segments) {
  const Dims& d = work.dims;
  byte* const to = at<byte>(work, source, sums) + (d.rank * d.max_tokens + position) * combine.bytes;
  const float* const weights = weights_of(work, combine, source);
  const int count = find_rows(work, combine, source, position, weights, rows);
  if (weights) Rows::await();
  combine_rows<T, kEach>(combine, rows, count, weights != nullptr, to, nullptr, segment, segments);
}

template <class T, int kEach>
__device__ void push(const Work& work, const Combine& combine, Rows& rows, int chunk, std::size_t sums) {
  const Dims& d = work.dims;
  for (int i = 1; i < d.ranks; ++i) {
    const int source = (d.rank + i) % d.ranks;
    const Range range(work, combine, source, chunk);
    const Share share(range.end - range.first);
    for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid())
      push_row<T, kEach>(work, combine, rows, source, range.first + item / share.segments, sums,
                         item % share.segments, share.segments);
  }
}

// A token whose parts a warp sums: where they lie.
template <bool kAlone>
struct Parts {
  __device__ Parts(const Work& work, const Combine& combine, Rows& rows, unsigned token,
                   std::uint32_t combines) {
    const Dims& d = work.dims;
    const auto k = static_cast<unsigned>(d.top_k);
    const std::size_t pair = std::size_t{token} * k + lane();
    const std::int32_t packed = lane() < k ? table<std::int32_t>(work, work.space.homes)[pair] : kNone;
    const Home home(packed);
    const bool here = packed != kNone && home.rank == d.rank;
    if (!kAlone && packed != kNone && !here && combine.returned > 0) {
      from = mine<byte>(work, combine.returned) + (home.rank * d.max_tokens + home.position) * combine.bytes;
    } else if (!kAlone && packed != kNone && !here) {
      const std::uint64_t lent = *lent_by(work, d.rank, home.rank, combines);
      const auto first = static_cast<unsigned>(table<std::int32_t>(work, work.space.first_there)[home.rank]);
      from = lent == kPushed
                 ? mine<byte>(work, sums_of(work, combines)) +
                       (home.rank * d.max_tokens + home.position) * combine.bytes
                 : at<byte>(work, home.rank, lent) + (std::size_t{first} + home.position) * combine.bytes;
    }
    homes = __popc(__ballot_sync(kAllLanes, packed != kNone));
    const float* const weights = weights_of(work, combine, d.rank);
    weighted = weights != nullptr;
    if (kAlone && d.expert_major()) {  // no pair_rows are set
      const std::int32_t row = lane() < k ? table<std::int32_t>(work, work.space.places)[pair] : kNone;
      own_rows = list_rows(combine, weights, rows, row);
      if (weighted) Rows::await();
    } else if (const unsigned own = __ballot_sync(kAllLanes, here); own != 0) {
      place = __ffs(static_cast<int>(own)) - 1;
      const auto position = static_cast<unsigned>(__shfl_sync(kAllLanes, home.position, place));
      own_rows = find_rows(work, combine, d.rank, position, weights, rows);
      if (weighted) Rows::await();
      if (kAlone || own_rows != 1 || weighted) return;
      if (here) from = rows.at[0];
      place = kNone;
    }
  }
  const byte* from = nullptr;  // of the lane's copy: what another rank has pushed, or lends, or a row here
  int homes, own_rows = 0;
  int place = kNone;  // among all copies, of that whose rows here are to be summed
  bool weighted;
};

// Sums a token's parts by rank, and its bias, from vector i on. Lanes without a vector go along, for their
// shuffles.
template <class T, int kEach, int kColumns>
__device__ void sum_vectors(const Parts<false>& parts, const Rows& rows, const byte* bias, std::size_t i,
                            std::size_t end, byte* out) {
  constexpr int kAhead = 4;  // parts that are loaded before the first is added
  using Vector = Pack<T, kEach>;
  Vector own[kColumns] = {}, last[kColumns] = {};
  if (parts.place != kNone) weigh<T, kEach, kColumns>(rows, parts.own_rows, parts.weighted, i, end, own);
  Sum<T, kEach> sums[kColumns];
  for (int first = 0; first < parts.homes; first += kAhead) {
    Vector some[kAhead][kColumns];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const auto* const at = reinterpret_cast<const byte*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(parts.from), (first + u) % 32));
      const bool comes = first + u < parts.homes && first + u != parts.place;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        some[u][c] = own[c];
        if (comes && i + 32 * c < end) some[u][c] = load<T, kEach>(at, i + 32 * c);
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (first + u < parts.homes) sums[c].add(some[u][c]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) last[c] = some[0][c];
  }
  const int all = parts.homes + (bias ? 1 : 0);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (i + 32 * c >= end) continue;
    if (bias) sums[c].add(last[c] = load<T, kEach>(bias, i + 32 * c));
    reinterpret_cast<Vector*>(out)[i + 32 * c] = all > 1 ? sums[c].rounded() : last[c];
  }
}

template <class T, int kEach, bool kAlone>
__device__ void sum_token(const Work& work, const Combine& combine, Rows& rows, unsigned token,
                          std::uint32_t combines, unsigned segment, unsigned segments) {
  const Parts<kAlone> parts(work, combine, rows, token, combines);
  byte* out = combine.out + std::size_t{token} * combine.bytes;
  const byte* const bias = combine.bias ? combine.bias + std::size_t{token} * combine.bytes : nullptr;
  if constexpr (kAlone) {
    if (bias && parts.homes == 0)
      return copy_row(bias, &out, 1, combine.bytes, kEach > 1 ? 16 : static_cast<int>(sizeof(T)), segment,
                      segments);
    return combine_rows<T, kEach>(combine, rows, parts.own_rows, parts.weighted, out, bias, segment,
                                  segments);
  } else {
    constexpr int kColumns = 2;
    const Vectors<T, kEach> vectors(combine, segment, segments);
    for (std::size_t first = vectors.first - lane(); first < vectors.end; first += 32 * kColumns)
      sum_vectors<T, kEach, kColumns>(parts, rows, bias, first + lane(), vectors.end, out);
  }
}

template <class T, int kEach, bool kAlone>
__device__ void sum(const Work& work, const Combine& combine, Rows& rows, unsigned chunk,
                    std::uint32_t combines) {
  const unsigned chunk_tokens = work.space.chunk_of(work.tokens);
  const unsigned first = min(chunk_tokens * chunk, work.tokens);
  const Share share(min(chunk_tokens, work.tokens - first));
  for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid())
    sum_token<T, kEach, kAlone>(work, combine, rows, first + item / share.segments, combines,
                                item % share.segments, share.segments);
}

// Returns how many chunks the ranks' tokens here need, at least one. All threads of a block call it.
__device__ unsigned chunks_to_push(const Work& work, const Combine& combine) {
  __shared__ unsigned filled;
  const auto chunks = static_cast<unsigned>(work.space.chunks);
  if (one_chunk(work, combine)) return 1;
  if (threadIdx.x == 0) filled = 1;
  __syncthreads();
  const auto* const counts = table<std::uint32_t>(work, work.space.matrix) + work.dims.experts +
                             static_cast<unsigned>(work.dims.rank) * chunks;
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(work.dims.ranks) * chunks; i += kThreads)
    if (counts[i / chunks * work.space.columns + i % chunks] > 0) atomicOr(&filled, 1u << i % chunks);
  __syncthreads();
  return 32 - static_cast<unsigned>(__clz(static_cast<int>(filled)));
}

// Tells the peers of chunks that have come, or that they may read this rank's rows where they lie.
__device__ void tell_rows(const Work& work, const Combine& combine, std::uint32_t combines, unsigned chunks) {
  const Dims& d = work.dims;
  const auto mine_at = static_cast<std::uint64_t>(combine.y - work.own);
  for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += static_cast<int>(blockDim.x)) {
    if (r == d.rank) continue;
    *lent_by(work, r, d.rank, combines) = combine.lends ? mine_at : kPushed;
    tell(work, Told::summed, r, chunks);
  }
}

// Pushes each chunk before it sums the one before. Signals count chunks: the last one that is pushed, and
// rows that are lent, stand for all that would follow. The hosts signal what copy engines have brought.
template <class T, int kEach>
__device__ bool run(const Work& work, const Combine& combine, Rows& rows, std::uint32_t combines) {
  const auto chunks = static_cast<std::uint32_t>(work.space.chunks);
  const std::uint32_t share = work.space.chunk_of(work.tokens);
  const std::uint32_t own = work.tokens > 0 ? (work.tokens + share - 1) / share : 1;
  const std::uint32_t before = combine.returned > 0 ? combine.chunks_before : combines * chunks;
  std::uint32_t pushed = 0;
  if (combine.push && !combine.lends) pushed = chunks_to_push(work, combine);
  if (combine.push && combine.lends && blockIdx.x == 0) tell_rows(work, combine, combines, chunks);
  for (std::uint32_t c = 0; c < pushed || (combine.sum && c <= own); ++c) {
    if (c < pushed) {
      push<T, kEach>(work, combine, rows, static_cast<int>(c), sums_of(work, combines));
      if (last_block(work, kChunkTicket + static_cast<int>(c)))
        tell_rows(work, combine, combines, c + 1 < pushed ? 1 : chunks - c);
    }
    if (c == 0 || !combine.sum || c > own) continue;
    if (!hear_all(work, combine.returned > 0 ? Told::returned : Told::summed, before + c)) return false;
    sum<T, kEach, false>(work, combine, rows, c - 1, combines);
  }
  return true;
}

// Ends a combine, in its last block: tells the ranks whose rows were read, and waits until this rank's were.
__device__ void end(const Work& work, const Combine& combine, std::uint32_t combines) {
  const Dims& d = work.dims;
  for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += static_cast<int>(blockDim.x))
    if (r != d.rank && *lent_by(work, d.rank, r, combines) != kPushed) tell(work, Told::taken, r);
  const std::uint32_t lent = counters(work).lent + (combine.lends ? 1 : 0);
  if (combine.lends && !hear_all(work, Told::taken, lent)) return;
  if (threadIdx.x != 0) return;
  counters(work).lent = lent;
  counters(work).combines = combines + 1;
}

// kWide: rows are read and written by 16 bytes. kAlone: there is one rank.
template <class T, bool kWide, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Work work, const __grid_constant__ Combine combine) {
  constexpr int kEach = kWide ? static_cast<int>(sizeof(uint4) / sizeof(T)) : 1;
  __shared__ Rows all_rows[kWarps];
  if (failed(work)) return;
  Rows& rows = all_rows[warp_of_block()];
  if constexpr (kAlone) {
    sum<T, kEach, true>(work, combine, rows, 0, 0);
  } else {
    const std::uint32_t combines = counters(work).combines;
    if (!run<T, kEach>(work, combine, rows, combines) || !combine.sum || combine.returned > 0) return;
    if (last_block(work, kEndTicket)) end(work, combine, combines);
  }
}

template <class T>
const void* kernel_of(bool wide, bool alone) {
  const void* const kernels[2][2] = {{reinterpret_cast<const void*>(combine_kernel<T, false, false>),
                                      reinterpret_cast<const void*>(combine_kernel<T, false, true>)},
                                     {reinterpret_cast<const void*>(combine_kernel<T, true, false>),
                                      reinterpret_cast<const void*>(combine_kernel<T, true, true>)}};
  return kernels[wide ? 1 : 0][alone ? 1 : 0];
}
const void* kernel_of(DType dtype, bool wide, bool alone) {
  if (dtype == DType::f32) return kernel_of<float>(wide, alone);
  return dtype == DType::f16 ? kernel_of<F16>(wide, alone) : kernel_of<BF16>(wide, alone);
}

}  // namespace

void load_combine(bool alone, int& blocks) {
  blocks = 8;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const bool wide : {false, true}) {
      const void* const kernel = kernel_of(dtype, wide, alone);
      cuda::load(kernel);
      blocks = std::min(blocks, cuda::resident_blocks(kernel, kThreads));
    }
}

cudaError_t combine(const Work& work, const Combine& combine, int blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<Work*>(&work), const_cast<Combine*>(&combine)};
  return cudaLaunchKernel(kernel_of(combine.dtype, combine.wide, work.dims.ranks == 1),
                          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), parameters, 0, stream);
}

}  // namespace unisono::moe::gpu
