// The verbs of a user's own kernel on a device area: put, signal, wait, take, synchronise. C++17, nvcc.
//
// The functions whose names begin with thread_ are for one thread. All threads of a block call the others,
// with the same arguments. A block may have one, two or three dimensions.
//
// Order: what the threads of a block have put or stored before `signal` is visible to the waiting block after
// `wait`. Kernels on an area wait for no other kernel of the communicator: the streams order them, and the
// area's signals.
//
// Failure: a wait that expires tells the host and every rank. The communicator's next call, or `synchronize`,
// throws that on every rank. A wait that returns false has failed, or another rank has: the kernel ends then.
#pragma once

#include <cstddef>
#include <cstdint>

#include "unisono/device/handle.hpp"
#include "unisono/device/order.cuh"

namespace unisono::device {
namespace detail {

__device__ inline unsigned thread_of_block() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
__device__ inline unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
__device__ inline unsigned block_of_grid() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

// A thread's wait for a signal, as `await` (order.cuh) takes it.
struct Wait {
  const Handle& handle;
  int slot, from;
  __device__ std::uint64_t timeout_ns() const { return handle.timeout_ns; }
  __device__ bool failed() const {
    if (load_relaxed(&handle.status[handle.rank]->failed) == 0) return false;
    store_relaxed(&handle.failure->cut, 1);
    return true;
  }
  // Tells the host what this thread has waited for, and ends the waits of every rank. Only the first thread
  // of a rank does so.
  __device__ void report(std::uint32_t expected, std::uint32_t seen) const {
    if (atomicExch(&handle.status[handle.rank]->claimed, 1u) != 0) return;
    Failure& record = *handle.failure;
    record.rank = handle.rank;
    record.peer = from;
    record.slot = slot;
    record.block = static_cast<std::int32_t>(block_of_grid());
    record.expected = expected;
    record.seen = seen;
    record.area = static_cast<std::uint32_t>(handle.area);
    store_release(&record.stage, 2);
    for (int r = 0; r < handle.ranks; ++r) store_relaxed(&handle.status[r]->failed, 1);
  }
};

// Copies by words of one size. Requires: both addresses have the same remainder by it.
template <class Word>
__device__ inline void copy_words(unsigned char* to, const unsigned char* from, std::size_t bytes,
                                  unsigned thread, unsigned threads) {
  constexpr unsigned kAhead = 4;  // words that a thread loads before it stores the first of them
  const std::size_t to_word =
      (sizeof(Word) - reinterpret_cast<std::uintptr_t>(to) % sizeof(Word)) % sizeof(Word);
  const std::size_t head = to_word < bytes ? to_word : bytes;
  const std::size_t words = (bytes - head) / sizeof(Word), tail = head + words * sizeof(Word);
  for (std::size_t i = thread; i < head; i += threads) to[i] = from[i];
  auto* const wide_to = reinterpret_cast<Word*>(to + head);
  const auto* const wide_from = reinterpret_cast<const Word*>(from + head);
  for (std::size_t i = thread; i < words; i += std::size_t{kAhead} * threads) {
    Word some[kAhead];
#pragma unroll
    for (unsigned u = 0; u < kAhead; ++u)
      if (const std::size_t at = i + std::size_t{u} * threads; at < words) some[u] = wide_from[at];
#pragma unroll
    for (unsigned u = 0; u < kAhead; ++u)
      if (const std::size_t at = i + std::size_t{u} * threads; at < words) wide_to[at] = some[u];
  }
  for (std::size_t i = tail + thread; i < bytes; i += threads) to[i] = from[i];
}

}  // namespace detail

// Copies by a group of `threads` threads, this one being number `thread` of them, by the widest word that
// both addresses allow. Requires: the two do not overlap.
__device__ inline void thread_copy(void* to, const void* from, std::size_t bytes, unsigned thread,
                                   unsigned threads) {
  auto* const out = static_cast<unsigned char*>(to);
  const auto* const in = static_cast<const unsigned char*>(from);
  const auto apart =
      static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(to) ^ reinterpret_cast<std::uintptr_t>(from));
  if (apart % sizeof(uint4) == 0) detail::copy_words<uint4>(out, in, bytes, thread, threads);
  else if (apart % sizeof(std::uint32_t) == 0)
    detail::copy_words<std::uint32_t>(out, in, bytes, thread, threads);
  else if (apart % sizeof(std::uint16_t) == 0)
    detail::copy_words<std::uint16_t>(out, in, bytes, thread, threads);
  else detail::copy_words<unsigned char>(out, in, bytes, thread, threads);
}

// Copies `bytes` bytes to `offset` in the memory of `peer`, which may be this rank.
// Requires: `source` is memory that this device reaches; offset + bytes <= handle.bytes.
__device__ inline void put(const Handle& handle, int peer, std::size_t offset, const void* source,
                           std::size_t bytes) {
  thread_copy(static_cast<unsigned char*>(handle.memory[peer]) + offset, source, bytes,
              detail::thread_of_block(), detail::threads_of_block());
}

// Raises signal `slot` of `peer` by 1. Publishes what this thread has written.
__device__ inline void thread_signal(const Handle& handle, int peer, int slot) {
  increment_release(&handle.signal[peer][slot].count);
}

// Raises signal `slot` of `peer` by 1, once for the block. Publishes what any of its threads has written.
__device__ inline void signal(const Handle& handle, int peer, int slot) {
  __syncthreads();
  if (detail::thread_of_block() == 0) thread_signal(handle, peer, slot);
}

// Returns whether this rank's signal `slot` was raised `count` times since the area was made, modulo 2^32,
// within the deadline. from: the rank that raises the signal, which the error names.
__device__ inline bool thread_wait(const Handle& handle, int slot, std::uint32_t count, int from = kAnyRank) {
  return await(&handle.signal[handle.rank][slot].count, count, detail::Wait{handle, slot, from});
}

// Does the same for a block. All its threads get the same answer.
__device__ inline bool wait(const Handle& handle, int slot, std::uint32_t count, int from = kAnyRank) {
  bool arrived = true;
  if (detail::thread_of_block() == 0) arrived = thread_wait(handle, slot, count, from);
  return __syncthreads_and(arrived) != 0;
}

// Waits until the signal was raised `count` times more than have been taken, and takes those. What was taken
// is kept in memory: the same kernel may run again, also from a graph. One block at a time takes from a slot.
__device__ inline bool take(const Handle& handle, int slot, std::uint32_t count, int from = kAnyRank) {
  bool arrived = true;
  if (detail::thread_of_block() == 0) {
    std::uint32_t* const taken = &handle.signal[handle.rank][slot].taken;
    const std::uint32_t all = load_relaxed(taken) + count;
    arrived = thread_wait(handle, slot, all, from);
    if (arrived) store_relaxed(taken, all);
  }
  return __syncthreads_and(arrived) != 0;
}

// Returns when one block of every rank has called it: what they stored before is then visible. No other call
// uses the slot, which is the same on every rank.
__device__ inline bool synchronise(const Handle& handle, int slot) {
  __syncthreads();
  const auto others = static_cast<unsigned>(handle.ranks - 1);
  for (unsigned i = detail::thread_of_block(); i < others; i += detail::threads_of_block())
    thread_signal(handle, static_cast<int>((static_cast<unsigned>(handle.rank) + 1 + i) % (others + 1)),
                  slot);
  return take(handle, slot, others);
}

}  // namespace unisono::device
