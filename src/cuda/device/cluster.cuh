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
// Does both; of a single block as __syncthreads.
__device__ inline void pass_cluster(unsigned blocks) {
  come_to_cluster(blocks);
  await_cluster(blocks);
  if (blocks == 1) __syncthreads();
}
// Meets too, and what each thread has stored before, in shared or global memory, is then visible to all of
// them.
__device__ inline void meet_cluster(unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
  await_cluster(blocks);
  if (blocks == 1) __syncthreads();
}

// Words that the blocks of a cluster store at the same place of each other's shared memory. A block waits for
// the bytes that come to it. A meeting would wait for all that its threads have under way, also in global
// memory. counter: of the bytes, a word of shared memory. No state is in registers, which kernels have none
// to spare.

// Makes the counter. Each block calls it before the cluster meets.
__device__ inline void begin_landing([[maybe_unused]] std::uint64_t* counter,
                                     [[maybe_unused]] unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1 && threadIdx.x == 0)
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;" ::"r"(
            static_cast<std::uint32_t>(__cvta_generic_to_shared(counter)))
        : "memory");
#endif
}

__device__ inline void land([[maybe_unused]] std::uint64_t* counter, std::uint64_t* at, std::uint64_t word,
                            unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
#pragma unroll 1
    for (unsigned b = 0; b < blocks; ++b)
      asm volatile(
          "{\n"
          "  .reg .b32 there, count;\n"
          "  mapa.shared::cluster.u32 there, %0, %3;\n"
          "  mapa.shared::cluster.u32 count, %1, %3;\n"
          "  st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [there], %2, [count];\n"
          "}" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(at))),
          "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(counter))), "l"(word), "r"(b)
          : "memory");
    return;
  }
#endif
  *at = word;
}

// Waits until `bytes` have come since the last such wait. All threads of the block call it. odd: whether they
// have called it an odd number of times.
__device__ inline void await_landed([[maybe_unused]] std::uint64_t* counter,
                                    [[maybe_unused]] std::uint32_t bytes, [[maybe_unused]] bool odd,
                                    unsigned blocks) {
  if (blocks == 1) return __syncthreads();
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
