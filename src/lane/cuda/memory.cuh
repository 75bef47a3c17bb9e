// The memory model's verbs at system scope, in PTX: other GPUs take part. Source: PTX ISA, "Memory
// Consistency Model".
#pragma once

#include <cstddef>
#include <cstdint>

#include "lane/cuda/layout.hpp"

namespace unisono::cuda {

// Publishes what this thread has written, and what it has observed of other threads (a barrier before it).
__device__ inline void store_release(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ inline void store_relaxed(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// For polling; one fence_acquire() after the last look.
__device__ inline std::uint32_t load_relaxed(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline void fence_acquire() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Elements of a vector are single accesses each, in no order: hence a flag in either word.
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

__device__ inline std::uint64_t now_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace unisono::cuda
