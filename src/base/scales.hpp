// Rows of 8-bit floats (e4m3) with a scale for each 128 elements, as experts take them: the arithmetic of one
// block and of one element. The scale is an f32, or a power of two as its biased exponent in a byte (UE8M0).
//
// Every compiler, instruction set and lane gives the same bytes if divisions round to nearest even, as
// numeric.hpp asks of all arithmetic. A scaled element is at most 448, apart from a rounding that e4m3 takes
// back: an instruction that saturates gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"
#include "base/numeric.hpp"

namespace unisono::scales {

inline constexpr std::size_t kBlock = 128;
inline constexpr float kLargest = 448;           // of e4m3
inline constexpr float kLeast = 1e-4f;           // magnitude that a block is scaled for
inline constexpr std::uint32_t kNanPower = 255;  // the power of a block with an infinity or a NaN
inline constexpr std::uint8_t kNanCode = 0x7f;   // each element of such a block

UNISONO_PORTABLE constexpr std::size_t blocks_of(std::size_t count) { return (count + kBlock - 1) / kBlock; }
// Returns the bytes of the powers of a row of `count` elements. Zeros fill them up to a multiple of 4.
UNISONO_PORTABLE constexpr std::size_t power_bytes_of(std::size_t count) {
  return round_up(blocks_of(count), 4);
}

// In what follows, `largest` is a block's largest magnitude, as the bits of an f32.
UNISONO_PORTABLE inline bool finite(std::uint32_t largest) { return largest < 0x7f800000u; }
UNISONO_PORTABLE inline float raised(std::uint32_t largest) {
  const float value = numeric::as_float(largest);
  return value > kLeast ? value : kLeast;
}

// Returns the factor of codes, and the factor of elements before they are encoded. Requires of the second:
// finite(largest).
UNISONO_PORTABLE inline float scale_of(std::uint32_t largest) {
  return finite(largest) ? raised(largest) / kLargest : numeric::nan();
}
UNISONO_PORTABLE inline float inverse_of(std::uint32_t largest) { return kLargest / raised(largest); }

// The same for a power of two: 2^(power - 127) is the least that is not below the scale as f32.
UNISONO_PORTABLE inline std::uint32_t power_of(std::uint32_t largest) {
  return finite(largest) ? (numeric::as_bits(raised(largest) / kLargest) + 0x7fffffu) >> 23 : kNanPower;
}
UNISONO_PORTABLE inline float inverse_of_power(std::uint32_t power) {
  return numeric::as_float((254u - power) << 23);
}

// Returns the code of an element of a finite block.
UNISONO_PORTABLE inline std::uint8_t code_of(float value, float inverse) {
  return static_cast<std::uint8_t>(numeric::Format<4, 3, false>::narrow(value * inverse));
}

}  // namespace unisono::scales
