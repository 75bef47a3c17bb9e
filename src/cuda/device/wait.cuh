// Waits on the device: what the wait of a library's kernel looks at, and the record of a failure.
#pragma once

#include <cstdint>

#include "cuda/device/memory.cuh"
#include "cuda/layout.hpp"

namespace unisono::cuda {

using device::await;
using device::kLook;
using device::patient;

template <int kMost>
__device__ inline Header* header(const ContextOf<kMost>& context, int owner) {
  return reinterpret_cast<Header*>(context.bases[owner]);
}

// The peer and slot that a thread waits for.
template <int kMost>
struct WaitOf {
  const ContextOf<kMost>& context;
  int peer;
  Slot slot;

  __device__ std::uint64_t timeout_ns() const { return context.timeout_ns; }

  // Returns whether a rank has failed, in this kernel or before, or the host has lost a peer. If so, tells
  // the host that this rank's results are unusable. Reads no host memory, since thousands of threads look at
  // once.
  __device__ bool failed() const {
    if (load_relaxed(&header(context, context.rank)->failed) == 0) return false;
    store_relaxed(&context.failure->cut, 1);
    return true;
  }

  // Tells the host what this thread has waited for, and ends the kernels of every rank. Only the first thread
  // of a rank does so.
  __device__ void report(std::uint32_t expected, std::uint32_t seen) const {
    if (atomicExch(&header(context, context.rank)->claimed, 1u) != 0) return;
    Failure& record = *context.failure;
    record.rank = context.rank;
    record.peer = peer;
    record.slot = static_cast<int>(slot);
    record.block = static_cast<int>(blockIdx.x);
    record.expected = expected;
    record.seen = seen;
    record.collective = static_cast<std::uint32_t>(context.collective);
    record.call = context.call;
    store_release(&record.stage, 2);
    for (int r = 0; r < context.layout.ranks; ++r) store_relaxed(&header(context, r)->failed, 1);
  }
};
using Wait = WaitOf<kFewRanks>;

}  // namespace unisono::cuda
