// More accesses at system scope (unisono/device/order.cuh), of the lane's own protocol, in PTX.
#pragma once

#include <cstdint>

#include "cuda/layout.hpp"
#include "unisono/device/order.cuh"

namespace unisono::cuda {

using device::load_acquire;
using device::load_relaxed;
using device::now_ns;
using device::store_relaxed;
using device::store_release;

// Adds 1 to a word that nobody else writes.
__device__ inline void increment_relaxed(std::uint32_t* at) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

__device__ inline void store_relaxed(byte** at, byte* value) {
  store_relaxed(reinterpret_cast<std::uint64_t*>(at), reinterpret_cast<std::uint64_t>(value));
}
__device__ inline byte* load_relaxed(byte* const* at) {
  return reinterpret_cast<byte*>(load_relaxed(reinterpret_cast<const std::uint64_t*>(at)));
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

// Waits until the kernel before this one in the stream has ended: with programmatic dependent launch, this
// one starts while that still runs. Requires: no access to memory before.
__device__ inline void follow_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same, when the addresses are known: a thread finds its addresses while the last kernel runs. None is
// null.
__device__ inline void follow_last_kernel([[maybe_unused]] const void* first,
                                          [[maybe_unused]] const void* second) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      "  .reg .pred known;\n"
      "  setp.ne.u64 known, %0, 0;\n"
      "  setp.ne.and.u64 known, %1, 0, known;\n"
      "  @known griddepcontrol.wait;\n"
      "}" ::"l"(first),
      "l"(second)
      : "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace unisono::cuda
