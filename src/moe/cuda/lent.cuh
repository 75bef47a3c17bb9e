// Ranks tell each other in a combine which rows may be read, and where they lie.
#pragma once

#include "moe/cuda/device.cuh"

namespace unisono::moe::gpu {

// Returns where in each area the peers put their sums.
__device__ inline std::size_t sums_of(const Work& work, std::uint32_t combines) {
  return work.space.sums + combines % 2 * work.space.sums_bytes;
}
// Returns where `source` tells a rank of its rows.
__device__ inline Lent* lent_by(const Work& work, int rank, int source, std::uint32_t combines) {
  return at<Lent>(work, rank, work.space.lent) + combines % 2 * work.dims.ranks + source;
}

// The rows of this rank's tokens at each rank: where the first one lies, and whether the rank lends it.
struct Sources {
  // Finds them, once the ranks have told. A thread for each rank calls it.
  __device__ void find(const Work& work, const Combine& combine, std::uint32_t combines, int rank) {
    const Dims& d = work.dims;
    const std::size_t lent = combine.returned > 0 ? 0 : lent_by(work, d.rank, rank, combines)->at;
    const auto there = static_cast<std::size_t>(table<std::int32_t>(work, work.space.first_there)[rank]);
    const std::size_t brought = combine.returned > 0 ? combine.returned : sums_of(work, combines);
    lends[rank] = lent != 0;
    first[rank] = lends[rank] ? at<byte>(work, rank, lent * Lent::kUnit) + there * combine.bytes
                              : mine<byte>(work, brought) + rank * d.max_tokens * combine.bytes;
  }
  const byte* first[device::kMostRanks];
  bool lends[device::kMostRanks];
};

// Tells the peers how many chunks have come, in all combines, or that they may read this rank's rows where
// they lie. Lent rows were written before this kernel, which has nothing to publish then: a release would
// cost a microsecond.
__device__ inline void tell_rows(const Work& work, const Combine& combine, std::uint32_t combines,
                                 std::uint32_t chunks) {
  const Dims& d = work.dims;
  const std::uint64_t lent =
      combine.lends ? static_cast<std::uint64_t>(combine.y - work.own) / Lent::kUnit : 0;
  const std::uint64_t word = lent << 32 | chunks;
  for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += static_cast<int>(blockDim.x)) {
    if (r == d.rank) continue;
    Lent* const there = lent_by(work, r, d.rank, combines);
    if (combine.lends) asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(there), "l"(word) : "memory");
    else asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(there), "l"(word) : "memory");
  }
}

// Waits until every peer has told of so many chunks, in all combines. All threads of a block call it.
__device__ inline bool hear_rows(const Work& work, const Combine& combine, std::uint32_t combines,
                                 std::uint32_t chunks) {
  if (combine.returned > 0) return hear_all(work, Told::returned, chunks);
  const Dims& d = work.dims;
  bool arrived = true;
  for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += static_cast<int>(blockDim.x))
    if (r != d.rank)
      arrived = device::await(&lent_by(work, d.rank, r, combines)->chunks, chunks,
                              device::detail::Wait{work.area, slot_of(d, Told::summed, r), r}) &&
                arrived;
  return __syncthreads_and(arrived) != 0;
}

}  // namespace unisono::moe::gpu
