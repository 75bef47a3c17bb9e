// The CUDA lane's requantise (lane.hpp). A thread has half a block: 16 elements, stored as 16 bytes at once.
#pragma once

#include "base/wire.hpp"
#include "cuda/device/move.cuh"

namespace unisono::cuda {

inline constexpr int kHalf = static_cast<int>(wire::kBlock) / 2;

// Half a block on the wire.
struct Half {
  uint4 codes;
  std::uint32_t scale;
};

template <class Code>
__device__ inline void decode(const Half& half, float (&values)[kHalf]) {
  const float step = wire::step_of(half.scale);
  const std::uint32_t words[4] = {half.codes.x, half.codes.y, half.codes.z, half.codes.w};
#pragma unroll
  for (int e = 0; e < kHalf; ++e)
    values[e] = Code::decode(static_cast<std::uint8_t>(words[e / 4] >> (8 * (e % 4)))) * step;
}

// Requires: whole warps call it, since the neighbour has the other half of the block.
template <class Code>
__device__ inline Half encode(const float (&values)[kHalf]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int e = 0; e < kHalf; ++e) largest = max(largest, numeric::as_bits(values[e]) & 0x7fffffffu);
  largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  const std::uint32_t scale = wire::scale_of<Code>(largest);
  const float inverse = wire::inverse_of(scale);
  std::uint32_t words[4] = {};
#pragma unroll
  for (int e = 0; e < kHalf; ++e)
    words[e / 4] |= static_cast<std::uint32_t>(Code::encode(values[e] * inverse)) << (8 * (e % 4));
  return {{words[0], words[1], words[2], words[3]}, scale};
}

// Loads the elements from `at` on, and zeros past `count`. whole: by words of 16 bytes.
template <class T>
__device__ inline void load_elements(const byte* src, std::size_t at, std::size_t count, bool whole,
                                     float (&values)[kHalf]) {
  const T* from = reinterpret_cast<const T*>(src) + at;
  if (whole && at + kHalf <= count) {
    using P = Pack<T, sizeof(uint4) / sizeof(T)>;
    constexpr int kEach = sizeof(uint4) / sizeof(T);
    P packs[sizeof(T)];
#pragma unroll
    for (int p = 0; p < static_cast<int>(sizeof(T)); ++p) packs[p] = reinterpret_cast<const P*>(from)[p];
#pragma unroll
    for (int e = 0; e < kHalf; ++e) values[e] = Wide<T>::from(packs[e / kEach].elements[e % kEach]);
  } else {
#pragma unroll
    for (int e = 0; e < kHalf; ++e) values[e] = at + e < count ? Wide<T>::from(from[e]) : 0.0f;
  }
}

template <class T>
__device__ inline void store_elements(byte* dst, std::size_t at, std::size_t count, bool whole,
                                      const float (&values)[kHalf]) {
  T* to = reinterpret_cast<T*>(dst) + at;
  if (whole && at + kHalf <= count) {
    using P = Pack<T, sizeof(uint4) / sizeof(T)>;
    constexpr int kEach = sizeof(uint4) / sizeof(T);
    P packs[sizeof(T)];
#pragma unroll
    for (int e = 0; e < kHalf; ++e) packs[e / kEach].elements[e % kEach] = Wide<T>::to(values[e]);
#pragma unroll
    for (int p = 0; p < static_cast<int>(sizeof(T)); ++p) reinterpret_cast<P*>(to)[p] = packs[p];
  } else {
#pragma unroll
    for (int e = 0; e < kHalf; ++e)
      if (at + e < count) to[e] = Wide<T>::to(values[e]);
  }
}

// Stores half block `i` of a result to every destination: as elements, or in its wire form.
template <class T, class Code>
__device__ inline void store_half(const Dst* dsts, int n_dsts, Plain plain, std::size_t i, std::size_t count,
                                  std::size_t scales, bool whole_dst, const Half& half) {
  if (plain.dst >= 0) {
    float values[kHalf];
    decode<Code>(half, values);
    store_elements<T>(dsts[plain.dst].at, i * kHalf, count, whole_dst, values);
  }
  for (int d = 0; d < n_dsts; ++d) {
    if (d == plain.dst) continue;
    reinterpret_cast<uint4*>(dsts[d].at)[i] = half.codes;
    if (i % 2 == 0) dsts[d].at[scales + i / 2] = static_cast<byte>(half.scale);
  }
}

