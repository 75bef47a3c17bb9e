// What follows a row's sum, by the threads of a block. Bits are those of src/host/norms.cpp.
#pragma once

#include "base/norm.hpp"
#include "cuda/device/codes.cuh"
#include "cuda/device/elements.cuh"
#include "fused/cuda/norm.hpp"

namespace unisono::fused::gpu {

using cuda::Elements;

inline constexpr int kVector = 8;  // elements of a thread's load
inline constexpr int kWarp = 32;
inline constexpr unsigned kAll = 0xffffffffu;
// Threads that add a row's terms. Each has neighbouring partial sums (base/norm.hpp).
inline constexpr int kSummers = 256;
inline constexpr int kEach = norm::kPartials / kSummers;

// Load and store the elements of a row from `at` on, at most kCount of those before `end`; zeros follow.
// whole: by words of 16 bytes, if all are there. Of a row that is fast all are.
template <bool kFast, class T, int kCount>
__device__ inline Elements<T, kCount> load(const void* row, unsigned at, unsigned end, bool whole) {
  const T* const from = static_cast<const T*>(row) + at;
  if (kFast || (whole && at + kCount <= end)) return Elements<T, kCount>::load(from);
  return Elements<T, kCount>::load(from, at < end ? end - at : 0);
}
template <bool kFast, class T, int kCount>
__device__ inline void store(void* row, const Elements<T, kCount>& elements, unsigned at, unsigned end,
                             bool whole) {
  T* const to = static_cast<T*>(row) + at;
  if (kFast || (whole && at + kCount <= end)) elements.store(to);
  else elements.store(to, at < end ? end - at : 0);
}

// A row of residual_out, as the block's threads read it. whole: as Work::whole. A fast row is whole, and lies
// in shared memory.
struct Values {
  const byte* at;
  bool whole;
};

// Holds in shared memory what the threads of a block have added of a row's terms.
struct Totals {
  alignas(16) float partials[kSummers][kEach];
  float result;
};
__device__ inline Totals& totals_of_block() {
  __shared__ Totals totals;
  return totals;
}

// Returns result(sum), of the sum over a row of its elements, or of the squares of their distances from the
// mean. All threads of the block call it, and get it.
template <bool kFast, class T, class Result>
__device__ inline float total_of(const Values& values, unsigned count, bool squared, float mean,
                                 const Result& result) {
  Totals& totals = totals_of_block();
  constexpr int kAhead = 4;  // loads before the first of their terms is added
  constexpr auto kStride = static_cast<unsigned>(norm::kPartials);
  using Sums = Elements<float, kEach>;
  const unsigned thread = threadIdx.x;
  if (thread < kSummers) {
    float sums[kEach] = {};
    for (unsigned begin = thread * kEach; begin < count; begin += kAhead * kStride) {
      Elements<T, kEach> loaded[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (const unsigned at = begin + k * kStride; at < count)
          loaded[k] = load<kFast, T, kEach>(values.at, at, count, values.whole);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const unsigned at = begin + k * kStride;
        if (at >= count) break;
        float some[kEach];
        loaded[k].widen(some);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float centred = some[e] - mean, term = squared ? centred * centred : some[e];
          if (kFast || at + e < count) sums[e] = sums[e] + term;
        }
      }
    }
    Sums::narrow(sums).store(totals.partials[thread]);
  }
  __syncthreads();
  if (thread < kWarp) {  // a tree of halves: of the threads' sums, then of the elements of one thread
    float of_warp[kSummers / kWarp][kEach], sums[kEach];
#pragma unroll
    for (int warp = 0; warp < kSummers / kWarp; ++warp)
      Sums::load(totals.partials[thread + warp * kWarp]).widen(of_warp[warp]);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const auto at = [&](unsigned warp) { return of_warp[warp][e]; };
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
    if (thread == 0) totals.result = result(sum);
  }
  __syncthreads();
  return totals.result;
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
  Elements<T, kVector> first;
};
template <class T>
__device__ inline Weights<T> weights_of(const Work& work, const Span& span) {
  Weights<T> weights;
  const unsigned at = span.begin + threadIdx.x * kVector;
  if (work.whole && at < span.end)
    weights.first = Elements<T, kVector>::load(reinterpret_cast<const T*>(work.weight) + at);
  return weights;
}

// Normalises a span of a row, and quantises it. All threads of a block call it, of every block that has a
// span of the row; all of the row is there. weights: of a fast row.
template <class T, bool kFast>
class Finisher {
 public:
  __device__ Finisher(const Work& work, const Span& span, const Weights<T>& weights, const Values& values,
                      std::size_t row)
      : work_(work), span_(span), weights_(weights), values_(values), row_(row) {}

  __device__ void run() {
    const unsigned hidden = work_.hidden;
    if (work_.layer)
      mean_ = total_of<kFast, T>(values_, hidden, false, 0,
                                 [=](float sum) { return norm::mean_of(sum, hidden); });
    factor_ = total_of<kFast, T>(values_, hidden, true, mean_, [=, eps = work_.eps](float sum) {
      return norm::factor_of(norm::mean_of(sum, hidden), eps);
    });
    switch (work_.quant) {
      case NormQuant::none:
        return each(span_, [&](const Normed& normed, unsigned at) {
          store<kFast>(work_.out + row_ * work_.row_bytes, normed, at, span_.end, work_.whole);
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
  using Normed = Elements<T, kVector>;

  // Calls body(normed, at) for the thread's vectors of a span, with the elements of the norm.
  template <class Body>
  __device__ void each(const Span& span, const Body& body) const {
    const auto from = [&](const byte* row, unsigned at, float (&values)[kVector]) {
      load<kFast, T, kVector>(row, at, span.end, work_.whole).widen(values);
    };
    const unsigned first = span_.begin + threadIdx.x * kVector;
    for (unsigned at = span.begin + threadIdx.x * kVector; at < span.end; at += blockDim.x * kVector) {
      float values[kVector], weight[kVector], bias[kVector];
      load<kFast, T, kVector>(values_.at, at, span.end, values_.whole).widen(values);
      if (kFast && at == first && at < span_.end) weights_.first.widen(weight);
      else from(work_.weight, at, weight);
      if (work_.bias) from(work_.bias, at, bias);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        values[e] = (values[e] - mean_) * factor_ * weight[e];
        if (work_.bias) values[e] = values[e] + bias[e];
      }
      body(Normed::narrow(values), at);
    }
  }

  // Does the same with f32, and zeros past the end.
  template <class Body>
  __device__ void each_wide(const Span& span, const Body& body) const {
    each(span, [&](const Normed& normed, unsigned at) {
      float values[kVector];
      normed.widen(values);
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (!kFast && at + e >= span.end) values[e] = 0;
      body(values, at);
    });
  }

  __device__ void encode(const float (&values)[kVector], unsigned at, float inverse, bool finite) const {
    std::uint32_t words[kVector / 4];
#pragma unroll
    for (int w = 0; w < kVector / 4; ++w)
      words[w] = finite ? cuda::codes_of(values[4 * w], values[4 * w + 1], inverse) |
                              cuda::codes_of(values[4 * w + 2], values[4 * w + 3], inverse) << 16
                        : scales::kNanCode * 0x1010101u;
    byte* const to = work_.out + row_ * work_.hidden + at;
    if (kFast || (work_.whole && at + kVector <= span_.end)) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (at + e < span_.end) to[e] = static_cast<byte>(words[e / 4] >> e % 4 * 8);
    }
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
