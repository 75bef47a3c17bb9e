// Norms, compiled once for each instruction set, which UNISONO_ISA names.
#include "host/norms.hpp"

#include <algorithm>
#include <cstring>

#include "base/norm.hpp"
#include "host/lanes.hpp"
#include "host/move.hpp"

namespace unisono::host::UNISONO_ISA {

extern const Rows rows;  // of rows.cpp

namespace {

constexpr std::size_t kPartials = norm::kPartials;
constexpr std::size_t kStep = 256;  // elements; their wide values stay in the first-level cache

// ---- join ----

inline void add(Strip<kStrip>& sums, const Strip<kStrip>& more) {
  for (std::size_t k = 0; k < kStrip; ++k) sums.part[k] += more.part[k];
}

// Joins as many of `count` elements as fill vectors. Returns their number. N: as reduce_n_lanes has it.
template <class T, int N>
std::size_t join_lanes(byte* out, const byte* const* srcs, int n_srcs, const byte* residual,
                       std::size_t count) {
  const int n = N > 0 ? N : n_srcs;
  std::size_t i = 0;
  for (; i + kStrip * kLanes <= count; i += kStrip * kLanes) {
    const std::size_t here = i * sizeof(T);
    auto sums = Lanes<T>::template widen<kStrip>(srcs[0] + here);
#pragma GCC unroll 8
    for (int s = 1; s < n; ++s) add(sums, Lanes<T>::template widen<kStrip>(srcs[s] + here));
    sums = Lanes<T>::rounded(sums);
    add(sums, Lanes<T>::template widen<kStrip>(residual + here));
    Lanes<T>::narrow(out + here, sums);
  }
  return i;
}

template <class T>
void join(byte* out, const byte* const* srcs, int n, const byte* residual, std::size_t count) {
  std::size_t at = 0;
  if constexpr (Lanes<T>::kAny) {
    switch (n) {
      case 1: at = join_lanes<T, 1>(out, srcs, 1, residual, count); break;
      case 2: at = join_lanes<T, 2>(out, srcs, 2, residual, count); break;
      case 4: at = join_lanes<T, 4>(out, srcs, 4, residual, count); break;
      case 8: at = join_lanes<T, 8>(out, srcs, 8, residual, count); break;
      default: at = join_lanes<T, 0>(out, srcs, n, residual, count);
    }
  }
  float sums[kStep];
  for (; at < count; at += kStep) {
    const std::size_t length = std::min(kStep, count - at), here = at * sizeof(T);
    for (std::size_t i = 0; i < length; ++i) sums[i] = Wide<T>::from(load<T>(srcs[0] + here, i));
    for (int s = 1; s < n; ++s)
      for (std::size_t i = 0; i < length; ++i) sums[i] = sums[i] + Wide<T>::from(load<T>(srcs[s] + here, i));
    for (std::size_t i = 0; i < length; ++i)
      sums[i] = Wide<T>::from(Wide<T>::to(sums[i])) + Wide<T>::from(load<T>(residual + here, i));
    for (std::size_t i = 0; i < length; ++i) store<T>(out + here, i, Wide<T>::to(sums[i]));
  }
}

// ---- normalise ----

enum class Term { plain, square, centred_square };

// V: float or Floats.
template <Term term, class V>
inline V term_of(V value, float mean) {
  if constexpr (term == Term::plain) return value;
  const V centred = term == Term::centred_square ? value - mean : value;
  return centred * centred;
}

inline float total_of(float* partials) {
  auto* const at = reinterpret_cast<byte*>(partials);
  std::size_t width = kPartials / 2;
  for (; width >= kLanes; width /= 2)
    for (std::size_t j = 0; j < width; j += kLanes)
      store<Floats>(
          at + j * sizeof(float), 0,
          load<Floats>(at + j * sizeof(float), 0) + load<Floats>(at + (j + width) * sizeof(float), 0));
  for (; width > 0; width /= 2)
    for (std::size_t j = 0; j < width; ++j) partials[j] = partials[j] + partials[j + width];
  return partials[0];
}

// Returns the sum of a row's terms, in the order of base/norm.hpp.
template <class T, Term term>
float sum_of(const byte* row, float mean, std::size_t count) {
  alignas(64) float partials[kPartials];
  if constexpr (Lanes<T>::kAny) {
    constexpr std::size_t kColumns = kStrip * kLanes;  // partial sums that are in registers at once
    for (std::size_t column = 0; column < kPartials; column += kColumns) {
      Strip<kStrip> sums = {};
      std::size_t i = column;
      for (; i + kColumns <= count; i += kPartials) {
        const auto values = Lanes<T>::template widen<kStrip>(row + i * sizeof(T));
        for (std::size_t k = 0; k < kStrip; ++k) sums.part[k] += term_of<term>(values.part[k], mean);
      }
      Lanes<T>::floats(partials + column, sums);
      for (std::size_t k = i; k < std::min(count, i + kColumns); ++k)
        partials[column + k - i] =
            partials[column + k - i] + term_of<term>(Wide<T>::from(load<T>(row, k)), mean);
    }
  } else {
    std::memset(partials, 0, sizeof partials);
    for (std::size_t i = 0; i < count; i += kPartials) {
      const std::size_t length = std::min(kPartials, count - i);
      for (std::size_t k = 0; k < length; ++k)
        partials[k] = partials[k] + term_of<term>(Wide<T>::from(load<T>(row + i * sizeof(T), k)), mean);
    }
  }
  return total_of(partials);
}

// V: float or Floats.
template <Norm kind, class V>
inline V normalised(V value, float mean, float factor, V weight) {
  return (kind == Norm::layer ? value - mean : value) * factor * weight;
}

template <class T, Norm kind, bool kBias>
void scale_elements(byte* out, const byte* row, const NormParameters& p, float mean, float factor,
                    std::size_t at, std::size_t end) {
  float values[kStep];
  for (; at < end; at += kStep) {
    const std::size_t length = std::min(kStep, end - at), here = at * sizeof(T);
    for (std::size_t i = 0; i < length; ++i)
      values[i] = normalised<kind>(Wide<T>::from(load<T>(row + here, i)), mean, factor,
                                   Wide<T>::from(load<T>(p.weight + here, i)));
    if constexpr (kBias)
      for (std::size_t i = 0; i < length; ++i)
        values[i] = values[i] + Wide<T>::from(load<T>(p.bias + here, i));
    for (std::size_t i = 0; i < length; ++i) store<T>(out + here, i, Wide<T>::to(values[i]));
  }
}

// kStream: `out` is a multiple of sizeof(T).
template <class T, Norm kind, bool kBias, bool kStream>
void scale_row(byte* out, const byte* row, const byte* next, const NormParameters& p, float mean,
               float factor, std::size_t count) {
  std::size_t at = 0;
  if constexpr (Lanes<T>::kAny) {
    if constexpr (kStream) {
      at = head_of(out, count * sizeof(T)) / sizeof(T);
      scale_elements<T, kind, kBias>(out, row, p, mean, factor, 0, at);
    }
    for (; at + kStrip * kLanes <= count; at += kStrip * kLanes) {
      const std::size_t here = at * sizeof(T);
      fetch_strip<T>(next + here);
      auto values = Lanes<T>::template widen<kStrip>(row + here);
      const auto weights = Lanes<T>::template widen<kStrip>(p.weight + here);
      for (std::size_t k = 0; k < kStrip; ++k)
        values.part[k] = normalised<kind>(values.part[k], mean, factor, weights.part[k]);
      if constexpr (kBias) add(values, Lanes<T>::template widen<kStrip>(p.bias + here));
      Lanes<T>::template narrow<kStream>(out + here, values);
    }
  }
  scale_elements<T, kind, kBias>(out, row, p, mean, factor, at, count);
  if constexpr (kStream) drain();
}

template <class T, Norm kind>
void normalise(byte* out, const byte* row, const byte* next, const NormParameters& p, std::size_t count) {
  float mean = 0, squares;
  if constexpr (kind == Norm::layer) {
    mean = norm::mean_of(sum_of<T, Term::plain>(row, 0, count), count);
    squares = sum_of<T, Term::centred_square>(row, mean, count);
  } else {
    squares = sum_of<T, Term::square>(row, 0, count);
  }
  const float factor = norm::factor_of(norm::mean_of(squares, count), p.eps);
  const bool stream = p.stream && reinterpret_cast<std::uintptr_t>(out) % sizeof(T) == 0;
  static constexpr decltype(&scale_row<T, kind, false, false>) kScale[2][2] = {
      {scale_row<T, kind, false, false>, scale_row<T, kind, false, true>},
      {scale_row<T, kind, true, false>, scale_row<T, kind, true, true>}};
  kScale[p.bias != nullptr][stream](out, row, next, p, mean, factor, count);
}

// ---- quantise ----

// Calls take(values, begin, length) for each block of a row, whose last one is filled up with zeros. The
// compiler knows a block's length.
template <class T, class Take>
void by_blocks(const byte* row, std::size_t count, const Take& take) {
  for (std::size_t begin = 0; begin < count; begin += kStep) {
    const std::size_t length = std::min(kStep, count - begin);
    T elements[kStep];
    if (length == kStep) {
      std::memcpy(elements, row + begin * sizeof(T), sizeof elements);
    } else {
      std::memset(elements, 0, sizeof elements);
      std::memcpy(elements, row + begin * sizeof(T), length * sizeof(T));
    }
    float values[kStep];
    for (std::size_t i = 0; i < kStep; ++i) values[i] = Wide<T>::from(elements[i]);
    take(values, begin, length);
  }
}

template <class T>
void quantise_by_scale(byte* codes, byte*, const byte* row, float inverse, std::size_t count) {
  by_blocks<T>(row, count, [&](const float* values, std::size_t begin, std::size_t length) {
    std::uint8_t block[kStep];
    for (std::size_t i = 0; i < kStep; ++i) block[i] = norm::saturated_code_of(values[i], inverse);
    std::memcpy(codes + begin, block, length);
  });
}

template <class T>
void quantise_by_row(byte* codes, byte* scale, const byte* row, float, std::size_t count) {
  std::uint32_t largest = 0;
  by_blocks<T>(row, count, [&](const float* values, std::size_t, std::size_t) {
    std::uint32_t here = 0;
    for (std::size_t i = 0; i < kStep; ++i) here = std::max(here, numeric::as_bits(values[i]) & 0x7fffffffu);
    largest = std::max(largest, here);
  });
  store(scale, 0, scales::scale_of(largest));
  if (!scales::finite(largest)) return void(std::memset(codes, scales::kNanCode, count));
  quantise_by_scale<T>(codes, nullptr, row, scales::inverse_of(largest), count);
}

template <class T, MoeScales form>
void quantise_by_block(byte* codes, byte* block_scales, const byte* row, float, std::size_t count) {
  rows.quantise[static_cast<int>(kDType<T>)][static_cast<int>(form)](codes, block_scales, row, count);
}

#define UNISONO_NORMALISE(T) {normalise<T, Norm::rms>, normalise<T, Norm::layer>}
#define UNISONO_QUANTISE(T)                                                                      \
  {nullptr, quantise_by_scale<T>, quantise_by_row<T>, quantise_by_block<T, MoeScales::e4m3_128>, \
   quantise_by_block<T, MoeScales::mx>}

}  // namespace

extern const Norms norms;
const Norms norms = {{join<float>, nullptr, join<F16>, join<BF16>},
                     {UNISONO_NORMALISE(float), {}, UNISONO_NORMALISE(F16), UNISONO_NORMALISE(BF16)},
                     {UNISONO_QUANTISE(float), {}, UNISONO_QUANTISE(F16), UNISONO_QUANTISE(BF16)}};

}  // namespace unisono::host::UNISONO_ISA
