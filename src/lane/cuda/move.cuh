// The arithmetic of the CUDA lane: one block copies, or combines in rank order, with packs of 16 bytes where
// it can.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lane/cuda/layout.hpp"
#include "numeric.hpp"

namespace unisono::cuda {

// Whether every pointer is a multiple of `to` bytes.
__device__ inline bool aligned(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                               std::size_t to) {
  std::uintptr_t all = 0;
  for (int d = 0; d < n_dsts; ++d) all |= reinterpret_cast<std::uintptr_t>(dsts[d].at);
  for (int s = 0; s < n_srcs; ++s) all |= reinterpret_cast<std::uintptr_t>(srcs[s]);
  return all % to == 0;
}

// Copies `count` words from word `begin` on, eight loads in flight in each thread.
template <class Word>
__device__ void copy_words(const Dst* dsts, int n_dsts, const byte* src, std::size_t begin,
                           std::size_t count) {
  constexpr int kFlight = 8;
  const auto* from = reinterpret_cast<const Word*>(src) + begin;
  for (std::size_t i = threadIdx.x; i < count; i += kFlight * blockDim.x) {
    Word words[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u)
      if (const std::size_t at = i + u * blockDim.x; at < count) words[u] = from[at];
    for (int d = 0; d < n_dsts; ++d) {
      auto* to = reinterpret_cast<Word*>(dsts[d].at) + begin;
#pragma unroll
      for (int u = 0; u < kFlight; ++u)
        if (const std::size_t at = i + u * blockDim.x; at < count) to[at] = words[u];
    }
  }
}

// One source, any number of destinations, by the widest word that every address allows.
__device__ __noinline__ inline void copy(const Dst* dsts, int n_dsts, const byte* src, std::size_t bytes) {
  std::size_t whole = 0;  // bytes that have gone in words
  if (aligned(dsts, n_dsts, &src, 1, sizeof(uint4))) {
    copy_words<uint4>(dsts, n_dsts, src, 0, bytes / sizeof(uint4));
    whole = bytes / sizeof(uint4) * sizeof(uint4);
  } else if (aligned(dsts, n_dsts, &src, 1, sizeof(std::uint32_t))) {
    copy_words<std::uint32_t>(dsts, n_dsts, src, 0, bytes / sizeof(std::uint32_t));
    whole = bytes / sizeof(std::uint32_t) * sizeof(std::uint32_t);
  }
  copy_words<std::uint8_t>(dsts, n_dsts, src, whole, bytes - whole);
}

// A pack of elements, which travels in one load or store.
template <class T, std::size_t kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T elements[kCount];
};

// Combines `count` packs from pack `begin` on. At most kSources sources; kFlight packs of each are in flight
// in each thread. A position is read from every source before it is written, so that a destination may be a
// source.
template <class T, Op op, std::size_t kCount, int kSources, int kFlight>
__device__ void combine_packs(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                              std::size_t begin, std::size_t count) {
  using P = Pack<T, kCount>;
  for (std::size_t i = threadIdx.x; i < count; i += kFlight * blockDim.x) {
    P packs[kFlight][kSources];
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (s >= n_srcs) break;
      const auto* from = reinterpret_cast<const P*>(srcs[s]) + begin;
#pragma unroll
      for (int u = 0; u < kFlight; ++u)
        if (const std::size_t at = i + u * blockDim.x; at < count) packs[u][s] = from[at];
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      const std::size_t at = i + u * blockDim.x;
      if (at >= count) break;
      P result;
#pragma unroll
      for (std::size_t e = 0; e < kCount; ++e) {
        auto wide = Wide<T>::from(packs[u][0].elements[e]);
#pragma unroll
        for (int s = 1; s < kSources; ++s)
          if (s < n_srcs) wide = unisono::combine<op, T>(wide, Wide<T>::from(packs[u][s].elements[e]));
        result.elements[e] = Wide<T>::to(finish<op, T>(wide, n_srcs));
      }
      for (int d = 0; d < n_dsts; ++d) (reinterpret_cast<P*>(dsts[d].at) + begin)[at] = result;
    }
  }
}

// Several sources, any number of destinations.
template <class T, Op op>
__device__ void reduce(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes) {
  constexpr std::size_t kWide = sizeof(uint4) / sizeof(T);
  const std::size_t count = bytes / sizeof(T);
  std::size_t whole = 0;  // elements that have gone in packs
  if (aligned(dsts, n_dsts, srcs, n_srcs, sizeof(uint4))) {
    constexpr int kFlight = sizeof(T) == 1 ? 1 : 2;
    if (n_srcs <= 2)
      combine_packs<T, op, kWide, 2, 2 * kFlight>(dsts, n_dsts, srcs, n_srcs, 0, count / kWide);
    else if (n_srcs <= 4)
      combine_packs<T, op, kWide, 4, kFlight>(dsts, n_dsts, srcs, n_srcs, 0, count / kWide);
    else combine_packs<T, op, kWide, kMaxRanks, 1>(dsts, n_dsts, srcs, n_srcs, 0, count / kWide);
    whole = count / kWide * kWide;
  }
  combine_packs<T, op, 1, kMaxRanks, 1>(dsts, n_dsts, srcs, n_srcs, whole, count - whole);
}

}  // namespace unisono::cuda
