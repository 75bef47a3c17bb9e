// What follows a row's sum, by the threads of a block. Bits are those of src/host/norms.cpp.
#pragma once

#include "base/norm.hpp"
#include "cuda/device/codes.cuh"
#include "cuda/device/move.cuh"
#include "fused/cuda/norm.hpp"

namespace unisono::fused::gpu {

using cuda::Pack;

inline constexpr int kVector = 8;  // elements of a thread's load
inline constexpr int kWarp = 32;
inline constexpr unsigned kAll = 0xffffffffu;
// Threads that add a row's terms. Each has neighbouring partial sums (base/norm.hpp).
inline constexpr int kSummers = 256;
inline constexpr int kEach = norm::kPartials / kSummers;

// Loads elements from `at` on, at most kCount of those before `end`; zeros follow. whole: by one load, if all
// are there.
template <class T, int kCount>
__device__ inline void load(float (&values)[kCount], const void* row, unsigned at, unsigned end, bool whole) {
  const T* const from = static_cast<const T*>(row) + at;
  if (whole && at + kCount <= end) {
    const auto pack = *reinterpret_cast<const Pack<T, kCount>*>(from);
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = Wide<T>::from(pack.elements[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = at + e < end ? Wide<T>::from(from[e]) : 0.0f;
  }
}

template <class T, std::size_t kCount>
__device__ inline void store(void* row, const Pack<T, kCount>& pack, unsigned at, unsigned end, bool whole) {
  T* const to = static_cast<T*>(row) + at;
  if (whole && at + kCount <= end) {
    *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      if (at + e < end) to[e] = pack.elements[e];
  }
}

// A row of residual_out, as the block's threads read it. whole: as Work::whole.
struct Values {
  const byte* at;
  bool whole;
};

// Returns the sum over a row of its elements, or of the squares of their distances from the mean. All threads
// of the block call it, and get it.
template <class T>
__device__ inline float total_of(const Values& values, unsigned count, bool squared, float mean) {
  __shared__ Pack<float, kEach> partials[kSummers];
  __shared__ float total;
  const unsigned thread = threadIdx.x;
  if (thread < kSummers) {
    Pack<float, kEach> sums{};
    for (unsigned at = thread * kEach; at < count; at += norm::kPartials) {
      float some[kEach];
      load<T>(some, values.at, at, count, values.whole);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const float centred = some[e] - mean, term = squared ? centred * centred : some[e];
        if (at + e < count) sums.elements[e] = sums.elements[e] + term;
      }
    }
    partials[thread] = sums;
  }
  __syncthreads();
  if (thread < kWarp) {  // a tree of halves: of the threads' sums, then of the elements of one thread
    float sums[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const auto at = [&](unsigned warp) { return partials[thread + warp * kWarp].elements[e]; };
      sums[e] = ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
    }
#pragma unroll
    for (int kept = kEach / 2; kept > 0; kept /= 2) {  // a lane keeps the sums of one half of its elements
      const unsigned distance = kept * kWarp / kEach;
      const bool upper = (thread & distance) != 0;
#pragma unroll
      for (int e = 0; e < kept; ++e) {
        const float own = upper ? sums[e + kept] : sums[e], other = upper ? sums[e] : sums[e + kept];
        sums[e] = own + __shfl_xor_sync(kAll, other, distance);
      }
    }
    float sum = sums[0];
#pragma unroll
    for (const unsigned distance : {4u, 2u, 1u, 16u, 8u}) sum = sum + __shfl_xor_sync(kAll, sum, distance);
    if (thread == 0) total = sum;
  }
  __syncthreads();
  return total;
}
static_assert(kSummers == 8 * kWarp && kEach == 4, "total_of adds so");

// Returns the largest of all threads' numbers to each.
__device__ inline std::uint32_t largest_of_block(std::uint32_t mine) {
  __shared__ std::uint32_t found[kWarp];
  mine = __reduce_max_sync(kAll, mine);
  if (threadIdx.x % kWarp == 0) found[threadIdx.x / kWarp] = mine;
  __syncthreads();
  std::uint32_t largest = 0;
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) largest = max(largest, found[w]);
  __syncthreads();  // the next row's may overwrite it
  return largest;
}

__device__ inline std::uint32_t largest_of(const float (&values)[kVector]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int e = 0; e < kVector; ++e) largest = max(largest, numeric::as_bits(values[e]) & 0x7fffffffu);
  return largest;
}

// Elements of a row.
struct Span {
  unsigned begin, end;
};

// A thread's first weights of a span, which it loads before it has a row.
template <class T>
struct Weights {
  Pack<T, kVector> first;
  __device__ Weights(const Work& work, const Span& span) {
    const unsigned at = span.begin + threadIdx.x * kVector;
    const T* const from = reinterpret_cast<const T*>(work.weight) + at;
    if (work.whole && at + kVector <= span.end) first = *reinterpret_cast<const Pack<T, kVector>*>(from);
    else
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (at + e < span.end) first.elements[e] = from[e];
  }
};

// Normalises a span of a row, and quantises it. All threads of a block call it, of every block that has a
// span of the row; all of the row is there.
template <class T>
class Finisher {
 public:
  __device__ Finisher(const Work& work, const Span& span, const Weights<T>& weights, const Values& values,
                      std::size_t row)
      : work_(work), span_(span), weights_(weights), values_(values), row_(row) {}

