#include "fused/cuda/exchange.cuh"

namespace unisono::fused::gpu {

const void* one_step_kernel(const Form& form) { return kernel_of<false>(form); }

}  // namespace unisono::fused::gpu
