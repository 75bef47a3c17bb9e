#include "fused/cuda/exchange.cuh"

namespace unisono::fused::gpu {

const void* two_steps_kernel(const Form& form) { return kernel_of<true>(form); }

}  // namespace unisono::fused::gpu
