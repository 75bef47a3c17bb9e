// The CUDA lane's requantise (lane.hpp). A thread has half a block: 16 elements, stored as 16 bytes at once.
#pragma once

#include "base/wire.hpp"
#include "cuda/device/codes.cuh"
#include "cuda/device/elements.cuh"
#include "cuda/device/move.cuh"

namespace unisono::cuda {

inline constexpr int kHalf = static_cast<int>(wire::kBlock) / 2;

// Half a block on the wire.
struct Half {
  uint4 codes;
  std::uint32_t scale;
};

// Four elements of a wire format at once.
template <class Code>
struct Four;
template <>
struct Four<wire::Fp8> {
  __device__ static std::uint32_t encode(const float* values, float inverse) {
    return codes_of(values[0], values[1], inverse) | codes_of(values[2], values[3], inverse) << 16;
  }
  __device__ static float4 decode(std::uint32_t codes) {
    const float2 low = values_of(codes), high = values_of(codes >> 16);
    return {low.x, low.y, high.x, high.y};
  }
};
template <>
struct Four<wire::Int8> {
  __device__ static std::uint32_t encode(const float* values, float inverse) {
    auto code = [&](int e) { return numeric::as_bits(values[e] * inverse + 12582912.0f); };
    return __byte_perm(__byte_perm(code(0), code(1), 0x40), __byte_perm(code(2), code(3), 0x40), 0x5410);
  }
  // The codes, raised by 128, become low bits of 2^23.
  __device__ static float4 decode(std::uint32_t codes) {
    auto value = [raised = codes ^ 0x80808080u](std::uint32_t e) {
      return numeric::as_float(__byte_perm(raised, 0x4b000000u, 0x7540 | e)) - 8388736.0f;
    };
    return {value(0), value(1), value(2), value(3)};
  }
};

template <class Code>
__device__ inline void decode(const Half& half, float (&values)[kHalf]) {
  const float step = wire::step_of(half.scale);
  const std::uint32_t words[4] = {half.codes.x, half.codes.y, half.codes.z, half.codes.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float4 four = Four<Code>::decode(words[w]);
    values[4 * w] = four.x * step;
    values[4 * w + 1] = four.y * step;
    values[4 * w + 2] = four.z * step;
    values[4 * w + 3] = four.w * step;
  }
}

// Returns the larger, NaN if any is. Requires: none is negative.
__device__ inline float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Requires: the lanes of `mask` call it. partner: the lane that has the other half of the block.
template <class Code>
__device__ inline Half encode_with(const float (&values)[kHalf], unsigned mask, unsigned partner) {
  float most = 0;
#pragma unroll
  for (int e = 0; e < kHalf; ++e) most = larger(most, fabsf(values[e]));
  std::uint32_t largest = numeric::as_bits(most);
  largest = max(largest, __shfl_sync(mask, largest, partner));
  const std::uint32_t scale = wire::scale_of<Code>(largest);
  const float inverse = wire::inverse_of(scale);
  std::uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = Four<Code>::encode(values + 4 * w, inverse);
  return {{words[0], words[1], words[2], words[3]}, scale};
}
// Requires: whole warps call it, since a thread's neighbour has the other half of its block.
template <class Code>
__device__ inline Half encode(const float (&values)[kHalf]) {
  return encode_with<Code>(values, 0xffffffffu, threadIdx.x % 32 ^ 1);
}

// Loads the elements from `at` on, and zeros past `count`. whole: by words of 16 bytes.
template <class T>
__device__ inline Elements<T, kHalf> load_half(const byte* src, std::size_t at, std::size_t count,
                                               bool whole) {
  const T* from = reinterpret_cast<const T*>(src) + at;
  if (whole && at + kHalf <= count) return Elements<T, kHalf>::load(from);
  return Elements<T, kHalf>::load(
      from, at < count ? static_cast<unsigned>(smaller(count - at, std::size_t{kHalf})) : 0);
}
template <class T>
__device__ inline void load_elements(const byte* src, std::size_t at, std::size_t count, bool whole,
                                     float (&values)[kHalf]) {
  load_half<T>(src, at, count, whole).widen(values);
}
template <class T>
__device__ inline void store_elements(byte* dst, std::size_t at, std::size_t count, bool whole,
                                      const float (&values)[kHalf]) {
  T* to = reinterpret_cast<T*>(dst) + at;
  const auto elements = Elements<T, kHalf>::narrow(values);
  if (whole && at + kHalf <= count) elements.store(to);
  else elements.store(to, at < count ? static_cast<unsigned>(smaller(count - at, std::size_t{kHalf})) : 0);
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

// Requantises at most kSources sources. A thread loads what it needs in the next round before it computes, if
// that fits into its registers.
template <class T, class Code, int kSources>
__device__ __noinline__ void requantise(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                                        Plain plain, bool average, std::size_t count) {
  constexpr bool kAhead = kSources <= 4;
  const std::size_t blocks = wire::blocks_of(count), scales = blocks * wire::kBlock;
  const auto halves = static_cast<unsigned>(2 * blocks);
  auto whole = [](const byte* at) { return reinterpret_cast<std::uintptr_t>(at) % sizeof(uint4) == 0; };
  const bool whole_src = plain.src >= 0 && whole(srcs[plain.src]);
  const bool whole_dst = plain.dst >= 0 && whole(dsts[plain.dst].at);
  struct Loaded {
    Half arrived[kSources];
    Elements<T, kHalf> own;
  };
  auto load = [&](unsigned i, Loaded& loaded) {
    if (i >= halves) return;
#pragma unroll
    for (int s = 0; s < kSources; ++s)
      if (s < n_srcs && s != plain.src)
        loaded.arrived[s] = {reinterpret_cast<const uint4*>(srcs[s])[i],
                             static_cast<std::uint32_t>(srcs[s][scales + i / 2])};
    if (plain.src >= 0) loaded.own = load_half<T>(srcs[plain.src], std::size_t{i} * kHalf, count, whole_src);
  };
  Loaded next{};
  if constexpr (kAhead) load(threadIdx.x, next);
  // whole warps take each round: the halves of a block exchange their largest magnitude
  for (unsigned first = 0; first < halves; first += blockDim.x) {
    const unsigned i = first + threadIdx.x;
    if constexpr (!kAhead) load(i, next);
    const Loaded now = next;
    if constexpr (kAhead) load(i + blockDim.x, next);
    float values[kHalf];
    Half result = now.arrived[0];
    if (plain.src >= 0) {
      now.own.widen(values);
      result = encode<Code>(values);
    }
    if constexpr (kSources > 1) {
      float sum[kHalf];
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        if (s >= n_srcs) break;
        Half one = now.arrived[s];
        if (s == plain.src) one = result;  // by value: an address would put the halves into local memory
        decode<Code>(one, values);
#pragma unroll
        for (int e = 0; e < kHalf; ++e) sum[e] = s == 0 ? values[e] : sum[e] + values[e];
      }
      if (average) {
#pragma unroll
        for (int e = 0; e < kHalf; ++e) sum[e] = sum[e] / static_cast<float>(n_srcs);
      }
      result = encode<Code>(sum);
    }
    if (i < halves) store_half<T, Code>(dsts, n_dsts, plain, i, count, scales, whole_dst, result);
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
