// The arithmetic of norms of rows, alike for every compiler, instruction set and lane.
//
// A row's sum has kPartials partial sums. Element i is added to partial sum i mod kPartials, in the order of
// i; each begins with 0. Then partial sum j + w is added to partial sum j, for w = kPartials / 2, ..., 2, 1.
// On a GPU a thread has the 8 elements of one load, and vector units have neighbours.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"
#include "base/numeric.hpp"
#include "base/scales.hpp"

namespace unisono::norm {

inline constexpr std::size_t kPartials = 1024;

UNISONO_PORTABLE inline float mean_of(float sum, std::size_t count) {
  return sum / static_cast<float>(count);
}
// Returns the factor of a row, of the mean of its squares. Both roundings are to nearest.
UNISONO_PORTABLE inline float factor_of(float mean_of_squares, float eps) {
  return 1.0f / std::sqrt(mean_of_squares + eps);
}

// Returns the code of an element by a scale that does not depend on it: beyond e4m3's largest, the largest.
UNISONO_PORTABLE inline std::uint8_t saturated_code_of(float value, float inverse) {
  const std::uint32_t bits = numeric::as_bits(value * inverse), magnitude = bits & 0x7fffffffu;
  constexpr auto largest = std::bit_cast<std::uint32_t>(scales::kLargest);
  const bool beyond = magnitude > largest && magnitude <= 0x7f800000u;
  return scales::code_of(numeric::as_float(beyond ? largest | (bits ^ magnitude) : bits), 1.0f);
}

}  // namespace unisono::norm
