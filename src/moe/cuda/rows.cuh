// Rows that a warp copies or quantises, to several places at once.
#pragma once

#include <bit>
#include <type_traits>

#include "base/numeric.hpp"
#include "base/scales.hpp"
#include "cuda/device/codes.cuh"
#include "moe/cuda/segments.cuh"

namespace unisono::moe::gpu {

// Elements that a lane loads and stores at once; in registers as words, of which small elements share one.
template <class T, int kEach>
struct alignas(kEach * sizeof(T)) Pack {
  static constexpr int kOfWord = static_cast<int>(sizeof(std::uint32_t) / sizeof(T));
  __device__ T get(int i) const {
    return std::bit_cast<T>(static_cast<Bits>(words[i / kOfWord] >> (i % kOfWord * kBits)));
  }
  __device__ void set(int i, T value) {
    const auto bits = static_cast<std::uint32_t>(std::bit_cast<Bits>(value)) << (i % kOfWord * kBits);
    words[i / kOfWord] = i % kOfWord == 0 ? bits : words[i / kOfWord] | bits;
  }
  // An initialiser would be loaded from global memory.
  __device__ static Pack zeros() {
    Pack pack;
#pragma unroll
    for (std::uint32_t& word : pack.words) word = 0;
    return pack;
  }
  using Bits = std::conditional_t<sizeof(T) == 1, std::uint8_t,
                                  std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>>;
  static constexpr int kBits = 8 * static_cast<int>(sizeof(T));
  std::uint32_t words[kEach / kOfWord];
};
template <class T>
struct Pack<T, 1> {
  __device__ T get(int) const { return element; }
  __device__ void set(int, T value) { element = value; }
  T element;
};

// A kernel's form: the type of x's elements, and their scales. Rows without scales go as bytes.
template <class T, MoeScales kOfX>
struct Form {
  using Element = T;
  static constexpr MoeScales kScales = kOfX;
};

// Returns what `of` returns for the form of x that `dims` has.
template <class Of>
inline auto by_form(const Dims& dims, const Of& of) {
  using enum MoeScales;
  const auto scaled = [&](auto element) {
    using T = decltype(element);
    return dims.scales == mx ? of(Form<T, mx>{}) : of(Form<T, e4m3_128>{});
  };
  if (dims.scales == none) return of(Form<float, none>{});
  if (dims.dtype == DType::f32) return scaled(float{});
  return dims.dtype == DType::f16 ? scaled(F16{}) : scaled(BF16{});
}

// Where a warp's row goes: rows of ranks.
struct Target {
  int rank;
  std::int32_t row;
};
struct Targets {
  Target of[kMostTopK];
  byte* at[kMostTopK];
};

// Sets where the targets' rows lie in an array of rows of `bytes` bytes. A warp calls it.
__device__ inline void aim(const Work& work, Targets& targets, int count, std::size_t array,
                           std::size_t bytes) {
  __syncwarp();
  if (static_cast<int>(lane()) < count) {
    const Target& target = targets.of[lane()];
    targets.at[lane()] = at<byte>(work, target.rank, array) + static_cast<std::size_t>(target.row) * bytes;
  }
  __syncwarp();
}

// A warp's copy of a segment of a row, by words of one size. Its first words are loaded before their places
// need be known.
template <class Word>
struct RowCopy {
  static constexpr unsigned kAhead = 4;  // words of a lane that are loaded together

