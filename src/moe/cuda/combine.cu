// Returns each token's sum to its rank. Ranks sum the rows of their own experts, and push that to the token's
// rank. Chunk by chunk, that rank sums what has come, by rank. Rows that need no such sum, and that lie in
// the area, are lent instead: the token's rank reads them where they lie.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/api.hpp"
#include "moe/cuda/chunks.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/lent.cuh"
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

// How work is shared: items of rows, each in segments, by the warps of the grid.
struct Share {
  __device__ explicit Share(unsigned rows) : segments(segments_of(rows)), items(rows * segments) {}
  unsigned segments, items;
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
__device__ void push(const Work& work, const Combine& combine, const Ranges& ranges, Rows& rows,
                     std::size_t sums) {
  const Share share(ranges.tokens(work));
  unsigned i = 0, before = 0;  // the source of the warp's token, and the tokens of those before it
  for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid()) {
    const unsigned token = item / share.segments;
    for (; token - before >= ranges.of[i].end - ranges.of[i].first; ++i)
      before += ranges.of[i].end - ranges.of[i].first;
    push_row<T, kEach>(work, combine, rows, Ranges::source(work, i), ranges.of[i].first + token - before,
                       sums, item % share.segments, share.segments);
  }
}

// A token whose parts a warp sums: where they lie.
template <bool kAlone>
struct Parts {
  // packed: the lane's copy of the token, as Space::homes has it.
  __device__ Parts(const Work& work, const Combine& combine, const Sources& sources, Rows& rows,
                   unsigned token, std::int32_t packed) {
    const Dims& d = work.dims;
    const auto k = static_cast<unsigned>(d.top_k);
    const Home home(packed);
    const bool here = packed != kNone && home.rank == d.rank;
    if (!kAlone && packed != kNone && !here)
      from = sources.first[home.rank] + std::size_t{static_cast<unsigned>(home.position)} * combine.bytes;
    homes = __popc(__ballot_sync(kAllLanes, packed != kNone));
    const float* const weights = weights_of(work, combine, d.rank);
    weighted = weights != nullptr;
    if (kAlone && d.expert_major()) {  // no pair_rows are set
      const std::size_t pair = std::size_t{token} * k + lane();
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
__device__ void sum_token(const Work& work, const Combine& combine, const Sources& sources, Rows& rows,
                          unsigned token, std::int32_t packed, unsigned segment, unsigned segments) {
  const Parts<kAlone> parts(work, combine, sources, rows, token, packed);
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

// The tokens of a chunk that a warp sums. The copies of the next one are loaded ahead.
struct Chunk {
  __device__ Chunk(const Work& work, unsigned chunk)
      : work(work),
        first(min(work.space.chunk_of(work.tokens) * chunk, work.tokens)),
        share(min(work.space.chunk_of(work.tokens), work.tokens - first)) {
    load(warp_of_grid());
  }
  __device__ unsigned token_of(unsigned item) const { return first + item / share.segments; }
  __device__ void load(unsigned item) {
    const auto k = static_cast<unsigned>(work.dims.top_k);
    packed = kNone;
    if (item < share.items && lane() < k)
      packed = table<std::int32_t>(work, work.space.homes)[std::size_t{token_of(item)} * k + lane()];
  }
  template <class T, int kEach, bool kAlone>
  __device__ void sum(const Combine& combine, const Sources& sources, Rows& rows) {
    for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid()) {
      const std::int32_t its = packed;
      load(item + warps_of_grid());
      sum_token<T, kEach, kAlone>(work, combine, sources, rows, token_of(item), its, item % share.segments,
                                  share.segments);
    }
  }
  const Work& work;
  unsigned first;
  Share share;
  std::int32_t packed;
};

// Pushes each chunk before it sums the one before. The last one that is pushed, and rows that are lent, stand
// for all that would follow. The hosts signal what copy engines have brought.
template <class T, int kEach>
__device__ bool run(const Work& work, const Combine& combine, Sources& sources, Rows& rows,
                    std::uint32_t combines) {
  __shared__ Ranges ranges;
  const auto chunks = static_cast<std::uint32_t>(work.space.chunks);
  const std::uint32_t share = work.space.chunk_of(work.tokens);
  const std::uint32_t own = work.tokens > 0 ? (work.tokens + share - 1) / share : 1;
  const std::uint32_t before = combine.returned > 0 ? combine.chunks_before : combines * chunks;
  std::uint32_t pushed = 0;
  if (combine.push && !combine.lends) pushed = chunks_to_push(work, combine);
  if (combine.push && combine.lends && blockIdx.x == 0)
    tell_rows(work, combine, combines, (combines + 1) * chunks);
  for (std::uint32_t c = 0; c < pushed || (combine.sum && c <= own); ++c) {
    if (c < pushed) {
      ranges.find(work, combine, static_cast<int>(c));
      push<T, kEach>(work, combine, ranges, rows, sums_of(work, combines));
      if (last_block(work, kChunkTicket + static_cast<int>(c)))
        tell_rows(work, combine, combines, combines * chunks + (c + 1 < pushed ? c + 1 : chunks));
    }
    if (c == 0 || !combine.sum || c > own) continue;
    Chunk tokens(work, c - 1);
    if (!hear_rows(work, combine, combines, before + c)) return false;
    if (c == 1) {
      for (int r = static_cast<int>(threadIdx.x); r < work.dims.ranks; r += static_cast<int>(blockDim.x))
        if (r != work.dims.rank) sources.find(work, combine, combines, r);
      __syncthreads();
    }
    tokens.sum<T, kEach, false>(combine, sources, rows);
  }
  return true;
}

// Ends a combine. Every block tells the ranks whose rows it has read, and its own rank; the first one waits
// until all have read this rank's. A block has what it has read in registers then, and publishes nothing: a
// release would wait for the stores of its sums.
__device__ void end(const Work& work, const Combine& combine, const Sources& sources,
                    std::uint32_t combines) {
  const Dims& d = work.dims;
  bool arrived = true;
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += static_cast<int>(blockDim.x))
    if (r == d.rank || sources.lends[r])
      device::increment_relaxed(&work.area.signal[r][slot_of(d, Told::taken, d.rank)].count, part_of_block());
  if (blockIdx.x > 0) return;
  const std::uint32_t lent = counters(work).lent + (combine.lends ? 1 : 0);
  for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += static_cast<int>(blockDim.x))
    if (r == d.rank || combine.lends)
      arrived = device::thread_wait(work.area, slot_of(d, Told::taken, r),
                                    kWhole * (r == d.rank ? combines + 1 : lent), r) &&
                arrived;
  if (__syncthreads_and(arrived) == 0 || threadIdx.x != 0) return;
  counters(work).lent = lent;
  counters(work).combines = combines + 1;
}

// kWide: rows are read and written by 16 bytes. kAlone: there is one rank.
template <class T, bool kWide, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Work work, const __grid_constant__ Combine combine) {
  constexpr int kEach = kWide ? static_cast<int>(sizeof(uint4) / sizeof(T)) : 1;
  __shared__ Rows all_rows[kWarps];
  __shared__ Sources sources;
  Rows& rows = all_rows[warp_of_block()];
  if constexpr (kAlone) {
    if (!failed(work)) Chunk(work, 0).sum<T, kEach, true>(combine, sources, rows);
  } else {
    const std::uint32_t combines = counters(work).combines;  // while the status is loaded
    if (failed(work) || !run<T, kEach>(work, combine, sources, rows, combines)) return;
    if (combine.sum && combine.returned == 0) end(work, combine, sources, combines);
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