  __device__ void run() {
    float total = 0;
#pragma unroll 1
    for (bool squared = !work_.layer;; squared = true) {
      total = total_of<T>(values_, work_.hidden, squared, mean_);
      if (squared) break;
      mean_ = norm::mean_of(total, work_.hidden);
    }
    factor_ = norm::factor_of(norm::mean_of(total, work_.hidden), work_.eps);
    switch (work_.quant) {
      case NormQuant::none:
        return each(span_, [&](const Pack<T, kVector>& pack, unsigned at) {
          store(work_.out + row_ * work_.row_bytes, pack, at, span_.end, work_.whole);
        });
      case NormQuant::fp8:
        return each_wide(span_, [&](const float (&values)[kVector], unsigned at) {
          encode(values, at, work_.inverse, true);
        });
      case NormQuant::fp8_token: return by_row();
      default: return by_block();
    }
  }

 private:
  // Calls body(pack, at) for the thread's vectors of a span, with the elements of the norm.
  template <class Body>
  __device__ void each(const Span& span, const Body& body) const {
    const unsigned begin = span.begin + threadIdx.x * kVector;
    for (unsigned at = begin; at < span.end; at += blockDim.x * kVector) {
      float values[kVector], weight[kVector], bias[kVector];
      load<T>(values, values_.at, at, span.end, values_.whole);
      if (at == span_.begin + threadIdx.x * kVector && at < span_.end)
#pragma unroll
        for (int e = 0; e < kVector; ++e) weight[e] = Wide<T>::from(weights_.first.elements[e]);
      else load<T>(weight, work_.weight, at, span.end, work_.whole);
      if (work_.bias) load<T>(bias, work_.bias, at, span.end, work_.whole);
      Pack<T, kVector> pack;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const float scaled = (values[e] - mean_) * factor_ * weight[e];
        pack.elements[e] = Wide<T>::to(work_.bias ? scaled + bias[e] : scaled);
      }
      body(pack, at);
    }
  }

  // Does the same with f32, and zeros past the end.
  template <class Body>
  __device__ void each_wide(const Span& span, const Body& body) const {
    each(span, [&](const Pack<T, kVector>& pack, unsigned at) {
      float values[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        values[e] = at + e < span.end ? Wide<T>::from(pack.elements[e]) : 0.0f;
      body(values, at);
    });
  }

  __device__ void encode(const float (&values)[kVector], unsigned at, float inverse, bool finite) const {
    Pack<std::uint8_t, kVector> codes;
#pragma unroll
    for (int e = 0; e < kVector; e += 2) {
      const std::uint32_t two =
          finite ? cuda::codes_of(values[e], values[e + 1], inverse) : scales::kNanCode * 0x101u;
      codes.elements[e] = static_cast<std::uint8_t>(two);
      codes.elements[e + 1] = static_cast<std::uint8_t>(two >> 8);
    }
    store(work_.out + row_ * work_.hidden, codes, at, span_.end, work_.whole);
  }

  __device__ byte* scales() const { return work_.scales + row_ * work_.scale_bytes; }

  // A scale for the row, whose largest element every block finds by itself.
  __device__ void by_row() const {
    std::uint32_t mine = 0;
    each_wide({0, work_.hidden},
              [&](const float (&values)[kVector], unsigned) { mine = max(mine, largest_of(values)); });
    const std::uint32_t largest = largest_of_block(mine);
    if (span_.begin == 0 && threadIdx.x == 0) *reinterpret_cast<float*>(scales()) = scales::scale_of(largest);
    const bool finite = scales::finite(largest);
    const float inverse = finite ? scales::inverse_of(largest) : 1.0f;
    each_wide(span_,
              [&](const float (&values)[kVector], unsigned at) { encode(values, at, inverse, finite); });
  }

  // A scale for each 128 elements, which 16 neighbours have.
  __device__ void by_block() const {
    constexpr auto kBlock = static_cast<unsigned>(scales::kBlock), kSharers = kBlock / kVector;
    const bool mx = work_.quant == NormQuant::mx;
    byte* const row_scales = scales();
    each_wide(span_, [&](const float (&values)[kVector], unsigned at) {
      const unsigned block = at / kBlock, elements = min(kBlock, span_.end - block * kBlock);
      const unsigned sharers = (elements + kVector - 1) / kVector;
      const unsigned mask = ((1u << sharers) - 1) << (threadIdx.x % kWarp / kSharers * kSharers);
      const std::uint32_t largest = __reduce_max_sync(mask, largest_of(values));
      const bool finite = scales::finite(largest), first = threadIdx.x % kSharers == 0;
      float inverse = 1;
      if (mx) {
        const std::uint32_t power = scales::power_of(largest);
        if (first) row_scales[block] = static_cast<byte>(power);
        if (finite) inverse = scales::inverse_of_power(power);
      } else {
        if (first) reinterpret_cast<float*>(row_scales)[block] = scales::scale_of(largest);
        if (finite) inverse = scales::inverse_of(largest);
      }
      encode(values, at, inverse, finite);
    });
    if (mx && span_.begin == 0)
      for (std::size_t b = scales::blocks_of(work_.hidden) + threadIdx.x; b < work_.scale_bytes;
           b += blockDim.x)
        row_scales[b] = byte{0};
  }

  const Work& work_;
  const Span& span_;
  const Weights<T>& weights_;
  const Values values_;
  const std::size_t row_;
  float mean_ = 0, factor_ = 0;
};

}  // namespace unisono::fused::gpu