  RowCopy() = default;
  __device__ RowCopy(const byte* row, std::uint32_t bytes, unsigned segment, const Segments& share)
      : from(reinterpret_cast<const Word*>(row)) {
    const unsigned words = bytes / static_cast<unsigned>(sizeof(Word));
    const Steps part(words, 32, segment, share);
    next = part.first * 32 + lane();
    end = min(part.end * 32, words);
    load(some);
  }
  __device__ void load(Word (&to)[kAhead]) {
#pragma unroll
    for (unsigned u = 0; u < kAhead; ++u)
      if (next + 32 * u < end) to[u] = from[next + 32 * u];
  }
  __device__ void store(byte* const* to, int count) {
    for (; next < end;) {
      const unsigned i = next;
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        Word* const out = reinterpret_cast<Word*>(to[t]);
#pragma unroll
        for (unsigned u = 0; u < kAhead; ++u)
          if (i + 32 * u < end) out[i + 32 * u] = some[u];
      }
      next += 32 * kAhead;
      load(some);
    }
  }
  const Word* from = nullptr;
  unsigned next = 0, end = 0;
  Word some[kAhead];
};

// Copies a segment of a row. word: bytes of a word by which all addresses and the row can be copied.
__device__ inline void copy_row(const byte* from, byte* const* to, int count, std::uint32_t bytes, int word,
                                unsigned segment, const Segments& share) {
  if (word == 16) RowCopy<uint4>(from, bytes, segment, share).store(to, count);
  else if (word == 4) RowCopy<std::uint32_t>(from, bytes, segment, share).store(to, count);
  else if (word == 2) RowCopy<std::uint16_t>(from, bytes, segment, share).store(to, count);
  else RowCopy<std::uint8_t>(from, bytes, segment, share).store(to, count);
}

__device__ inline void clear_row(byte* at, std::size_t bytes, int word) {
  if (word == 16) {
    for (std::size_t i = lane(); i < bytes / 16; i += 32) reinterpret_cast<uint4*>(at)[i] = {0, 0, 0, 0};
  } else {
    for (std::size_t i = lane(); i < bytes; i += 32) at[i] = byte{0};
  }
}

using cuda::codes_of;

// The result of a block's largest magnitude: the factor of its elements, and its scale. The factor is NaN,
// and so is each code, if an element is not finite.
template <MoeScales kScales>
struct Scale {
  __device__ explicit Scale(std::uint32_t largest) {
    if constexpr (kScales == MoeScales::mx) {
      value = cuda::power_of(largest);
      inverse = scales::finite(largest) ? scales::inverse_of_power(value) : numeric::nan();
    } else {
      value = numeric::as_bits(cuda::scale_of(largest));
      inverse = cuda::inverse_of(largest);
    }
  }
  __device__ void store(byte* row, std::size_t block) const {
    if constexpr (kScales == MoeScales::mx) row[block] = static_cast<byte>(value);
    else reinterpret_cast<std::uint32_t*>(row)[block] = value;
  }
  std::uint32_t value;
  float inverse;
};

// Returns the largest magnitude of a lane's elements, as the bits of an f32.
template <class T, int kEach>
__device__ inline std::uint32_t largest_of(const Pack<T, kEach>& pack) {
  std::uint32_t largest = 0;
  if constexpr (sizeof(T) == 2) {  // two magnitudes of 16 bits at once, whose order is that of the bits
#pragma unroll
    for (const std::uint32_t word : pack.words) largest = __vmaxu2(largest, word & 0x7fff7fffu);
    const auto most = static_cast<std::uint16_t>(max(largest & 0xffffu, largest >> 16));
    return numeric::as_bits(Wide<T>::from(std::bit_cast<T>(most)));
  } else {
#pragma unroll
    for (const std::uint32_t word : pack.words) largest = max(largest, word & 0x7fffffffu);
    return largest;
  }
}

__device__ inline byte* scales_at(const Work& work, const Target& target, std::size_t scales_array) {
  return at<byte>(work, target.rank, scales_array) +
         static_cast<std::size_t>(target.row) * work.dims.scale_bytes;
}

inline constexpr unsigned kSteps = 4;  // of a warp through a row, that are quantised at once

// A warp's elements of some steps, quantised. A lane has kEach elements that follow each other in each step.
template <class T, unsigned kEach, MoeScales kScales>
struct Quantised {
  static constexpr unsigned kLanes = static_cast<unsigned>(kScaleBlock) / kEach;  // of a block

