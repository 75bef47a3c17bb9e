// A reference for numbers and reductions without the library's numeric.hpp: by ldexp, and in wider types.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "unisono/types.hpp"

namespace unisono::test {

using Bytes = std::vector<std::byte>;

// Returns the dtypes with the ops that they have, in that memory.
inline std::vector<std::pair<DType, Op>> kinds(Memory memory = Memory::host) {
  std::vector<std::pair<DType, Op>> all;
  for (int d = 0; d < kDTypes; ++d)
    for (int o = 0; o < kOps; ++o)
      if (const auto dtype = static_cast<DType>(d); has_op(dtype, static_cast<Op>(o), memory))
        all.emplace_back(dtype, static_cast<Op>(o));
  return all;
}
// Returns a name of a test: "f16_sum".
inline std::string name_of(const std::pair<DType, Op>& kind) {
  return std::string(unisono::name_of(kind.first)) + "_" + std::string(unisono::name_of(kind.second));
}

// A format of sign, `exponent` and `mantissa` bits.
struct Format {
  int exponent, mantissa;
  bool infinity;
  int bias() const { return (1 << (exponent - 1)) - 1; }
};
inline constexpr Format kF16{5, 10, true}, kBF16{8, 7, true}, kE4M3{4, 3, false}, kE5M2{5, 2, true};

inline double decode(const Format& f, std::uint32_t word) {
  const std::uint32_t m = word & ((1u << f.mantissa) - 1), top = (1u << f.exponent) - 1;
  const std::uint32_t e = word >> f.mantissa & top;
  const double sign = word >> (f.exponent + f.mantissa) & 1 ? -1 : 1;
  if (e == top && f.infinity) return m ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  if (e == top && m == (1u << f.mantissa) - 1) return std::numeric_limits<double>::quiet_NaN();  // e4m3
  if (e == 0) return sign * std::ldexp(m, 1 - f.bias() - f.mantissa);
  return sign * std::ldexp(m + (1u << f.mantissa), static_cast<int>(e) - f.bias() - f.mantissa);
}

// Rounds to nearest, ties to even. Returns a NaN for NaN and, in e4m3, for overflow.
inline std::uint32_t encode(const Format& f, double value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(std::signbit(value)) << (f.exponent + f.mantissa);
  const std::uint32_t top = ((1u << f.exponent) - 1) << f.mantissa, nan = top | ((1u << f.mantissa) - 1);
  if (std::isnan(value)) return sign | nan;
  const double magnitude = std::fabs(value), largest = decode(f, f.infinity ? top - 1 : nan - 1);
  const std::uint32_t overflow = f.infinity ? top : nan;
  if (std::isinf(magnitude)) return sign | overflow;
  if (magnitude == 0) return sign;
  const int e = std::max(std::ilogb(magnitude), 1 - f.bias());
  const double steps = std::nearbyint(std::ldexp(magnitude, f.mantissa - e));  // of the last place
  if (std::ldexp(steps, e - f.mantissa) > largest) return sign | overflow;
  // the addition carries into the next binade, also from the denormals
  const bool denormal = steps < std::ldexp(1, f.mantissa);
  const std::uint32_t before = denormal ? 0 : static_cast<std::uint32_t>(e + f.bias() - 1) << f.mantissa;
  return sign | (before + static_cast<std::uint32_t>(steps));
}

inline const Format* format_of(DType dtype) {
  switch (dtype) {
    case DType::f16: return &kF16;
    case DType::bf16: return &kBF16;
    case DType::f8e4m3: return &kE4M3;
    case DType::f8e5m2: return &kE5M2;
    default: return nullptr;
  }
}

template <class T>
T get(const std::byte* at, std::size_t i) {
  T value;
  std::memcpy(&value, at + i * sizeof value, sizeof value);
  return value;
}
template <class T>
void put(std::byte* at, std::size_t i, T value) {
  std::memcpy(at + i * sizeof value, &value, sizeof value);
}

inline std::uint32_t word_at(const std::byte* at, std::size_t i, std::size_t bytes) {
  return bytes == 2 ? get<std::uint16_t>(at, i) : get<std::uint8_t>(at, i);
}

template <class Real>
Real combined(Op op, Real a, Real b) {
  if (op == Op::prod) return a * b;
  if (op == Op::min || op == Op::max) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<Real>::quiet_NaN();
    return (op == Op::min ? b < a : b > a) ? b : a;
  }
  return a + b;
}

// Combines reals one after the other in Real. `write` rounds the result.
template <class Real, class Read, class Write>
void reduce_reals(Op op, const std::vector<const std::byte*>& srcs, std::size_t count, const Read& read,
                  const Write& write) {
  for (std::size_t i = 0; i < count; ++i) {
    Real sum = read(srcs[0], i);
    for (std::size_t s = 1; s < srcs.size(); ++s) sum = combined<Real>(op, sum, read(srcs[s], i));
    write(i, op == Op::avg ? sum / static_cast<Real>(srcs.size()) : sum);
  }
}

