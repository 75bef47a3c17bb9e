// Codes of 8-bit floats (e4m3), as base/scales.hpp and base/norm.hpp define them, by instructions that give
// the same bytes.
#pragma once

#include "base/norm.hpp"

namespace unisono::cuda {

// Returns two codes, the first in the low byte. Elements beyond e4m3's largest become the largest.
__device__ inline std::uint32_t codes_of(float first, float second, float inverse) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second * inverse), "f"(first * inverse));
  return codes;
#else
  return norm::saturated_code_of(first, inverse) |
         static_cast<std::uint32_t>(norm::saturated_code_of(second, inverse)) << 8;
#endif
}

}  // namespace unisono::cuda
