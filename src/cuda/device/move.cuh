// The arithmetic of the CUDA lane: one block copies, or combines in rank order, if possible by 16-byte packs.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/numeric.hpp"
#include "cuda/device/elements.cuh"
#include "cuda/layout.hpp"

namespace unisono::cuda {

// Returns whether every pointer is a multiple of `to` bytes.
__device__ inline bool aligned(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                               std::size_t to) {
  std::uintptr_t all = 0;
  for (int d = 0; d < n_dsts; ++d) all |= reinterpret_cast<std::uintptr_t>(dsts[d].at);
  for (int s = 0; s < n_srcs; ++s) all |= reinterpret_cast<std::uintptr_t>(srcs[s]);
  return all % to == 0;
}

// Return a thread's first word, and the distance to its next strip. A warp takes strips of `rows` rows of 32
// words, so that a thread's loads go out back to back at constant distances. The instructions before its
// first load, and between two, are most of the time of a short move.
__device__ inline unsigned strip_begin(unsigned rows) {
  return threadIdx.x / 32 * 32 * rows + threadIdx.x % 32;
}
__device__ inline unsigned strip_step(unsigned rows) { return blockDim.x * rows; }

// Copies `count` words from word `begin` on.
template <class Word>
__device__ void copy_words(const Dst* dsts, int n_dsts, const byte* src, std::size_t begin, unsigned count) {
  constexpr unsigned kRows = 8;
  const auto* from = reinterpret_cast<const Word*>(src) + begin;
  for (unsigned i = strip_begin(kRows); i < count; i += strip_step(kRows)) {
    Word words[kRows];
#pragma unroll
    for (unsigned u = 0; u < kRows; ++u)
      if (i + 32 * u < count) words[u] = from[i + 32 * u];
#pragma unroll 1
    for (int d = 0; d < n_dsts; ++d) {
      auto* to = reinterpret_cast<Word*>(dsts[d].at) + begin;
#pragma unroll
      for (unsigned u = 0; u < kRows; ++u)
        if (i + 32 * u < count) to[i + 32 * u] = words[u];
    }
  }
}

// Copies one source to any number of destinations, by the widest word that every address allows. Requires:
// below 4 GiB.
__device__ __noinline__ inline void copy(const Dst* dsts, int n_dsts, const byte* src, std::size_t bytes) {
  const auto all = static_cast<unsigned>(bytes);
  unsigned whole = 0;  // bytes copied in words
  if (aligned(dsts, n_dsts, &src, 1, sizeof(uint4))) {
    copy_words<uint4>(dsts, n_dsts, src, 0, all / sizeof(uint4));
    whole = all / sizeof(uint4) * sizeof(uint4);
  } else if (aligned(dsts, n_dsts, &src, 1, sizeof(std::uint32_t))) {
    copy_words<std::uint32_t>(dsts, n_dsts, src, 0, all / sizeof(std::uint32_t));
    whole = all / sizeof(std::uint32_t) * sizeof(std::uint32_t);
  } else if (aligned(dsts, n_dsts, &src, 1, sizeof(std::uint16_t))) {
    copy_words<std::uint16_t>(dsts, n_dsts, src, 0, all / sizeof(std::uint16_t));
    whole = all / sizeof(std::uint16_t) * sizeof(std::uint16_t);
  }
  if (whole < all) copy_words<std::uint8_t>(dsts, n_dsts, src, whole, all - whole);
}

// A pack of elements, which travels in one load or store.
template <class T, std::size_t kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T elements[kCount];
};

// Combines one pack of each source, at most kSources, into one.
template <class T, Op op, std::size_t kCount, int kSources>
__device__ Pack<T, kCount> combine_packs(const Pack<T, kCount> (&packs)[kSources], int n_srcs) {
  constexpr bool kHalves = (std::is_same_v<T, F16> || std::is_same_v<T, BF16>) && kCount % 2 == 0;
  using E = Elements<T, kHalves ? static_cast<int>(kCount) : 4>;
  typename Wide<T>::type wide[kCount];
  const auto widen = [](const Pack<T, kCount>& pack, auto& to) {
    if constexpr (kHalves) {
      std::bit_cast<E>(pack).widen(to);
    } else {
#pragma unroll
      for (std::size_t e = 0; e < kCount; ++e) to[e] = Wide<T>::from(pack.elements[e]);
    }
  };
  widen(packs[0], wide);
#pragma unroll
  for (int s = 1; s < kSources; ++s) {
    typename Wide<T>::type next[kCount];
    widen(packs[s], next);
#pragma unroll
    for (std::size_t e = 0; e < kCount; ++e)
      if (s < n_srcs) wide[e] = unisono::combine<op, T>(wide[e], next[e]);
  }
#pragma unroll
  for (std::size_t e = 0; e < kCount; ++e) wide[e] = finish<op, T>(wide[e], n_srcs);
  if constexpr (kHalves) {
    return std::bit_cast<Pack<T, kCount>>(E::narrow(wide));
  } else {
    Pack<T, kCount> result;
#pragma unroll
    for (std::size_t e = 0; e < kCount; ++e) result.elements[e] = Wide<T>::to(wide[e]);
    return result;
  }
}

