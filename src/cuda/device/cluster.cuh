// Clusters (from sm_90 on): blocks that run at the same time on neighbouring SMs, and write each other's
// shared memory. On older GPUs, and where none is asked for, a cluster has one block.
#pragma once

#include <cstdint>

namespace unisono::cuda {

// Comes to the next meeting of the cluster's threads, and waits for it. That publishes nothing: what was read
// before may be overwritten after. blocks: of the cluster.
__device__ inline void come_to_cluster([[maybe_unused]] unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void await_cluster([[maybe_unused]] unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Four numbers that a block of a cluster stores in another's shared memory, or in its own. A block waits for
// the bytes that come to it: a meeting would wait for all that its threads have under way, also in global
// memory. counter: of the bytes, a word of shared memory.

// Makes the counter. Each block calls it before the cluster meets.
__device__ inline void begin_landing([[maybe_unused]] std::uint64_t* counter) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;" ::"r"(
          static_cast<std::uint32_t>(__cvta_generic_to_shared(counter)))
      : "memory");
#endif
}

// Stores at the place of `at` in the shared memory of block `block`, whose counter counts it.
__device__ inline void land([[maybe_unused]] std::uint64_t* counter, [[maybe_unused]] float (&at)[4],
                            [[maybe_unused]] const float (&numbers)[4], [[maybe_unused]] unsigned block) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      "  .reg .b32 there, count;\n"
      "  mapa.shared::cluster.u32 there, %0, %6;\n"
      "  mapa.shared::cluster.u32 count, %1, %6;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%2, %3, %4, %5}, [count];\n"
      "}" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(&at))),
      "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(counter))), "f"(numbers[0]), "f"(numbers[1]),
      "f"(numbers[2]), "f"(numbers[3]), "r"(block)
      : "memory");
#endif
}

// Waits until `bytes` have come since the last such wait. All threads of the block call it. odd: whether they
// have called it an odd number of times.
__device__ inline void await_landed([[maybe_unused]] std::uint64_t* counter,
                                    [[maybe_unused]] std::uint32_t bytes, [[maybe_unused]] bool odd) {
#if __CUDA_ARCH__ >= 900
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(counter));
  if (threadIdx.x == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  asm volatile(
      "{\n"
      "  .reg .pred come;\n"
      "again:\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 come, [%0], %1;\n"
      "  @!come bra again;\n"
      "}" ::"r"(at),
      "r"(static_cast<std::uint32_t>(odd))
      : "memory");
#endif
}

}  // namespace unisono::cuda
