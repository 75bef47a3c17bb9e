// Returns each token's sum to its rank. Ranks sum the rows of their own experts, and push that to the token's
// rank. Chunk by chunk, that rank sums what has come, by rank. Rows that need no such sum, and that lie in
// the area, are lent instead: the token's rank reads them where they lie.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/api.hpp"
#include "moe/cuda/chunks.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/lent.cuh"
#include "moe/cuda/token_sums.cuh"

namespace unisono::moe::gpu {
namespace {

// Pushes a segment of this rank's part of a token, the position-th of its source. first: the row of the
// first.
template <class T, int kEach, Has kHas>
__device__ void push_row(const Work& work, const Combine& combine, Rows& rows, int source, std::int32_t first,
                         unsigned position, std::size_t sums, unsigned segment, const Segments& share) {
  const Dims& d = work.dims;
  byte* const to = at<byte>(work, source, sums) + (d.rank * d.max_tokens + position) * combine.bytes;
  if constexpr (kHas == Has::row) {
    const std::size_t row = static_cast<std::size_t>(first) + position;
    copy_part<T, kEach>(combine, combine.y + row * combine.bytes, to, segment, share);
  } else {
    const float* const weights = weights_of(work, combine, source);
    const int count = find_rows(work, combine, source, position, weights, rows);
    if (weights) Rows::await();
    combine_rows<T, kEach>(combine, rows, count, weights != nullptr, to, nullptr, segment, share);
  }
}

template <class T, int kEach, Has kHas>
__device__ void push(const Work& work, const Combine& combine, const Ranges& ranges, Rows& rows,
                     std::size_t sums) {
  const Segments share = Segments::exact(ranges.tokens(work), warps_of_grid());
  unsigned i = 0, before = 0;  // the source of the warp's token, and the tokens of those before it
  for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid()) {
    const unsigned token = share.row_of(item);
    for (; token - before >= ranges.of[i].end - ranges.of[i].first; ++i)
      before += ranges.of[i].end - ranges.of[i].first;
    push_row<T, kEach, kHas>(work, combine, rows, Ranges::source(work, i), ranges.of[i].row,
                             ranges.of[i].first + token - before, sums, share.segment_of(item), share);
  }
}

// The tokens of a chunk, or of all, that a warp sums. The copies of the next one are loaded ahead.
struct Chunk {
  __device__ Chunk(const Work& work, std::uint32_t first, std::uint32_t most)
      : work(work),
        first(min(first, work.tokens)),
        share(Segments::exact(min(most, work.tokens - this->first), warps_of_grid())) {
    load(warp_of_grid());
  }
  __device__ unsigned token_of(unsigned item) const { return first + share.row_of(item); }
  __device__ void load(unsigned item) {
    const auto k = static_cast<unsigned>(work.dims.top_k);
    packed = kNone;
    if (item < share.items && lane() < k)
      packed = table<std::int32_t>(work, work.space.homes)[std::size_t{token_of(item)} * k + lane()];
  }
  template <class T, int kEach, Has kHas>
  __device__ void sum(const Combine& combine, const Sources& sources, Rows& rows) {
    for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid()) {
      const std::int32_t its = packed;
      load(item + warps_of_grid());
      sum_token<T, kEach, kHas>(work, combine, sources, rows, token_of(item), its, share.segment_of(item),
                                share);
    }
  }
  const Work& work;
  unsigned first;
  Segments share;
  std::int32_t packed;
};

// Pushes each chunk before it sums the one before. The last one that is pushed, and rows that are lent, stand
// for all that would follow. The hosts signal what copy engines have brought.
template <class T, int kEach, Has kHas>
__device__ bool run(const Work& work, const Combine& combine, Sources& sources, Rows& rows,
                    std::uint32_t combines) {
  __shared__ Ranges ranges;
  const auto chunks = static_cast<std::uint32_t>(work.space.chunks);
  const std::int32_t there = first_row_there(work);
  if (combine.push && combine.lends && blockIdx.x == 0) lend_rows(work, combine, combines);
  const bool whole = one_chunk(work, combine);
  const std::uint32_t share = whole ? work.tokens : work.space.chunk_of(work.tokens);
  const std::uint32_t own = whole || work.tokens == 0 ? 1 : (work.tokens + share - 1) / share;
  std::uint32_t pushed = 0;
  if (combine.push && !combine.lends) pushed = chunks_to_push(work, combine);
  for (std::uint32_t c = 0; c < pushed || (combine.sum && c <= own); ++c) {
    if (c < pushed) {
      ranges.find(work, combine, static_cast<int>(c));
      push<T, kEach, kHas>(work, combine, ranges, rows, sums_of(work, combines));
      tell_pushed(work, combines, c, c + 1 < pushed ? 1 : chunks - c);
    }
    if (c == 0 || !combine.sum || c > own) continue;
    Chunk tokens(work, (c - 1) * share, share);
    if (!hear_rows(work, combine, combines, c, there, sources)) return false;
    tokens.sum<T, kEach, kHas>(combine, sources, rows);
  }
  return true;
}

