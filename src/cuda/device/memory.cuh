// Accesses at system scope, in PTX, since other GPUs take part. Source: PTX ISA, "Memory Consistency Model".
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
// Loads for polling; load_acquire() makes the last look.
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

// Loads four words, which peers write one by one.
__device__ inline uint4 load_relaxed4(const std::uint32_t* at) {
  uint4 four;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(at)
               : "memory");
  return four;
}

// The elements of a vector are single accesses, in no order: each word therefore has a flag. A word of 64
// bits arrives whole even over PCIe, in host memory; several together need not.
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

// Loads before every later access: what the writer of the value has published is then visible.
__device__ inline std::uint32_t load_acquire(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Waits until the kernel before this one in the stream has ended: with programmatic dependent launch, this
// one starts while that still runs. Requires: no access to memory before.
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
