// The memory model's verbs at system scope, in PTX, since other GPUs take part; and the loop of every wait.
// Source: PTX ISA, "Memory Consistency Model". C++17.
#pragma once

#include <cstdint>

namespace unisono::device {

// Publishes what this thread has written, and what it has observed of other threads (a barrier before it).
__device__ inline void store_release(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ inline void store_relaxed(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// Adds, and publishes as store_release does.
__device__ inline void increment_release(std::uint32_t* at, std::uint32_t by = 1) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(at), "r"(by) : "memory");
}
// Adds, and publishes nothing.
__device__ inline void increment_relaxed(std::uint32_t* at, std::uint32_t by) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(at), "r"(by) : "memory");
}
// For polling; load_acquire() for the last look.
__device__ inline std::uint32_t load_relaxed(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// A load that everything after follows: what the writer of the value published is visible.
__device__ inline std::uint32_t load_acquire(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// The same of 64 bits.
__device__ inline std::uint64_t load_relaxed(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline void store_relaxed(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline std::uint64_t load_acquire(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ inline std::uint64_t now_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Looks at the clock and at failures in a long wait. Returns whether to go on. `began` is 0 at the first
// look. Wait: failed(), timeout_ns() and report(expected, seen), which tells the host and ends the kernels of
// every rank.
template <class Wait>
__device__ __noinline__ bool patient(const Wait& wait, std::uint64_t& began, std::uint32_t expected,
                                     std::uint32_t seen) {
  const std::uint64_t now = now_ns();
  if (began == 0) began = now;
  if (wait.failed()) return false;
  if (now - began <= wait.timeout_ns()) return true;
  wait.report(expected, seen);
  return false;
}

inline constexpr std::uint32_t kLook = 1024;  // polls between two such looks
// The first polls of a wait acquire, which spares a short wait another load. Each empties the SM's L1 of what
// other blocks may read there, so that a long wait polls without.
inline constexpr std::uint32_t kEager = 32;

// Returns whether the word has reached `expected`, within the deadline: its low half, of 64 bits. What its
// writer published before is then visible to this thread. last: the word.
template <class Word, class Wait>
__device__ inline bool await(const Word* word, std::uint32_t expected, const Wait& wait, Word& last) {
  std::uint64_t began = 0;
  for (std::uint32_t polls = 1;; ++polls) {
    last = polls <= kEager ? load_acquire(word) : load_relaxed(word);
    const auto seen = static_cast<std::uint32_t>(last);
    if (static_cast<std::int32_t>(seen - expected) >= 0) {
      if (polls > kEager) last = load_acquire(word);
      return true;
    }
    if (polls % kLook == 0 && !patient(wait, began, expected, seen)) return false;
  }
}
template <class Wait>
__device__ inline bool await(const std::uint32_t* word, std::uint32_t expected, const Wait& wait) {
  std::uint32_t last = 0;
  return await(word, expected, wait, last);
}

}  // namespace unisono::device