// Ends a combine. Every block tells the ranks whose rows it has read, and its own rank; the first one waits
// until all have read this rank's. A block has what it has read in registers then, and publishes nothing: a
// release would wait for the stores of its sums.
__device__ void end(const Work& work, const Combine& combine, const Sources& sources,
                    std::uint32_t combines) {
  const Dims& d = work.dims;
  const auto r = static_cast<int>(threadIdx.x);
  const bool lends = r < d.ranks && sources.lends[r];
  bool arrived = true;
  __syncthreads();
  if (r == d.rank || lends)
    device::increment_relaxed(&work.area.signal[r][slot_of(d, Told::taken, d.rank)].count, part_of_block());
  if (blockIdx.x > 0) return;
  const std::uint32_t lent = counters(work).lent + (combine.lends ? 1 : 0);
  if (r == d.rank || (r < d.ranks && combine.lends))
    arrived = device::thread_wait(work.area, slot_of(d, Told::taken, r),
                                  kWhole * (r == d.rank ? combines + 1 : lent), r);
  if (__syncthreads_and(arrived) == 0) return;
  if (lends) lent_by(work, d.rank, r, combines)->at = 0;  // the rank may push when the word is used again
  if (r > 0) return;
  counters(work).lent = lent;
  counters(work).combines = combines + 1;
}

// kWide: rows are read and written by 16 bytes.
template <class T, bool kWide, Has kHas>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Work work, const __grid_constant__ Combine combine) {
  constexpr int kEach = kWide ? static_cast<int>(sizeof(uint4) / sizeof(T)) : 1;
  __shared__ Rows all_rows[kWarps];
  __shared__ Sources sources;
  Rows& rows = all_rows[warp_of_block()];
  if constexpr (kHas == Has::all) {
    if (!failed(work)) Chunk(work, 0, work.tokens).sum<T, kEach, kHas>(combine, sources, rows);
  } else {
    const std::uint32_t combines = counters(work).combines;  // while the status is loaded
    if (failed(work) || !run<T, kEach, kHas>(work, combine, sources, rows, combines)) return;
    if (combine.sum && combine.returned == 0) end(work, combine, sources, combines);
  }
}

template <class T, bool kWide>
const void* kernel_of(Has has) {
  if (has == Has::row) return reinterpret_cast<const void*>(combine_kernel<T, kWide, Has::row>);
  return has == Has::pairs ? reinterpret_cast<const void*>(combine_kernel<T, kWide, Has::pairs>)
                           : reinterpret_cast<const void*>(combine_kernel<T, kWide, Has::all>);
}
template <class T>
const void* kernel_of(bool wide, Has has) {
  return wide ? kernel_of<T, true>(has) : kernel_of<T, false>(has);
}
const void* kernel_of(DType dtype, bool wide, const Dims& dims) {
  const Has has = dims.ranks == 1 ? Has::all : dims.expert_major() ? Has::pairs : Has::row;
  if (dtype == DType::f32) return kernel_of<float>(wide, has);
  return dtype == DType::f16 ? kernel_of<F16>(wide, has) : kernel_of<BF16>(wide, has);
}

}  // namespace

void load_combine(const Dims& dims, int& blocks) {
  blocks = 8;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const bool wide : {false, true}) {
      const void* const kernel = kernel_of(dtype, wide, dims);
      cuda::load(kernel);
      blocks = std::min(blocks, cuda::resident_blocks(kernel, kThreads));
    }
}

cudaError_t combine(const Work& work, const Combine& combine, int blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<Work*>(&work), const_cast<Combine*>(&combine)};
  return cudaLaunchKernel(kernel_of(combine.dtype, combine.wide, work.dims),
                          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), parameters, 0, stream);
}

}  // namespace unisono::moe::gpu
