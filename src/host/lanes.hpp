// Floats in vectors, for loops that the compiler vectorises badly (docs/notes/simd.md). Sources are combined
// in registers, and the result may go around the cache from there. The bits are those of numeric.hpp. For
// kernels.cpp only: the meaning depends on the instruction set of the compilation.
#pragma once

#include <bit>
#include <cstring>

#include "base/numeric.hpp"
#include "lane/lane.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono::host::UNISONO_ISA {
namespace {

// The type of elements of which a kernel is made.
template <class T>
constexpr DType kDType = DType::f32;
template <>
constexpr DType kDType<F16> = DType::f16;
template <>
constexpr DType kDType<BF16> = DType::bf16;

#if defined(__AVX512F__)
constexpr std::size_t kVector = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVector = 32;
#else
constexpr std::size_t kVector = 16;
#endif
constexpr std::size_t kLanes = kVector / sizeof(float);

using Bytes [[gnu::vector_size(kVector)]] = unsigned char;
using Floats [[gnu::vector_size(kVector)]] = float;
using Words [[gnu::vector_size(kVector)]] = std::uint32_t;
using Halves [[gnu::vector_size(kVector / 2)]] = std::uint16_t;

template <class T>
inline T load(const byte* at, std::size_t i) {
  T value;
  std::memcpy(&value, at + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
inline void store(byte* at, std::size_t i, T value) {
  std::memcpy(at + i * sizeof(T), &value, sizeof(T));
}

// Stores around the cache. Requires: `to` is a multiple of the vector's size. Order: weak, see `drain`.
template <class V>
inline void stream_vector(byte* to, V value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), std::bit_cast<__m512i>(value));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), std::bit_cast<__m256i>(value));
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 16)
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), std::bit_cast<__m128i>(value));
#endif
  store<V>(to, 0, value);
}

// A vector of T in memory, and its conversions to f32 and back. rounded: both, one after the other.
template <class T>
struct Lanes {
  static constexpr bool kAny = false;  // plain loops do
};
template <>
struct Lanes<float> {
  static constexpr bool kAny = true;
  using Stored = Floats;
  static Floats widen(Stored from) { return from; }
  static Stored narrow(Floats from) { return from; }
  static Floats rounded(Floats from) { return from; }
};
#if defined(__AVX2__)
template <>
struct Lanes<F16> {
  static constexpr bool kAny = true;
  using Stored = Halves;
#if defined(__AVX512F__)
  static Floats widen(Stored from) {
    return std::bit_cast<Floats>(_mm512_cvtph_ps(std::bit_cast<__m256i>(from)));
  }
  static Stored narrow(Floats from) {
    return std::bit_cast<Stored>(_mm512_cvtps_ph(std::bit_cast<__m512>(from), _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static Floats widen(Stored from) {
    return std::bit_cast<Floats>(_mm256_cvtph_ps(std::bit_cast<__m128i>(from)));
  }
  static Stored narrow(Floats from) {
    return std::bit_cast<Stored>(_mm256_cvtps_ph(std::bit_cast<__m256>(from), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  static Floats rounded(Floats from) { return widen(narrow(from)); }
};
template <>
struct Lanes<BF16> {
  static constexpr bool kAny = true;
  using Stored = Halves;
  static Floats widen(Stored from) {
#if defined(__AVX512F__)
    const auto words = std::bit_cast<Words>(_mm512_cvtepu16_epi32(std::bit_cast<__m256i>(from)));
#else
    const auto words = std::bit_cast<Words>(_mm256_cvtepu16_epi32(std::bit_cast<__m128i>(from)));
#endif
    return std::bit_cast<Floats>(words << 16);
  }
  static Stored narrow(Floats from) {
    const Words words = nearest(from) >> 16;
#if defined(__AVX512F__)
    return std::bit_cast<Stored>(_mm512_cvtepi32_epi16(std::bit_cast<__m512i>(words)));
#else
    const auto both = std::bit_cast<__m256i>(words);
    return std::bit_cast<Stored>(
        _mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
#endif
  }
  static Floats rounded(Floats from) { return std::bit_cast<Floats>(nearest(from) & 0xffff0000u); }

 private:
  // Returns words whose upper halves are the rounded floats.
  static Words nearest(Floats from) {
    const auto bits = std::bit_cast<Words>(from);
    return from != from ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
  }
};
#endif

// Combines as `combine` of numeric.hpp does.
template <Op op>
Floats combine_lanes(Floats a, Floats b) {
  if constexpr (op == Op::prod) return a * b;
  if constexpr (op == Op::min) return ((b < a) | (b != b)) ? b : a;
  if constexpr (op == Op::max) return ((b > a) | (b != b)) ? b : a;
  return a + b;
}

// Reduces as many of `count` elements as fill vectors. Returns their number. N: the number of sources; 0: any
// number. If the compiler knows N, each source has its own load instructions, by which the processor's
// prefetchers tell the streams apart.
template <class T, Op op, bool kStream, int N>
std::size_t reduce_n_lanes(byte* to, const byte* const* srcs, int n_srcs, std::size_t at, std::size_t count) {
  using Stored = typename Lanes<T>::Stored;
  constexpr std::size_t kStrip = 4;  // vectors at once
  const int n = N > 0 ? N : n_srcs;
  std::size_t i = 0;
  for (; i + kStrip * kLanes <= count; i += kStrip * kLanes) {
    const std::size_t here = i * sizeof(T);
    Floats sums[kStrip];
    for (std::size_t k = 0; k < kStrip; ++k) sums[k] = Lanes<T>::widen(load<Stored>(srcs[0] + at + here, k));
#pragma GCC unroll 8
    for (int s = 1; s < n; ++s)
      for (std::size_t k = 0; k < kStrip; ++k)
        sums[k] = combine_lanes<op>(sums[k], Lanes<T>::widen(load<Stored>(srcs[s] + at + here, k)));
    for (std::size_t k = 0; k < kStrip; ++k) {
      if constexpr (op == Op::avg) sums[k] /= static_cast<float>(n);
      const Stored result = Lanes<T>::narrow(sums[k]);
      if constexpr (kStream) stream_vector(to + here + k * sizeof(Stored), result);
      else store<Stored>(to + here, k, result);
    }
  }
  return i;
}
constexpr std::size_t kLine = 64;  // bytes of a cache line

// Reduces a cache line of two sources.
template <class T, Op op>
inline void reduce_line(byte* to, const byte* first, const byte* second) {
  using Stored = typename Lanes<T>::Stored;
  for (std::size_t v = 0; v < kLine / sizeof(Stored); ++v) {
    Floats sum =
        combine_lanes<op>(Lanes<T>::widen(load<Stored>(first, v)), Lanes<T>::widen(load<Stored>(second, v)));
    if constexpr (op == Op::avg) sum /= 2.0f;
    store<Stored>(to, v, Lanes<T>::narrow(sum));
  }
}
template <class T, Op op, bool kStream>
std::size_t reduce_lanes(byte* to, const byte* const* srcs, int n_srcs, std::size_t at, std::size_t count) {
  switch (n_srcs) {
    case 2: return reduce_n_lanes<T, op, kStream, 2>(to, srcs, 2, at, count);
    case 4: return reduce_n_lanes<T, op, kStream, 4>(to, srcs, 4, at, count);
    case 8: return reduce_n_lanes<T, op, kStream, 8>(to, srcs, 8, at, count);
    default: return reduce_n_lanes<T, op, kStream, 0>(to, srcs, n_srcs, at, count);
  }
}

}  // namespace
}  // namespace unisono::host::UNISONO_ISA