  // Each lane finds the scale of one step, not of all four.
  __device__ explicit Quantised(const Pack<T, kEach> (&elements)[kSteps]) : scale(largest(elements)) {
#pragma unroll
    for (unsigned u = 0; u < kSteps; ++u) {
      const float inverse =
          __shfl_sync(kAllLanes, scale.inverse, static_cast<int>(lane() / kSteps * kSteps + u));
      const auto value = [&](unsigned e) { return Wide<T>::from(elements[u].get(static_cast<int>(e))); };
#pragma unroll
      for (unsigned w = 0; w < kEach / 4; ++w)
        codes[u].words[w] = codes_of(value(4 * w), value(4 * w + 1), inverse) |
                            codes_of(value(4 * w + 2), value(4 * w + 3), inverse) << 16;
    }
  }
  // Returns the largest magnitude of the lane's block in step lane() % kSteps.
  __device__ static std::uint32_t largest(const Pack<T, kEach> (&elements)[kSteps]) {
    std::uint32_t of[kSteps];
#pragma unroll
    for (unsigned u = 0; u < kSteps; ++u) of[u] = largest_of(elements[u]);
    const auto keep = [](bool second, std::uint32_t one, std::uint32_t two, unsigned other) {
      return max(second ? two : one, __shfl_xor_sync(kAllLanes, second ? one : two, other));
    };
    const bool odd = lane() & 1u;
    std::uint32_t most = keep(lane() & 2u, keep(odd, of[0], of[1], 1), keep(odd, of[2], of[3], 1), 2);
#pragma unroll
    for (unsigned other = kSteps; other < kLanes; other *= 2)
      most = max(most, __shfl_xor_sync(kAllLanes, most, other));
    return most;
  }
  // Calls `store` with the scale's block in the row, of steps from `first` on, if the lane is to store it.
  template <class Store>
  __device__ void each_scale(unsigned first, unsigned end, unsigned hidden, const Store& store) const {
    const unsigned step = first + lane() % kSteps;
    const unsigned at = (step * 32 + lane() / kLanes * kLanes) * kEach;
    if (lane() % kLanes < kSteps && step < end && at < hidden) store(at / kScaleBlock);
  }

  Scale<kScales> scale;
  Pack<std::uint8_t, kEach> codes[kSteps];
};

// Quantises a segment of a row to all targets, whose codes lie at `targets.at`.
template <class T, unsigned kEach, MoeScales kScales>
__device__ inline void quantise_wide(const Work& work, const byte* from, const Targets& targets, int count,
                                     std::size_t scales_array, unsigned segment, const Segments& share) {
  constexpr unsigned kStep = 32 * kEach;
  const auto hidden = static_cast<unsigned>(work.dims.hidden);
  const Steps part(hidden, kStep, segment, share);
  const auto read = [&](unsigned step, Pack<T, kEach>(&some)[kSteps]) {
#pragma unroll
    for (unsigned u = 0; u < kSteps; ++u) {
      const unsigned i = (step + u) * kStep + lane() * kEach;
      some[u] = Pack<T, kEach>::zeros();
      if (step + u < part.end && i < hidden)
        some[u] = *reinterpret_cast<const Pack<T, kEach>*>(from + std::size_t{i} * sizeof(T));
    }
  };
  Pack<T, kEach> some[kSteps], next[kSteps];
  read(part.first, some);
  for (unsigned step = part.first; step < part.end; step += kSteps) {
    read(step + kSteps, next);
    const Quantised<T, kEach, kScales> quantised(some);
    for (int t = 0; t < count; ++t)
#pragma unroll
      for (unsigned u = 0; u < kSteps; ++u)
        if (const unsigned i = (step + u) * kStep + lane() * kEach; step + u < part.end && i < hidden)
          *reinterpret_cast<Pack<std::uint8_t, kEach>*>(targets.at[t] + i) = quantised.codes[u];
    quantised.each_scale(step, part.end, hidden, [&](unsigned block) {
      for (int t = 0; t < count; ++t)
        quantised.scale.store(scales_at(work, targets.of[t], scales_array), block);
    });
#pragma unroll
    for (unsigned u = 0; u < kSteps; ++u) some[u] = next[u];
  }
}

