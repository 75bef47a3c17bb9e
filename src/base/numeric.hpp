// Number formats and reductions, written so that every compiler and instruction set gives the same bits.
// Contracted multiply-adds must be off (-ffp-contract=off, nvcc --fmad=false) and denormals on.
//
// f16, bf16 and fp8 convert exactly to f32 and back with one rounding, to nearest even. Overflow gives
// infinity in f16, bf16 and e5m2; e4m3 has no infinity and gives NaN (OCP 8-bit Floating Point Specification
// 1.0, non-saturating). GPUs convert by an instruction if they have one: a NaN's payload may differ.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/bytes.hpp"
#include "unisono/types.hpp"

namespace unisono {

struct F16 {
  std::uint16_t bits;
};
struct BF16 {
  std::uint16_t bits;
};
struct E4M3 {
  std::uint8_t bits;
};
struct E5M2 {
  std::uint8_t bits;
};

namespace numeric {

UNISONO_PORTABLE inline float as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
UNISONO_PORTABLE inline std::uint32_t as_bits(float value) { return std::bit_cast<std::uint32_t>(value); }
// Returns the NaN that every compiler and GPU makes alike.
UNISONO_PORTABLE inline float nan() { return as_float(0x7fc00000u); }

// A small format of E exponent and M mantissa bits, in the low 1+E+M bits of a word.
template <int E, int M, bool HasInfinity>
struct Format {
  static constexpr std::uint32_t kBias = (1u << (E - 1)) - 1;
  static constexpr std::uint32_t kMagnitude = (1u << (E + M)) - 1;
  static constexpr std::uint32_t kInfinity = ((1u << E) - 1) << M;  // with HasInfinity
  static constexpr std::uint32_t kNan = HasInfinity ? kInfinity | 1u << (M - 1) : kMagnitude;
  static constexpr std::uint32_t kLargest = HasInfinity ? kInfinity - 1 : kMagnitude - 1;
  static constexpr std::uint32_t kOverflow = HasInfinity ? kInfinity : kNan;
  static constexpr int kShift = 23 - M;

  // Widens by one exact multiplication, since the exponent fields differ by the biases. The multiplication
  // also turns denormals into normal numbers.
  UNISONO_PORTABLE static float widen(std::uint32_t word) {
    const std::uint32_t magnitude = word & kMagnitude;
    const float scaled = as_float(magnitude << kShift) * as_float((254u - kBias) << 23);
    const bool special = HasInfinity ? magnitude >= kInfinity : magnitude == kMagnitude;
    const std::uint32_t bits =
        special ? 0x7f800000u | (HasInfinity ? (magnitude & (kInfinity ^ kMagnitude)) << kShift : 0x400000u)
                : as_bits(scaled);
    return as_float(bits | (word & (kMagnitude + 1)) << (31 - E - M));
  }

  UNISONO_PORTABLE static std::uint32_t narrow(float value) {
    const std::uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
    constexpr std::uint32_t least_normal = (128u - kBias) << 23;
    // normal: round to nearest even on the bits, then move the exponent
    const std::uint32_t odd = magnitude >> kShift & 1u;
    const std::uint32_t rounded =
        (magnitude + ((1u << (kShift - 1)) - 1 + odd) - ((127u - kBias) << 23)) >> kShift;
    // denormal: adding a number whose last place is the format's last place rounds in hardware
    constexpr std::uint32_t anchor = (128u - kBias + static_cast<std::uint32_t>(kShift)) << 23;
    const std::uint32_t denormal = as_bits(as_float(magnitude) + as_float(anchor)) - anchor;
    std::uint32_t word = magnitude < least_normal ? denormal : rounded;
    word = magnitude >= least_normal && word > kLargest ? kOverflow : word;
    word = magnitude > 0x7f800000u ? kNan : magnitude == 0x7f800000u ? kOverflow : word;
    return word | (bits >> 31) << (E + M);
  }
};

}  // namespace numeric

// The type in which elements of T are combined, and the conversions to it and back.
template <class T>
struct Wide {
  using type = std::conditional_t<std::is_same_v<T, std::int64_t>, std::uint64_t, T>;
  UNISONO_PORTABLE static type from(T value) { return static_cast<type>(value); }
  UNISONO_PORTABLE static T to(type value) { return static_cast<T>(value); }
};
template <>
struct Wide<F16> {
  using type = float;
  UNISONO_PORTABLE static float from(F16 v) {
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
    return wide;
#else
    return numeric::Format<5, 10, true>::widen(v.bits);
#endif
  }
  UNISONO_PORTABLE static F16 to(float v) {
#ifdef __CUDA_ARCH__
    F16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(v));
    return narrow;
#else
    return {static_cast<std::uint16_t>(numeric::Format<5, 10, true>::narrow(v))};
#endif
  }
};
template <>
struct Wide<BF16> {
  using type = float;
  UNISONO_PORTABLE static float from(BF16 v) {
    return numeric::as_float(static_cast<std::uint32_t>(v.bits) << 16);
  }
  UNISONO_PORTABLE static BF16 to(float v) {
#ifdef __CUDA_ARCH__
    BF16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(v));
    return narrow;
#else
    const std::uint32_t bits = numeric::as_bits(v);
    const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded)};
