// The chunks of tokens in which a rank pushes its sums.
#pragma once

#include "moe/cuda/device.cuh"

namespace unisono::moe::gpu {

// Returns whether the tokens of every rank are one chunk.
__device__ inline bool one_chunk(const Work& work, const Combine& combine) {
  return work.space.chunks == 1 || combine.one_chunk;
}

// The tokens of a source that a rank pushes in a chunk, by their positions here.
struct Range {
  Range() = default;
  __device__ Range(const Work& work, const Combine& combine, int source, int chunk) {
    const Dims& d = work.dims;
    first = 0;
    end = static_cast<unsigned>(table<std::int32_t>(work, work.space.source_rows)[source]);
    row = table<std::int32_t>(work, work.space.first_rows)[source];
    if (one_chunk(work, combine)) return;
    const auto* const counts = table<std::uint32_t>(work, work.space.matrix) + source * work.space.columns +
                               d.experts + d.rank * work.space.chunks;
    for (int c = 0; c < chunk; ++c) first += counts[c];
    first = min(first, end);
    end = min(first + counts[chunk], end);
  }
  unsigned first, end;
  std::int32_t row;  // of the source's first token here, in flat and rank_major rows
};

// The ranges of all sources, one after another, from the next rank on.
struct Ranges {
  // All threads of a block call it.
  __device__ void find(const Work& work, const Combine& combine, int chunk) {
    const auto ranks = static_cast<unsigned>(work.dims.ranks);
    __syncthreads();
    for (unsigned i = threadIdx.x; i + 1 < ranks; i += blockDim.x)
      of[i] = Range(work, combine, source(work, i), chunk);
    __syncthreads();
  }
  __device__ static int source(const Work& work, unsigned i) {
    return static_cast<int>((static_cast<unsigned>(work.dims.rank) + 1 + i) %
                            static_cast<unsigned>(work.dims.ranks));
  }
  __device__ unsigned tokens(const Work& work) const {
    unsigned all = 0;
    for (int i = 0; i + 1 < work.dims.ranks; ++i) all += of[i].end - of[i].first;
    return all;
  }
  Range of[device::kMostRanks];
};

// Returns how many chunks the ranks' tokens here need, at least one. All threads of a block call it.
__device__ inline unsigned chunks_to_push(const Work& work, const Combine& combine) {
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

}  // namespace unisono::moe::gpu
