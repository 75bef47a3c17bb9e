// Codes of 8-bit floats (e4m3), as base/scales.hpp, base/norm.hpp and base/wire.hpp define them, by
// instructions that give the same bytes, but for a NaN's sign.
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

// Returns the values of two codes, the first in the low byte.
__device__ inline float2 values_of(std::uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  float2 values;
  asm("{\n"
      "  .reg .b32 both;\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.f16x2.e4m3x2 both, %2;\n"
      "  mov.b32 {low, high}, both;\n"
      "  cvt.f32.f16 %0, low;\n"
      "  cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(values.x), "=f"(values.y)
      : "h"(static_cast<std::uint16_t>(codes)));
  return values;
#else
  using Format = numeric::Format<4, 3, false>;
  return {Format::widen(codes & 0xff), Format::widen(codes >> 8 & 0xff)};
#endif
}

// Return what scales::scale_of, scales::power_of and scales::inverse_of do, and NaN as the inverse of a
// largest magnitude that is not finite: without the branches of a division whose operands may be of any size.
// A quotient is corrected by its rest, as the compiler's own is.
__device__ inline float scale_of(std::uint32_t largest) {
  constexpr float kInverse = 1 / scales::kLargest;
  const float raised = scales::raised(largest), scale = raised * kInverse;
  const float rest = __fmaf_rn(-scales::kLargest, scale, raised);
  return scales::finite(largest) ? __fmaf_rn(rest, kInverse, scale) : numeric::nan();
}
__device__ inline std::uint32_t power_of(std::uint32_t largest) {
  return scales::finite(largest) ? (numeric::as_bits(scale_of(largest)) + 0x7fffffu) >> 23
                                 : scales::kNanPower;
}
__device__ inline float inverse_of(std::uint32_t largest) {
  constexpr float kSmall = 0x1p-64f;  // makes all normal numbers of what follows
  const float divisor = scales::raised(largest) * kSmall;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-divisor, inverse, 1.0f), inverse);
  const float quotient = scales::kLargest * inverse;
  const float rest = __fmaf_rn(-divisor, quotient, scales::kLargest);
  const float corrected = __fmaf_rn(rest, inverse, quotient) * kSmall;
  return scales::finite(largest) ? corrected : numeric::nan();
}

}  // namespace unisono::cuda