// Combines integers exactly if 64 bits hold the result, otherwise modulo 2^64. Writes the low bits.
template <class T>
void reduce_integers(Op op, const std::vector<const std::byte*>& srcs, std::size_t count, std::byte* out) {
  for (std::size_t i = 0; i < count; ++i) {
    auto value = static_cast<std::int64_t>(get<T>(srcs[0], i));
    for (std::size_t s = 1; s < srcs.size(); ++s) {
      const auto next = static_cast<std::int64_t>(get<T>(srcs[s], i));
      const auto a = static_cast<std::uint64_t>(value), b = static_cast<std::uint64_t>(next);
      if (op == Op::band) value &= next;
      else if (op == Op::bor) value |= next;
      else if (op == Op::bxor) value ^= next;
      else if (op == Op::min) value = std::min(value, next);
      else if (op == Op::max) value = std::max(value, next);
      else value = static_cast<std::int64_t>(op == Op::prod ? a * b : a + b);
    }
    put<T>(out, i, static_cast<T>(op == Op::avg ? value / static_cast<std::int64_t>(srcs.size()) : value));
  }
}

inline Bytes reduced(DType dtype, Op op, const std::vector<const std::byte*>& srcs, std::size_t count) {
  const std::size_t size = size_of(dtype);
  Bytes out(count * size);
  if (const Format* f = format_of(dtype)) {
    reduce_reals<float>(
        op, srcs, count,
        [&](const std::byte* at, std::size_t i) {
          return static_cast<float>(decode(*f, word_at(at, i, size)));
        },
        [&](std::size_t i, float value) {
          const std::uint32_t word = encode(*f, value);
          if (size == 2) put(out.data(), i, static_cast<std::uint16_t>(word));
          else put(out.data(), i, static_cast<std::uint8_t>(word));
        });
    return out;
  }
  switch (dtype) {
    case DType::f32:
      reduce_reals<float>(op, srcs, count, get<float>,
                          [&](std::size_t i, float v) { put(out.data(), i, v); });
      break;
    case DType::f64:
      reduce_reals<double>(op, srcs, count, get<double>,
                           [&](std::size_t i, double v) { put(out.data(), i, v); });
      break;
    case DType::i8: reduce_integers<std::int8_t>(op, srcs, count, out.data()); break;
    case DType::u8: reduce_integers<std::uint8_t>(op, srcs, count, out.data()); break;
    case DType::i32: reduce_integers<std::int32_t>(op, srcs, count, out.data()); break;
    default: reduce_integers<std::int64_t>(op, srcs, count, out.data());
  }
  return out;
}

// Multiplies reals in f32 (f64: in f64), and rounds each to its dtype.
inline Bytes scaled(DType dtype, const Bytes& from, double factor) {
  const std::size_t size = size_of(dtype);
  Bytes out(from.size());
  for (std::size_t i = 0; i < from.size() / size; ++i) {
    if (dtype == DType::f64) {
      put(out.data(), i, get<double>(from.data(), i) * factor);
      continue;
    }
    const Format* f = format_of(dtype);
    const float value =
        f ? static_cast<float>(decode(*f, word_at(from.data(), i, size))) : get<float>(from.data(), i);
    const float product = value * static_cast<float>(factor);
    if (f) put(out.data(), i, static_cast<std::uint16_t>(encode(*f, product)));
    else put(out.data(), i, product);
  }
  return out;
}

inline bool is_nan(DType dtype, const std::byte* at, std::size_t i) {
  if (const Format* f = format_of(dtype)) return std::isnan(decode(*f, word_at(at, i, size_of(dtype))));
  if (dtype == DType::f32) return std::isnan(get<float>(at, i));
  return dtype == DType::f64 && std::isnan(get<double>(at, i));
}

// Returns the first element whose bits differ; -1: none. All NaNs are alike.
inline long first_difference(DType dtype, const std::byte* a, const std::byte* b, std::size_t count) {
  const std::size_t size = size_of(dtype);
  if (count == 0 || std::memcmp(a, b, count * size) == 0) return -1;
  for (std::size_t i = 0; i < count; ++i)
    if (std::memcmp(a + i * size, b + i * size, size) != 0 && !(is_nan(dtype, a, i) && is_nan(dtype, b, i)))
      return static_cast<long>(i);
  return -1;
}

// Returns random bits: as floats they have every class of number.
inline Bytes random_bytes(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes made(bytes + 8);
  for (std::size_t i = 0; i < bytes; i += 8) put(made.data() + i, 0, static_cast<std::uint64_t>(random()));
  made.resize(bytes);
  return made;
}

}  // namespace unisono::test