#endif
  }
};
template <class T, class Format>
struct WideFloat {
  using type = float;
  UNISONO_PORTABLE static float from(T v) { return Format::widen(v.bits); }
  UNISONO_PORTABLE static T to(float v) { return {static_cast<decltype(T::bits)>(Format::narrow(v))}; }
};
template <>
struct Wide<E4M3> : WideFloat<E4M3, numeric::Format<4, 3, false>> {};
template <>
struct Wide<E5M2> : WideFloat<E5M2, numeric::Format<5, 2, true>> {};
// Integers wrap at the end. Their wide sums are exact, as avg needs.
template <class T, class W>
struct WideInteger {
  using type = W;
  UNISONO_PORTABLE static W from(T v) { return v; }
  UNISONO_PORTABLE static T to(W v) { return static_cast<T>(v); }
};
template <>
struct Wide<std::int32_t> : WideInteger<std::int32_t, std::int64_t> {};
template <>
struct Wide<std::int8_t> : WideInteger<std::int8_t, std::int32_t> {};
template <>
struct Wide<std::uint8_t> : WideInteger<std::uint8_t, std::uint32_t> {};

// Combines a, then b. A NaN in either gives NaN. Of equal values (0 and -0) min and max keep the earlier.
template <Op op, class T>
UNISONO_PORTABLE inline typename Wide<T>::type combine(typename Wide<T>::type a, typename Wide<T>::type b) {
  using W = typename Wide<T>::type;
  using Unsigned =
      std::conditional_t<std::is_integral_v<W>, std::make_unsigned<W>, std::type_identity<W>>::type;
  if constexpr (op == Op::band) return a & b;
  if constexpr (op == Op::bor) return a | b;
  if constexpr (op == Op::bxor) return a ^ b;
  if constexpr (op == Op::prod) return static_cast<W>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
  if constexpr (op == Op::min || op == Op::max) {
    using Ordered = std::conditional_t<std::is_same_v<T, std::int64_t>, std::int64_t, W>;
    const auto x = static_cast<Ordered>(a), y = static_cast<Ordered>(b);
    return static_cast<bool>(static_cast<int>(op == Op::min ? y < x : y > x) | static_cast<int>(y != y)) ? b
                                                                                                         : a;
  }
  return static_cast<W>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
}

// Finishes a value after the last combine: avg divides by the number of ranks, truncating integers toward 0.
template <Op op, class T>
UNISONO_PORTABLE inline typename Wide<T>::type finish(typename Wide<T>::type value, int ranks) {
  using W = typename Wide<T>::type;
  if constexpr (op != Op::avg) return value;
  if constexpr (std::is_same_v<T, std::int64_t>)
    return static_cast<W>(static_cast<std::int64_t>(value) / ranks);
  return value / static_cast<W>(ranks);
}

}  // namespace unisono

// Tables [kDTypes][kOps] of F(type, op), in the order of the enumerations: for host memory and for a GPU's.
// Null: there is no such op (has_op).
#define UNISONO_ARITHMETIC(F, T) {F(T, Op::sum), F(T, Op::prod), F(T, Op::min), F(T, Op::max), F(T, Op::avg)}
#define UNISONO_ALL_OPS(F, T)                                   \
  {F(T, Op::sum), F(T, Op::prod), F(T, Op::min), F(T, Op::max), \
   F(T, Op::avg), F(T, Op::band), F(T, Op::bor), F(T, Op::bxor)}
#define UNISONO_ROWS(F, INTEGERS)                                                            \
  {UNISONO_ARITHMETIC(F, float), UNISONO_ARITHMETIC(F, double), UNISONO_ARITHMETIC(F, F16),  \
   UNISONO_ARITHMETIC(F, BF16),  INTEGERS(F, std::int8_t),      INTEGERS(F, std::uint8_t),   \
   INTEGERS(F, std::int32_t),    INTEGERS(F, std::int64_t),     UNISONO_ARITHMETIC(F, E4M3), \
   UNISONO_ARITHMETIC(F, E5M2)}
#define UNISONO_TABLE(F) UNISONO_ROWS(F, UNISONO_ALL_OPS)
#define UNISONO_GPU_TABLE(F) UNISONO_ROWS(F, UNISONO_ARITHMETIC)
