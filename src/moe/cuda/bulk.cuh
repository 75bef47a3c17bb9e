// Rows that an SM's copy engine moves between global and shared memory (bulk copies, from sm_90 on): no
// register holds them, and one thread asks for a row.
#pragma once

#include "moe/cuda/device.cuh"

namespace unisono::moe::gpu {

// A warp's buffer of one row, and the barrier at which the row's arrival is seen.
struct RowBuffer {
  // A warp calls it, and all of it calls `await`, `publish` and `drain`.
  __device__ RowBuffer(byte* row, std::uint64_t* barrier)
      : row(row), at(address(row)), barrier(address(barrier)) {
#if __CUDA_ARCH__ >= 900
    if (lane() == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(this->barrier) : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
#endif
    __syncwarp();
  }
  // Begins to load a row that nobody else reads, for one thread.
  __device__ void load(const byte* from, std::uint32_t bytes) const {
#if __CUDA_ARCH__ >= 900
    std::uint64_t once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(at),
        "l"(from), "r"(bytes), "r"(barrier), "l"(once)
        : "memory");
#endif
  }
  // Waits for the load that has begun last.
  __device__ void await() {
#if __CUDA_ARCH__ >= 900
    std::uint32_t loaded = 0;
    while (loaded == 0)
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(loaded)
          : "r"(barrier), "r"(parity)
          : "memory");
    parity ^= 1;
#endif
  }
  // Shows the warp's stores to the buffer to the copy engine.
  __device__ void publish() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncwarp();
  }
  // Begins to store the buffer's first bytes, for one thread; `drain` waits until all stores of
  // the warp have been read.
  // passes: nobody will find the row in L2.
  __device__ void store(byte* to, std::uint32_t bytes, bool passes) const {
#if __CUDA_ARCH__ >= 900
    std::uint64_t first, normal;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
                 "r"(at), "r"(bytes), "l"(passes ? first : normal)
                 : "memory");
#endif
  }
  __device__ static void drain() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
    __syncwarp();
  }

  __device__ static std::uint32_t address(const void* shared) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  }
  byte* row;
  std::uint32_t at, barrier, parity = 0;
};

}  // namespace unisono::moe::gpu
