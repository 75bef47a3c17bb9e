#include "cuda/device/memory.cuh"
#include "cuda/window.hpp"
#include "unisono/device/verbs.cuh"

namespace unisono::cuda {
namespace {

// Sets back the signals of the round before, which this rank has waited for, and meets the other ranks.
__global__ void __launch_bounds__(kWindowThreads) begin(const __grid_constant__ device::Handle area) {
  follow_last_kernel();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < area.ranks) device::store_relaxed(&area.signal[area.rank][signal_from(peer)].count, 0);
  device::synchronise(area, kMeetingSignal);
}

__global__ void __launch_bounds__(kWindowThreads) wait(const __grid_constant__ WindowWait wait) {
  follow_last_kernel();
  const int peer = static_cast<int>(threadIdx.x);
  if (wait.ranks[peer / 32] >> peer % 32 & 1u)
    device::thread_wait(wait.area, signal_from(peer), wait.count, peer);
}

}  // namespace

const void* window_begin_kernel() { return reinterpret_cast<const void*>(begin); }
const void* window_wait_kernel() { return reinterpret_cast<const void*>(wait); }

}  // namespace unisono::cuda
