// The memory model's verbs at system scope, in PTX: other GPUs take part. Source: PTX ISA, "Memory
// Consistency Model".
#pragma once

#include <cstdint>

#include "cuda/layout.hpp"

namespace unisono::cuda {

// Publishes what this thread has written, and what it has observed of other threads (a barrier before it).
__device__ inline void store_release(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ inline void store_relaxed(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// Adds 1 to a word that nobody else writes.
__device__ inline void increment_relaxed(std::uint32_t* at) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}
// For polling; load_acquire() for the last look.
__device__ inline std::uint32_t load_relaxed(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ inline void store_relaxed(byte** at, byte* value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline byte* load_relaxed(byte* const* at) {
  byte* value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// Four words that peers write one by one.
__device__ inline uint4 load_relaxed4(const std::uint32_t* at) {
  uint4 four;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(at)
               : "memory");
  return four;
}

// Elements of a vector are single accesses each, in no order: hence a flag in either word. A word of 64 bits
// arrives whole over PCIe too, in host memory, which more of them together need not.
__device__ inline void store_packet(Packet* at, Packet packet) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(packet.low), "l"(packet.high));
}
__device__ inline Packet load_packet(const Packet* at) {
  Packet packet;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(packet.low), "=l"(packet.high)
               : "l"(at));
  return packet;
}

// A load that everything after follows: what the writer of the value published is visible.
__device__ inline std::uint32_t load_acquire(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// A kernel starts while the one before it in the stream still runs (programmatic dependent launch), and waits
// here until that has ended. Before any access to memory.
__device__ inline void follow_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline std::uint64_t now_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace unisono::cuda
