// Rows that a warp copies or quantises, to several places at once.
#pragma once

#include <bit>
#include <type_traits>

#include "base/numeric.hpp"
#include "base/scales.hpp"
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

// The part of a row that a warp has: from first to end, in steps of the warp.
struct Part {
  __device__ Part(std::size_t steps, unsigned segment, unsigned segments) {
    const std::size_t share = (steps + segments - 1) / segments;
    first = min(segment * share, steps);
    end = min(first + share, steps);
  }
  std::size_t first, end;
};

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

// Two codes, the first in the low byte.
__device__ inline std::uint32_t codes_of(float first, float second, float inverse) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second * inverse), "f"(first * inverse));
  return codes;
#else
  return scales::code_of(first, inverse) | static_cast<std::uint32_t>(scales::code_of(second, inverse)) << 8;
#endif
}

// A row that a warp quantises, kEach elements of a lane at a time.
template <class T, int kEach>
struct Quantised {
  static constexpr int kLanes = static_cast<int>(kScaleBlock) / kEach;  // of a block
  static constexpr int kAhead = 4;                                      // loads of a lane under way
  using Load = Pack<T, kEach>;
  using Codes = Pack<std::uint8_t, kEach>;

  __device__ static void store(const Work& work, const Load& load, std::size_t at, const Targets& codes,
                               int count, std::size_t scales_array) {
    const Dims& d = work.dims;
    float values[kEach];
    std::uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      values[e] = Wide<T>::from(load.get(e));
      largest = max(largest, numeric::as_bits(values[e]) & 0x7fffffffu);
    }
#pragma unroll
    for (int other = 1; other < min(kLanes, 32); other *= 2)
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, other));
    const bool mx = d.scales == MoeScales::mx;
    const std::uint32_t power = scales::power_of(largest);
    const bool finite = scales::finite(largest);
    const float inverse = !finite ? 0.0f : mx ? scales::inverse_of_power(power) : scales::inverse_of(largest);
    Codes out;
#pragma unroll
    for (int e = 0; e < kEach; e += 2) {
      const std::uint32_t two = finite ? codes_of(values[e], values[e + 1], inverse) : 0x7f7fu;
      out.set(e, static_cast<std::uint8_t>(two));
      out.set(e + 1, static_cast<std::uint8_t>(two >> 8));
    }
    if (at >= d.hidden) return;
    for (int t = 0; t < count; ++t) *reinterpret_cast<Codes*>(codes.at[t] + at) = out;
    if (at % kScaleBlock != 0) return;
    for (int t = 0; t < count; ++t) {
      byte* const row = gpu::at<byte>(work, codes.of[t].rank, scales_array) +
                        static_cast<std::size_t>(codes.of[t].row) * d.scale_bytes;
      if (mx) reinterpret_cast<std::uint8_t*>(row)[at / kScaleBlock] = static_cast<std::uint8_t>(power);
      else reinterpret_cast<float*>(row)[at / kScaleBlock] = scales::scale_of(largest);
    }
  }
};

// Quantises a segment of a row to all targets, whose codes lie at `targets.at`.
template <class T, int kEach>
__device__ inline void quantise_wide(const Work& work, const byte* from, const Targets& targets, int count,
                                     std::size_t scales_array, unsigned segment, unsigned segments) {
  using Row = Quantised<T, kEach>;
  constexpr std::size_t kStep = 32 * kEach;
  const std::size_t hidden = work.dims.hidden;
  const Part part((hidden + kStep - 1) / kStep, segment, segments);
  for (std::size_t step = part.first; step < part.end; step += Row::kAhead) {
    typename Row::Load some[Row::kAhead];
#pragma unroll
    for (int u = 0; u < Row::kAhead; ++u) {
      const std::size_t i = (step + u) * kStep + lane() * kEach;
      some[u] = {};
      if (step + u < part.end && i < hidden)
        some[u] = *reinterpret_cast<const typename Row::Load*>(from + i * sizeof(T));
    }
#pragma unroll
    for (int u = 0; u < Row::kAhead; ++u)
      if (step + u < part.end)
        Row::store(work, some[u], (step + u) * kStep + lane() * kEach, targets, count, scales_array);
  }
}

// The same element by element: a lane has 4 elements of a block, one after another 32 apart.
template <class T>
__device__ inline void quantise_narrow(const Work& work, const byte* from, const Targets& targets, int count,
                                       std::size_t scales_array, unsigned segment, unsigned segments) {
  constexpr int kMine = static_cast<int>(kScaleBlock) / 32;
  const Dims& d = work.dims;
  const Part part(scales::blocks_of(d.hidden), segment, segments);
  for (std::size_t block = part.first; block < part.end; ++block) {
    float values[kMine];
    std::uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < kMine; ++e) {
      const std::size_t i = block * kScaleBlock + lane() + 32 * e;
      values[e] = i < d.hidden ? Wide<T>::from(reinterpret_cast<const T*>(from)[i]) : 0.0f;
      largest = max(largest, numeric::as_bits(values[e]) & 0x7fffffffu);
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    const bool mx = d.scales == MoeScales::mx, finite = scales::finite(largest);
    const std::uint32_t power = scales::power_of(largest);
    const float inverse = !finite ? 0.0f : mx ? scales::inverse_of_power(power) : scales::inverse_of(largest);
    for (int t = 0; t < count; ++t) {
#pragma unroll
      for (int e = 0; e < kMine; ++e)
        if (const std::size_t i = block * kScaleBlock + lane() + 32 * e; i < d.hidden)
          reinterpret_cast<std::uint8_t*>(targets.at[t])[i] =
              finite ? static_cast<std::uint8_t>(codes_of(values[e], 0.0f, inverse)) : scales::kNanCode;
      byte* const row = at<byte>(work, targets.of[t].rank, scales_array) +
                        static_cast<std::size_t>(targets.of[t].row) * d.scale_bytes;
      if (lane() != 0) continue;
      if (mx) reinterpret_cast<std::uint8_t*>(row)[block] = static_cast<std::uint8_t>(power);
      else reinterpret_cast<float*>(row)[block] = scales::scale_of(largest);
    }
  }
}

template <class T>
__device__ inline void quantise_row(const Work& work, const byte* from, const Targets& targets, int count,
                                    std::size_t scales_array, bool wide, unsigned segment,
                                    unsigned segments) {
  constexpr int kEach = static_cast<int>(sizeof(uint4) / sizeof(T));
  if (wide) quantise_wide<T, kEach>(work, from, targets, count, scales_array, segment, segments);
  else quantise_narrow<T>(work, from, targets, count, scales_array, segment, segments);
  const Dims& d = work.dims;
  if (d.scales != MoeScales::mx || segment != 0) return;
  for (std::size_t i = scales::blocks_of(d.hidden) + lane(); i < d.scale_bytes;
       i += 32)  // zeros that fill up
    for (int t = 0; t < count; ++t)
      at<byte>(work, targets.of[t].rank,
               scales_array)[static_cast<std::size_t>(targets.of[t].row) * d.scale_bytes + i] = byte{0};
}

}  // namespace unisono::moe::gpu
