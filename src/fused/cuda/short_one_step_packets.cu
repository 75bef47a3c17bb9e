#include "fused/cuda/short_one_step.cuh"

namespace unisono::fused::gpu {

const void* short_one_step_by_packets(const Form& form, unsigned shares, unsigned messages) {
  return short_kernel_of<cuda::Packets>(form, shares, messages);
}

}  // namespace unisono::fused::gpu