// Requantises at most kSources sources.
template <class T, class Code, int kSources>
__device__ __noinline__ void requantise(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                                        Plain plain, bool average, std::size_t count) {
  const std::size_t blocks = wire::blocks_of(count), halves = 2 * blocks, scales = blocks * wire::kBlock;
  auto whole = [](const byte* at) { return reinterpret_cast<std::uintptr_t>(at) % sizeof(uint4) == 0; };
  const bool whole_src = plain.src >= 0 && whole(srcs[plain.src]);
  const bool whole_dst = plain.dst >= 0 && whole(dsts[plain.dst].at);
  // whole warps take each round: the halves of a block exchange their largest magnitude
  for (std::size_t first = 0; first < halves; first += blockDim.x) {
    const std::size_t i = first + threadIdx.x, at = i * kHalf;
    const bool mine = i < halves;
    Half arrived[kSources];
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      arrived[s] = {};
      if (mine && s < n_srcs && s != plain.src)
        arrived[s] = {reinterpret_cast<const uint4*>(srcs[s])[i],
                      static_cast<std::uint32_t>(srcs[s][scales + i / 2])};
    }
    float values[kHalf] = {};
    Half result = arrived[0];
    if (plain.src >= 0) {
      if (mine) load_elements<T>(srcs[plain.src], at, count, whole_src, values);
      result = encode<Code>(values);
    }
    if constexpr (kSources > 1) {
      float sum[kHalf];
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        if (s >= n_srcs) break;
        decode<Code>(s == plain.src ? result : arrived[s], values);
#pragma unroll
        for (int e = 0; e < kHalf; ++e) sum[e] = s == 0 ? values[e] : sum[e] + values[e];
      }
      if (average) {
#pragma unroll
        for (int e = 0; e < kHalf; ++e) sum[e] = sum[e] / static_cast<float>(n_srcs);
      }
      result = encode<Code>(sum);
    }
    if (mine) store_half<T, Code>(dsts, n_dsts, plain, i, count, scales, whole_dst, result);
  }
}

// Requantises any number of sources above one. A thread loads kAhead of them before it adds the first.
template <class T, class Code>
__device__ __noinline__ void requantise_many(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                                             Plain plain, bool average, std::size_t count) {
  constexpr int kAhead = 4;
  const std::size_t blocks = wire::blocks_of(count), halves = 2 * blocks, scales = blocks * wire::kBlock;
  auto whole = [](const byte* at) { return reinterpret_cast<std::uintptr_t>(at) % sizeof(uint4) == 0; };
  const bool whole_src = plain.src >= 0 && whole(srcs[plain.src]);
  const bool whole_dst = plain.dst >= 0 && whole(dsts[plain.dst].at);
  // whole warps go round: the halves of a block exchange their largest
  for (std::size_t first = 0; first < halves; first += blockDim.x) {
    const std::size_t i = first + threadIdx.x, at = i * kHalf;
    const bool mine = i < halves;
    float values[kHalf] = {}, sum[kHalf] = {};
    if (plain.src >= 0 && mine) load_elements<T>(srcs[plain.src], at, count, whole_src, values);
    const Half own = encode<Code>(values);
    for (int s = 0; s < n_srcs; s += kAhead) {
      Half next[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        next[u] = {};
        if (mine && s + u < n_srcs && s + u != plain.src)
          next[u] = {reinterpret_cast<const uint4*>(srcs[s + u])[i],
                     static_cast<std::uint32_t>(srcs[s + u][scales + i / 2])};
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (s + u >= n_srcs) break;
        decode<Code>(s + u == plain.src ? own : next[u], values);
#pragma unroll
        for (int e = 0; e < kHalf; ++e) sum[e] = s + u == 0 ? values[e] : sum[e] + values[e];
      }
    }
    if (average) {
#pragma unroll
      for (int e = 0; e < kHalf; ++e) sum[e] = sum[e] / static_cast<float>(n_srcs);
    }
    const Half result = encode<Code>(sum);
    if (mine) store_half<T, Code>(dsts, n_dsts, plain, i, count, scales, whole_dst, result);
  }
}

// The Reduction of CudaBlock in a quantised program, on at most kMost ranks.
template <class T, class Code, int kMost>
struct Quantised {
  static constexpr std::size_t kElementBytes = sizeof(T);
  bool average;
  __device__ void requantise(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, Plain plain,
                             std::size_t count) const {
    if (n_srcs == 1) some<1>(dsts, n_dsts, srcs, n_srcs, plain, count);
    else if constexpr (kMost > kFewRanks)
      requantise_many<T, Code>(dsts, n_dsts, srcs, n_srcs, plain, average, count);
    else if (n_srcs == 2) some<2>(dsts, n_dsts, srcs, n_srcs, plain, count);
    else if (n_srcs <= 4) some<4>(dsts, n_dsts, srcs, n_srcs, plain, count);
    else some<kFewRanks>(dsts, n_dsts, srcs, n_srcs, plain, count);
  }

 private:
  template <int kSources>
  __device__ void some(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, Plain plain,
                       std::size_t count) const {
    cuda::requantise<T, Code, kSources>(dsts, n_dsts, srcs, n_srcs, plain, average, count);
  }
};

}  // namespace unisono::cuda
