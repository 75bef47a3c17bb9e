// Functions that the kernels of src/moe share: where things lie, and how blocks and ranks meet.
#pragma once

#include "moe/cuda/layout.hpp"
#include "unisono/device/verbs.cuh"

namespace unisono::moe::gpu {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// Returns where something of a rank's area lies.
template <class T>
__device__ inline T* at(const Work& work, int rank, std::size_t offset) {
  return reinterpret_cast<T*>(static_cast<byte*>(work.area.memory[rank]) + offset);
}
template <class T>
__device__ inline T* mine(const Work& work, std::size_t offset) {
  return reinterpret_cast<T*>(work.own + offset);
}
// Returns where a table of the call's slot lies.
template <class T>
__device__ inline T* table(const Work& work, int rank, std::size_t offset) {
  return at<T>(work, rank, work.slot + offset);
}
template <class T>
__device__ inline T* table(const Work& work, std::size_t offset) {
  return mine<T>(work, work.slot + offset);
}
__device__ inline Counters& counters(const Work& work) { return *mine<Counters>(work, work.space.counters); }

__device__ inline unsigned lane() { return threadIdx.x % 32; }
// Returns how many of some lanes come before this one.
__device__ inline unsigned before(unsigned lanes) { return __popc(lanes & ((1u << lane()) - 1)); }
__device__ inline unsigned warp_of_block() { return threadIdx.x / 32; }
// The first warps of a block have most work, and the last one what others need not wait for.
__device__ inline bool in_last_warp() { return threadIdx.x >= kThreads - 32; }
__device__ inline unsigned warp_of_grid() { return blockIdx.x * (blockDim.x / 32) + warp_of_block(); }
__device__ inline unsigned warps_of_grid() { return gridDim.x * (blockDim.x / 32); }

// With programmatic dependent launch: lets the next kernel of the stream start, once all blocks call it; and
// waits in that kernel until the one before it has ended. Otherwise they do nothing.
__device__ inline void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void await_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns, for one thread, whether the communicator has failed: tables may then be unfinished, and kernels
// leave them alone. Tells the host that this rank's results are unusable.
__device__ inline bool failed_for_thread(const Work& work) {
  if (device::load_relaxed(&work.status->failed) == 0) return false;
  device::store_relaxed(&work.area.failure->cut, 1);
  return true;
}
// Returns the same to all threads of a block.
__device__ inline bool failed(const Work& work) {
  return __syncthreads_or(threadIdx.x == 0 && failed_for_thread(work)) != 0;
}

// Raises this rank's signal of that kind at a peer, for one thread.
__device__ inline void tell(const Work& work, Told kind, int peer, std::uint32_t times = 1) {
  device::increment_release(&work.area.signal[peer][slot_of(work.dims, kind, work.dims.rank)].count, times);
}
__device__ inline void tell_all(const Work& work, Told kind, std::uint32_t times = 1) {
  const int ranks = work.dims.ranks;
  for (int i = static_cast<int>(threadIdx.x) + 1; i < ranks; i += static_cast<int>(blockDim.x))
    tell(work, kind, (work.dims.rank + i) % ranks, times);
}
// The blocks of a grid may raise a signal together, each as soon as it has ended: their parts are one whole,
// whatever the grid of a rank. No grid has more blocks than a whole has parts.
inline constexpr std::uint32_t kWhole = 1024;
__device__ inline std::uint32_t part_of_block() { return blockIdx.x == 0 ? kWhole + 1 - gridDim.x : 1; }

// Waits until every peer has raised its signal of that kind `count` times. All threads of a block call it.
__device__ inline bool hear_all(const Work& work, Told kind, std::uint32_t count) {
  bool arrived = true;
  for (int r = static_cast<int>(threadIdx.x); r < work.dims.ranks; r += static_cast<int>(blockDim.x))
    if (r != work.dims.rank)
      arrived = device::thread_wait(work.area, slot_of(work.dims, kind, r), count, r) && arrived;
  return __syncthreads_and(arrived) != 0;
}

// Returns true to all threads of the block that comes last. It may publish what all blocks have written.
__device__ inline bool last_block(const Work& work, int ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    std::uint32_t before = 0;
    if (gridDim.x > 1)
      asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(&counters(work).tickets[ticket]), "r"(gridDim.x - 1)
                   : "memory");
    last = before == gridDim.x - 1;
  }
  __syncthreads();
  return last;
}

// Fails the communicator on every rank with a problem of this call, for one thread. The first one counts.
__device__ __noinline__ inline void report(const Work& work, Problem problem, std::uint64_t which,
                                           std::uint32_t number, std::uint32_t limit) {
  const device::Handle& area = work.area;
  if (atomicExch(&area.status[area.rank]->claimed, 1u) != 0) return;
  device::Failure& record = *area.failure;
  record.problem = static_cast<std::uint32_t>(problem);
  record.rank = area.rank;
  record.call = which;
  record.seen = number;
  record.expected = limit;
  record.area = static_cast<std::uint32_t>(area.area);
  device::store_release(&record.stage, 2);
  for (int r = 0; r < area.ranks; ++r) device::store_relaxed(&area.status[r]->failed, 1);
}

// A copy of a token at another rank: its rank, and its position among this rank's tokens there.
struct Home {
  __device__ static std::int32_t pack(int rank, std::uint32_t position) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(rank) << kPositionBits | position);
  }
  __device__ explicit Home(std::int32_t packed)
      : rank(packed >> kPositionBits), position(packed & ((1 << kPositionBits) - 1)) {}
  int rank, position;
};

}  // namespace unisono::moe::gpu
