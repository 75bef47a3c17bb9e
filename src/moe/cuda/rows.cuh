// Rows that a warp copies or quantises, to several places at once.
#pragma once

#include <bit>
#include <type_traits>

#include "base/numeric.hpp"
#include "base/scales.hpp"
#include "cuda/device/codes.cuh"
#include "moe/cuda/device.cuh"

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

// The part of a row that a warp has: from first to end, in steps of the warp.
struct Part {
  __device__ Part(std::size_t steps, unsigned segment, unsigned segments) {
    const std::size_t share = (steps + segments - 1) / segments;
    first = min(segment * share, steps);
    end = min(first + share, steps);
  }
  std::size_t first, end;
};

// Returns in how many segments the grid's warps have each of so many rows.
__device__ inline unsigned segments_of(unsigned rows) {
  return max(1u, min(warps_of_grid() / max(rows, 1u), 16u));
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

template <class Word>
__device__ inline void copy_words(const byte* from, byte* const* to, int count, std::size_t bytes,
                                  unsigned segment, unsigned segments) {
  constexpr int kAhead = 4;  // words that a lane loads before it stores the first
  const std::size_t words = bytes / sizeof(Word);
  const Part part((words + 31) / 32, segment, segments);
  const std::size_t end = min(part.end * 32, words);
  for (std::size_t i = part.first * 32 + lane(); i < end; i += 32 * kAhead) {
    Word some[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (i + 32 * u < end) some[u] = reinterpret_cast<const Word*>(from)[i + 32 * u];
    for (int t = 0; t < count; ++t) {
      Word* const out = reinterpret_cast<Word*>(to[t]);
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        if (i + 32 * u < end) out[i + 32 * u] = some[u];
    }
  }
}

// Copies a segment of a row. word: bytes of a word by which all addresses and the row can be copied.
__device__ inline void copy_row(const byte* from, byte* const* to, int count, std::size_t bytes, int word,
                                unsigned segment, unsigned segments) {
  if (word == 16) copy_words<uint4>(from, to, count, bytes, segment, segments);
  else if (word == 4) copy_words<std::uint32_t>(from, to, count, bytes, segment, segments);
  else if (word == 2) copy_words<std::uint16_t>(from, to, count, bytes, segment, segments);
  else copy_words<std::uint8_t>(from, to, count, bytes, segment, segments);
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
  template <class Index, class Store>
  __device__ void each_scale(Index first, Index end, Index hidden, const Store& store) const {
    const Index step = first + lane() % kSteps;
    const Index at = (step * 32 + lane() / kLanes * kLanes) * kEach;
    if (lane() % kLanes < kSteps && step < end && at < hidden) store(at / kScaleBlock);
  }

  Scale<kScales> scale;
  Pack<std::uint8_t, kEach> codes[kSteps];
};

// Quantises a segment of a row to all targets, whose codes lie at `targets.at`.
template <class T, unsigned kEach, MoeScales kScales>
__device__ inline void quantise_wide(const Work& work, const byte* from, const Targets& targets, int count,
                                     std::size_t scales_array, unsigned segment, unsigned segments) {
  constexpr std::size_t kStep = 32 * kEach;
  const std::size_t hidden = work.dims.hidden;
  const Part part((hidden + kStep - 1) / kStep, segment, segments);
  const auto read = [&](std::size_t step, Pack<T, kEach>(&some)[kSteps]) {
#pragma unroll
    for (unsigned u = 0; u < kSteps; ++u) {
      const std::size_t i = (step + u) * kStep + lane() * kEach;
      some[u] = Pack<T, kEach>::zeros();
      if (step + u < part.end && i < hidden)
        some[u] = *reinterpret_cast<const Pack<T, kEach>*>(from + i * sizeof(T));
    }
  };
  Pack<T, kEach> some[kSteps], next[kSteps];
  read(part.first, some);
  for (std::size_t step = part.first; step < part.end; step += kSteps) {
    read(step + kSteps, next);
    const Quantised<T, kEach, kScales> quantised(some);
    for (int t = 0; t < count; ++t)
#pragma unroll
      for (unsigned u = 0; u < kSteps; ++u)
        if (const std::size_t i = (step + u) * kStep + lane() * kEach; step + u < part.end && i < hidden)
          *reinterpret_cast<Pack<std::uint8_t, kEach>*>(targets.at[t] + i) = quantised.codes[u];
    quantised.each_scale(step, part.end, hidden, [&](std::size_t block) {
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
                                       std::size_t scales_array, unsigned segment, unsigned segments) {
  constexpr int kMine = static_cast<int>(kScaleBlock) / 32;
  const std::size_t hidden = work.dims.hidden;
  const Part part(scales::blocks_of(hidden), segment, segments);
  for (std::size_t block = part.first; block < part.end; ++block) {
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
                                    unsigned segments) {
  constexpr unsigned kEach = sizeof(uint4) / sizeof(T);
  if (wide) quantise_wide<T, kEach, kScales>(work, from, targets, count, scales_array, segment, segments);
  else quantise_narrow<T, kScales>(work, from, targets, count, scales_array, segment, segments);
  if (kScales != MoeScales::mx || segment != 0) return;
  const Dims& d = work.dims;  // zeros fill up the scales of a row
  for (std::size_t i = scales::blocks_of(d.hidden) + lane(); i < d.scale_bytes; i += 32)
    for (int t = 0; t < count; ++t) scales_at(work, targets.of[t], scales_array)[i] = byte{0};
}

}  // namespace unisono::moe::gpu
