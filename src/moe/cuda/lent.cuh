// Ranks tell each other in a combine which rows may be read, and where they lie.
#pragma once

#include "moe/cuda/device.cuh"

namespace unisono::moe::gpu {

static_assert(device::kMostRanks <= kThreads);  // a thread for each rank

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
  // Finds them, for a thread of each rank, once that has told: `lent`, its Lent::at. there: the first row.
  __device__ void find(const Work& work, const Combine& combine, std::uint32_t combines, int rank,
                       std::size_t lent, std::size_t there) {
    const Dims& d = work.dims;
    const std::size_t brought = combine.returned > 0 ? combine.returned : sums_of(work, combines);
    lends[rank] = lent != 0;
    if (rank == d.rank) first[rank] = combine.y + there * combine.bytes;  // one row for each of its tokens
    else if (lends[rank]) first[rank] = at<byte>(work, rank, lent * Lent::kUnit) + there * combine.bytes;
    else first[rank] = mine<byte>(work, brought) + rank * d.max_tokens * combine.bytes;
  }
  const byte* first[device::kMostRanks];
  bool lends[device::kMostRanks];
};

// Returns what `Lent::chunks` says once so many chunks may be read. A peer's words are used in turns.
__device__ inline std::uint32_t chunks_told(const Work& work, std::uint32_t combines, std::uint32_t chunks) {
  return combines / 2 * static_cast<std::uint32_t>(work.space.chunks) + chunks;
}

// Tells the peers that they may read this rank's rows where they lie. The rows were written before this
// kernel, which has nothing to publish: a release would cost a microsecond.
__device__ inline void lend_rows(const Work& work, const Combine& combine, std::uint32_t combines) {
  const Dims& d = work.dims;
  const std::uint64_t lent = static_cast<std::uint64_t>(combine.y - work.own) / Lent::kUnit;
  const std::uint64_t word =
      lent << 32 | chunks_told(work, combines, static_cast<std::uint32_t>(work.space.chunks));
  if (const auto r = static_cast<int>(threadIdx.x); r < d.ranks && r != d.rank)
    device::store_relaxed(reinterpret_cast<std::uint64_t*>(lent_by(work, r, d.rank, combines)), word);
}

// Tells the peers, once all blocks have pushed a chunk, that `count` more may be read: that one, and those
// after it if nothing else is pushed. All threads of a block call it. If each block told of its part, a
// combine of 128 tokens among 4 GPUs would take a fifth longer (docs/notes/gpu-kernels.md).
__device__ inline void tell_pushed(const Work& work, std::uint32_t combines, std::uint32_t chunk,
                                   std::uint32_t count) {
  const Dims& d = work.dims;
  if (!last_block(work, kChunkTicket + static_cast<int>(chunk))) return;
  if (const auto r = static_cast<int>(threadIdx.x); r < d.ranks && r != d.rank)
    device::increment_release(&lent_by(work, r, d.rank, combines)->chunks, count);
}

// Returns the first row of this rank's tokens at the rank of this thread, if it has one.
__device__ inline std::int32_t first_row_there(const Work& work) {
  const auto ranks = static_cast<unsigned>(work.dims.ranks);
  return threadIdx.x < ranks ? table<std::int32_t>(work, work.space.first_there)[threadIdx.x] : 0;
}

// Waits until every peer has told of so many chunks; of one, the first, it also finds the peers' rows. there:
// as first_row_there says. All threads of a block call it.
__device__ inline bool hear_rows(const Work& work, const Combine& combine, std::uint32_t combines,
                                 std::uint32_t chunks, std::int32_t there, Sources& sources) {
  const Dims& d = work.dims;
  bool arrived = true;
  if (const auto r = static_cast<int>(threadIdx.x); r < d.ranks) {
    std::uint64_t lent = 0;
    if (r != d.rank && combine.returned > 0)
      arrived =
          device::thread_wait(work.area, slot_of(d, Told::returned, r), combine.chunks_before + chunks, r);
    else if (r != d.rank)
      arrived = device::await(reinterpret_cast<const std::uint64_t*>(lent_by(work, d.rank, r, combines)),
                              chunks_told(work, combines, chunks),
                              device::detail::Wait{work.area, slot_of(d, Told::summed, r), r}, lent);
    if (chunks == 1) sources.find(work, combine, combines, r, lent >> 32, static_cast<std::size_t>(there));
  }
  return __syncthreads_and(arrived) != 0;
}

}  // namespace unisono::moe::gpu
