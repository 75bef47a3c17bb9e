// Clusters (from sm_90 on): blocks that run at the same time on neighbouring SMs, and write each other's
// shared memory. On older GPUs, and where none is asked for, a cluster has one block.
#pragma once

#include <bit>
#include <cstdint>

namespace unisono::cuda {

// Comes to the next meeting of the cluster's threads, and waits for it. What each has stored before it came,
// in shared or global memory, is then visible to all of them. blocks: of the cluster.
__device__ inline void come_to_cluster([[maybe_unused]] unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ inline void await_cluster([[maybe_unused]] unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// Does both; of a single block as __syncthreads.
__device__ inline void meet_cluster(unsigned blocks) {
  come_to_cluster(blocks);
  await_cluster(blocks);
  if (blocks == 1) __syncthreads();
}

// Stores words at the same place of shared memory in every block of the cluster. Requires: T has whole words;
// the blocks have met, so that all have begun.
template <class T>
__device__ inline void store_in_cluster(T* at, const T& value, [[maybe_unused]] unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    struct Words {
      std::uint64_t of[sizeof(T) / sizeof(std::uint64_t)];
    };
    const auto words = std::bit_cast<Words>(value);
    const auto own = static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
#pragma unroll 1
    for (unsigned b = 0; b < blocks; ++b) {
      std::uint32_t there;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(b));
#pragma unroll
      for (unsigned w = 0; w < sizeof(T) / sizeof(std::uint64_t); ++w)
        asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there + 8 * w), "l"(words.of[w]) : "memory");
    }
    return;
  }
#endif
  *at = value;
}

}  // namespace unisono::cuda
