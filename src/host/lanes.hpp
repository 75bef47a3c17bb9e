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

// Returns the bytes from `to` to the first place where a whole vector can be streamed to, at most `bytes`.
inline std::size_t head_of(const byte* to, std::size_t bytes) {
  return std::min((kVector - reinterpret_cast<std::uintptr_t>(to) % kVector) % kVector, bytes);
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

// Orders streaming stores, which are weakly ordered, before the next signal.
inline void drain() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <bool kStream, class V>
inline void put(byte* to, std::size_t i, V value) {
  if constexpr (kStream) stream_vector(to + i * sizeof(V), value);
  else store(to, i, value);
}

// Floats of consecutive elements. Order: that of Lanes<T>, the same in every strip of N vectors.
template <std::size_t N>
struct Strip {
  Floats part[N];
};
constexpr std::size_t kStrip = 4;  // vectors at once
constexpr std::size_t kLine = 64;  // bytes of a cache line

// Asks for the lines of a strip that is read later, except of f32: without conversions loads alone take time.
template <class T>
inline void fetch_strip([[maybe_unused]] const byte* from) {
  if constexpr (sizeof(T) == sizeof(float)) return;
  for (std::size_t at = 0; at < kStrip * kLanes * sizeof(T); at += kLine) __builtin_prefetch(from + at, 0, 2);
}

// Conversions between T in memory and strips. rounded: to T and back. floats: writes them in the order of
// memory.
template <class T>
struct Lanes {
  static constexpr bool kAny = false;  // plain loops do
};

// Lanes whose vectors have consecutive elements, in order. Vector: has widen and narrow, for one vector.
template <class Vector>
struct OrderedLanes {
  static constexpr bool kAny = true;
  template <std::size_t N>
  static Strip<N> widen(const byte* from) {
    Strip<N> strip;
    for (std::size_t k = 0; k < N; ++k) strip.part[k] = Vector::widen(load<typename Vector::Stored>(from, k));
    return strip;
  }
  template <bool kStream = false, std::size_t N>
  static void narrow(byte* to, const Strip<N>& strip) {
    for (std::size_t k = 0; k < N; ++k) put<kStream>(to, k, Vector::narrow(strip.part[k]));
  }
  template <std::size_t N>
  static Strip<N> rounded(Strip<N> strip) {
    for (Floats& part : strip.part) part = Vector::widen(Vector::narrow(part));
    return strip;
  }
  template <std::size_t N>
  static void floats(float* to, const Strip<N>& strip) {
    std::memcpy(to, strip.part, sizeof strip);
  }
};

struct WholeVector {
  using Stored = Floats;
  static Floats widen(Stored from) { return from; }
  static Stored narrow(Floats from) { return from; }
};
template <>
struct Lanes<float> : OrderedLanes<WholeVector> {};

#if defined(__AVX2__)
struct HalfVector {
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
};
template <>
struct Lanes<F16> : OrderedLanes<HalfVector> {};

// Order: of each two vectors the first one has the elements of even numbers, and the second one the others. A
// shift or a mask widens a vector then, and no element changes its place.
template <>
struct Lanes<BF16> {
  static constexpr bool kAny = true;
  template <std::size_t N>
  static Strip<N> widen(const byte* from) {
    Strip<N> strip;
    for (std::size_t k = 0; k < N; k += 2) {
      const auto both = load<Words>(from, k / 2);
      strip.part[k] = std::bit_cast<Floats>(both << 16);
      strip.part[k + 1] = std::bit_cast<Floats>(both & kUpper);
    }
    return strip;
  }
  template <bool kStream = false, std::size_t N>
  static void narrow(byte* to, const Strip<N>& strip) {
    const Strip<N> near = nearest(strip);
    for (std::size_t k = 0; k < N; k += 2) {
      const auto even = std::bit_cast<Words>(near.part[k]), odd = std::bit_cast<Words>(near.part[k + 1]);
      put<kStream>(to, k / 2, even >> 16 | (odd & kUpper));
    }
  }
  template <std::size_t N>
  static Strip<N> rounded(const Strip<N>& strip) {
    Strip<N> near = nearest(strip);
    for (Floats& part : near.part) part = std::bit_cast<Floats>(std::bit_cast<Words>(part) & kUpper);
    return near;
  }
  template <std::size_t N>
  static void floats(float* to, const Strip<N>& strip) {
    for (std::size_t k = 0; k < N; k += 2, to += 2 * kLanes)
      for (std::size_t i = 0; i < kLanes; ++i) {
        to[2 * i] = strip.part[k][i];
        to[2 * i + 1] = strip.part[k + 1][i];
      }
  }

 private:
  static constexpr std::uint32_t kUpper = 0xffff0000u;

  // Returns a strip whose upper halves are the rounded floats.
  template <std::size_t N>
  static Strip<N> nearest(Strip<N> strip) {
    if (has_nan(strip)) [[unlikely]]
      for (Floats& part : strip.part) {
        const auto bits = std::bit_cast<Words>(part);
        part = std::bit_cast<Floats>(part != part ? (bits & kUpper) | 0x400000u : bits);
      }
    for (Floats& part : strip.part) {
      const auto bits = std::bit_cast<Words>(part), raised = bits + 0x7fffu;
#if defined(__AVX512F__)
      const __mmask16 odd = _mm512_test_epi32_mask(std::bit_cast<__m512i>(bits), _mm512_set1_epi32(0x10000));
      const auto at = std::bit_cast<__m512i>(raised);
      part = std::bit_cast<Floats>(_mm512_mask_add_epi32(at, odd, at, _mm512_set1_epi32(1)));
#else
      part = std::bit_cast<Floats>(raised + (bits >> 16 & 1u));
#endif
    }
    return strip;
  }
  template <std::size_t N>
  static bool has_nan(const Strip<N>& strip) {
#if defined(__AVX512F__)
    __mmask16 found = 0;
    for (std::size_t k = 0; k < N; k += 2)
      found |= _mm512_cmp_ps_mask(std::bit_cast<__m512>(strip.part[k]),
                                  std::bit_cast<__m512>(strip.part[k + 1]), _CMP_UNORD_Q);
    return found != 0;
#else
    __m256 found = _mm256_setzero_ps();
    for (std::size_t k = 0; k < N; k += 2)
      found = _mm256_or_ps(found, _mm256_cmp_ps(std::bit_cast<__m256>(strip.part[k]),
                                                std::bit_cast<__m256>(strip.part[k + 1]), _CMP_UNORD_Q));
    return _mm256_movemask_ps(found) != 0;
#endif
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
  const int n = N > 0 ? N : n_srcs;
  std::size_t i = 0;
  for (; i + kStrip * kLanes <= count; i += kStrip * kLanes) {
    const std::size_t here = i * sizeof(T);
    auto sums = Lanes<T>::template widen<kStrip>(srcs[0] + at + here);
#pragma GCC unroll 8
    for (int s = 1; s < n; ++s) {
      const auto next = Lanes<T>::template widen<kStrip>(srcs[s] + at + here);
      for (std::size_t k = 0; k < kStrip; ++k) sums.part[k] = combine_lanes<op>(sums.part[k], next.part[k]);
    }
    if constexpr (op == Op::avg)
      for (Floats& sum : sums.part) sum /= static_cast<float>(n);
    Lanes<T>::template narrow<kStream>(to + here, sums);
  }
  return i;
}

// Reduces a cache line of two sources.
template <class T, Op op>
inline void reduce_line(byte* to, const byte* first, const byte* second) {
  constexpr std::size_t kVectors = kLine / sizeof(T) / kLanes;
  auto sums = Lanes<T>::template widen<kVectors>(first);
  const auto next = Lanes<T>::template widen<kVectors>(second);
  for (std::size_t k = 0; k < kVectors; ++k) {
    sums.part[k] = combine_lanes<op>(sums.part[k], next.part[k]);
    if constexpr (op == Op::avg) sums.part[k] /= 2.0f;
  }
  Lanes<T>::narrow(to, sums);
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