// Combines `count` packs from pack `begin` on. At most kSources sources; kFlight packs of each are in flight
// in each thread. A position is read from every source before it is written, so that a destination may be a
// source. Few packs are spread over all warps, since combining one takes long.
template <class T, Op op, std::size_t kCount, int kSources, unsigned kFlight>
__device__ void combine_range(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                              std::size_t begin, unsigned count) {
  using P = Pack<T, kCount>;
  for (unsigned i = threadIdx.x; i < count; i += kFlight * blockDim.x) {
    P packs[kFlight][kSources];
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (s >= n_srcs) break;
      const auto* from = reinterpret_cast<const P*>(srcs[s]) + begin;
#pragma unroll
      for (unsigned u = 0; u < kFlight; ++u)
        if (const unsigned at = i + u * blockDim.x; at < count) packs[u][s] = from[at];
    }
#pragma unroll
    for (unsigned u = 0; u < kFlight; ++u) {
      const unsigned at = i + u * blockDim.x;
      if (at >= count) break;
      const P result = combine_packs<T, op>(packs[u], n_srcs);
#pragma unroll 1
      for (int d = 0; d < n_dsts; ++d) (reinterpret_cast<P*>(dsts[d].at) + begin)[at] = result;
    }
  }
}

// Combines 2 to kFewRanks sources into any number of destinations. Requires: below 4 GiB.
template <class T, Op op>
__device__ void reduce(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes) {
  constexpr unsigned kWide = sizeof(uint4) / sizeof(T);
  const unsigned count = static_cast<unsigned>(bytes) / sizeof(T);
  unsigned whole = 0;  // elements combined in packs
  if (aligned(dsts, n_dsts, srcs, n_srcs, sizeof(uint4))) {
    constexpr unsigned kFlight = sizeof(T) == 1 ? 1 : 2;
    const unsigned packs = count / kWide;
    if (n_srcs == 2) combine_range<T, op, kWide, 2, 2 * kFlight>(dsts, n_dsts, srcs, 2, 0, packs);
    else if (n_srcs <= 4) combine_range<T, op, kWide, 4, kFlight>(dsts, n_dsts, srcs, n_srcs, 0, packs);
    else combine_range<T, op, kWide, kFewRanks, 1>(dsts, n_dsts, srcs, n_srcs, 0, packs);
    whole = packs * kWide;
  }
  if (whole < count) combine_range<T, op, 1, kFewRanks, 1>(dsts, n_dsts, srcs, n_srcs, whole, count - whole);
}

// As combine_range, of any number of sources. A thread loads kAhead of them before it combines the first.
template <class T, Op op, std::size_t kCount>
__device__ void combine_range_of_many(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                                      std::size_t begin, unsigned count) {
  using P = Pack<T, kCount>;
  constexpr int kAhead = 4;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    typename Wide<T>::type sums[kCount] = {};
    for (int s = 0; s < n_srcs; s += kAhead) {
      P packs[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        if (s + u < n_srcs) packs[u] = (reinterpret_cast<const P*>(srcs[s + u]) + begin)[i];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (s + u >= n_srcs) break;
#pragma unroll
        for (std::size_t e = 0; e < kCount; ++e) {
          const auto value = Wide<T>::from(packs[u].elements[e]);
          sums[e] = s + u == 0 ? value : unisono::combine<op, T>(sums[e], value);
        }
      }
    }
    P result;
#pragma unroll
    for (std::size_t e = 0; e < kCount; ++e) result.elements[e] = Wide<T>::to(finish<op, T>(sums[e], n_srcs));
#pragma unroll 1
    for (int d = 0; d < n_dsts; ++d) (reinterpret_cast<P*>(dsts[d].at) + begin)[i] = result;
  }
}

template <class T, Op op>
__device__ void reduce_many(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                            std::size_t bytes) {
  constexpr unsigned kWide = sizeof(uint4) / sizeof(T);
  const unsigned count = static_cast<unsigned>(bytes) / sizeof(T);
  const unsigned packs = aligned(dsts, n_dsts, srcs, n_srcs, sizeof(uint4)) ? count / kWide : 0;
  combine_range_of_many<T, op, kWide>(dsts, n_dsts, srcs, n_srcs, 0, packs);
  combine_range_of_many<T, op, 1>(dsts, n_dsts, srcs, n_srcs, packs * kWide, count - packs * kWide);
}

}  // namespace unisono::cuda
