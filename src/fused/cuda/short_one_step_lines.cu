#include "fused/cuda/short_one_step.cuh"

namespace unisono::fused::gpu {

const void* short_one_step_by_lines(const Form& form, unsigned shares, unsigned messages) {
  return short_kernel_of<cuda::Lines>(form, shares, messages);
}

}  // namespace unisono::fused::gpu
