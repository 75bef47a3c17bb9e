// Waits on the device: polls that end by the deadline, and the record of a failure.
#pragma once

#include <cstdint>

#include "cuda/device/memory.cuh"
#include "cuda/layout.hpp"

namespace unisono::cuda {

// The peer and slot that a thread waits for.
struct Wait {
  const Context& context;
  int peer;
  Slot slot;
};

__device__ inline Header* header(const Context& context, int owner) {
  return reinterpret_cast<Header*>(context.bases[owner]);
}

// Returns whether a rank has failed, in this kernel or before, or the host has lost a peer. If so, tells the
// host that this rank's results are unusable. Reads no host memory, since thousands of threads look at once.
__device__ inline bool failed(const Context& context) {
  if (load_relaxed(&header(context, context.rank)->failed) == 0) return false;
  store_relaxed(&context.failure->cut, 1);
  return true;
}

// Tells the host what this thread has waited for, and ends the kernels of every rank. Only the first thread
// of a rank does so.
__device__ inline void fail(const Wait& wait, std::uint32_t expected, std::uint32_t seen) {
  const Context& context = wait.context;
  if (atomicExch(&header(context, context.rank)->claimed, 1u) != 0) return;
  Failure& record = *context.failure;
  record.rank = context.rank;
  record.peer = wait.peer;
  record.slot = static_cast<int>(wait.slot);
  record.block = static_cast<int>(blockIdx.x);
  record.expected = expected;
  record.seen = seen;
  record.collective = static_cast<std::uint32_t>(context.collective);
  record.call = context.call;
  store_release(&record.stage, 2);
  for (int r = 0; r < context.layout.ranks; ++r) store_relaxed(&header(context, r)->failed, 1);
}

// Returns whether a long wait goes on, after a look at the clock and at failures. began: 0 at the first look.
__device__ __noinline__ inline bool patient(const Wait& wait, std::uint64_t& began, std::uint32_t expected,
                                            std::uint32_t seen) {
  const std::uint64_t now = now_ns();
  if (began == 0) began = now;
  if (failed(wait.context)) return false;
  if (now - began <= wait.context.timeout_ns) return true;
  fail(wait, expected, seen);
  return false;
}

inline constexpr std::uint32_t kLook = 1024;  // polls between two such looks

// Returns whether the word has reached `expected`; what its writer published before is then visible to this
// thread.
__device__ inline bool await(const std::uint32_t* word, std::uint32_t expected, const Wait& wait) {
  std::uint64_t began = 0;
  for (std::uint32_t polls = 1;; ++polls) {
    const std::uint32_t seen = load_relaxed(word);
    if (static_cast<std::int32_t>(seen - expected) >= 0) break;
    if (polls % kLook == 0 && !patient(wait, began, expected, seen)) return false;
  }
  load_acquire(word);
  return true;
}

}  // namespace unisono::cuda
