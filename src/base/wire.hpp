// The wire form of quantised collectives: a byte for each element and a power of two for each block of 32, as
// in MXFP8 and MXINT8 (OCP Microscaling Formats 1.0). In those the largest elements of a block may saturate.
// Here the scale is the next power of two instead: every element is within half a step.
//
// Scaling by powers of two is exact: every compiler, instruction set and lane gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"
#include "base/numeric.hpp"

namespace unisono::wire {

inline constexpr std::size_t kBlock = 32;
inline constexpr std::uint32_t kNan = 255;  // the scale of a block with an infinity or a NaN

UNISONO_PORTABLE constexpr std::size_t blocks_of(std::size_t count) { return (count + kBlock - 1) / kBlock; }
// Returns the bytes of `count` elements: a byte for each, zeros up to whole blocks, then the blocks' scales.
UNISONO_PORTABLE constexpr std::size_t bytes_of(std::size_t count) { return blocks_of(count) * (kBlock + 1); }
UNISONO_PORTABLE constexpr std::size_t count_in(std::size_t bytes) { return bytes / (kBlock + 1) * kBlock; }

// A number format of one byte. The scale brings a block's largest magnitude to 2^kTop or more, below the
// values that round past the format's largest. kCarry carries the 23-bit mantissas of those to the next
// power.
struct Int8 {
  static constexpr std::uint32_t kTop = 6, kCarry = 0x010000;  // 64 to 127.5
  // Adding 1.5·2^23 rounds to an integer, to nearest even, in the low bits.
  UNISONO_PORTABLE static std::uint8_t encode(float value) {
    return static_cast<std::uint8_t>(numeric::as_bits(value + 12582912.0f));
  }
  UNISONO_PORTABLE static float decode(std::uint8_t code) {
    return static_cast<float>(static_cast<std::int8_t>(code));
  }
};
struct Fp8 {
  using Format = numeric::Format<4, 3, false>;
  static constexpr std::uint32_t kTop = 8, kCarry = 0x180000;  // 256 to 464
  UNISONO_PORTABLE static std::uint8_t encode(float value) {
    return static_cast<std::uint8_t>(Format::narrow(value));
  }
  UNISONO_PORTABLE static float decode(std::uint8_t code) { return Format::widen(code); }
};

// Returns the scale of a block: 2^(scale-127) is a step of the format, at least 2^-126. largest: the bits, as
// f32, of the block's largest magnitude.
template <class Code>
UNISONO_PORTABLE inline std::uint32_t scale_of(std::uint32_t largest) {
  const std::uint32_t exponent = (largest + Code::kCarry) >> 23;
  return largest >= 0x7f800000u ? kNan : exponent > Code::kTop ? exponent - Code::kTop : 1;
}
// Returns the factor for codes; inverse_of returns the factor for elements before they are encoded.
UNISONO_PORTABLE inline float step_of(std::uint32_t scale) {
  return scale == kNan ? numeric::nan() : numeric::as_float(scale << 23);
}
UNISONO_PORTABLE inline float inverse_of(std::uint32_t scale) {
  return numeric::as_float(scale == kNan ? 0 : (254u - scale) << 23);
}

}  // namespace unisono::wire