// Quantises elements where they lie, in shared memory: their codes begin where they began.
template <class T, MoeScales kScales>
__device__ inline void quantise_in_place(byte* row, byte* scales_to, unsigned count) {
  constexpr unsigned kEach = sizeof(uint4) / sizeof(T), kStep = 32 * kEach;
  const unsigned steps = (count + kStep - 1) / kStep;
#pragma unroll 1
  for (unsigned step = 0; step < steps; step += kSteps) {
    Pack<T, kEach> some[kSteps];
#pragma unroll
    for (unsigned u = 0; u < kSteps; ++u) {
      const unsigned i = (step + u) * kStep + lane() * kEach;
      some[u] = Pack<T, kEach>::zeros();
      if (i < count) some[u] = *reinterpret_cast<const Pack<T, kEach>*>(row + i * sizeof(T));
    }
    __syncwarp();
    const Quantised<T, kEach, kScales> quantised(some);
#pragma unroll
    for (unsigned u = 0; u < kSteps; ++u)
      if (const unsigned i = (step + u) * kStep + lane() * kEach; i < count)
        *reinterpret_cast<Pack<std::uint8_t, kEach>*>(row + i) = quantised.codes[u];
    quantised.each_scale(step, steps, count,
                         [&](unsigned block) { quantised.scale.store(scales_to, block); });
  }
}

// The same element by element: a lane has 4 elements of a block, 32 apart.
template <class T, MoeScales kScales>
__device__ inline void quantise_narrow(const Work& work, const byte* from, const Targets& targets, int count,
                                       std::size_t scales_array, unsigned segment, const Segments& share) {
  constexpr int kMine = static_cast<int>(kScaleBlock) / 32;
  const std::size_t hidden = work.dims.hidden;
  const Steps part(static_cast<unsigned>(scales::blocks_of(hidden)), 1, segment, share);
  for (unsigned block = part.first; block < part.end; ++block) {
    float values[kMine];
    std::uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < kMine; ++e) {
      const std::size_t i = block * kScaleBlock + lane() + 32 * e;
      values[e] = i < hidden ? Wide<T>::from(reinterpret_cast<const T*>(from)[i]) : 0.0f;
      largest = max(largest, numeric::as_bits(values[e]) & 0x7fffffffu);
    }
    const Scale<kScales> scale(__reduce_max_sync(kAllLanes, largest));
    for (int t = 0; t < count; ++t) {
#pragma unroll
      for (int e = 0; e < kMine; ++e)
        if (const std::size_t i = block * kScaleBlock + lane() + 32 * e; i < hidden)
          targets.at[t][i] = static_cast<byte>(codes_of(values[e], 0.0f, scale.inverse));
      if (lane() == 0) scale.store(scales_at(work, targets.of[t], scales_array), block);
    }
  }
}

template <class T, MoeScales kScales>
__device__ inline void quantise_row(const Work& work, const byte* from, const Targets& targets, int count,
                                    std::size_t scales_array, bool wide, unsigned segment,
                                    const Segments& share) {
  constexpr unsigned kEach = sizeof(uint4) / sizeof(T);
  if (wide) quantise_wide<T, kEach, kScales>(work, from, targets, count, scales_array, segment, share);
  else quantise_narrow<T, kScales>(work, from, targets, count, scales_array, segment, share);
  if (kScales != MoeScales::mx || segment != 0) return;
  const Dims& d = work.dims;  // zeros fill up the scales of a row
  for (std::size_t i = scales::blocks_of(d.hidden) + lane(); i < d.scale_bytes; i += 32)
    for (int t = 0; t < count; ++t) scales_at(work, targets.of[t], scales_array)[i] = byte{0};
}

}  // namespace unisono::moe::gpu
