// What follows a row's sum, by the threads of a block. Bits are those of src/host/norms.cpp.
#pragma once

#include <bit>

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
__device__ inline Pack<T, kCount> load(const void* row, unsigned at, unsigned end, bool whole) {
  const T* const from = static_cast<const T*>(row) + at;
  if (whole && at + kCount <= end) return *reinterpret_cast<const Pack<T, kCount>*>(from);
  Pack<T, kCount> pack;
#pragma unroll
  for (int e = 0; e < kCount; ++e) pack.elements[e] = at + e < end ? from[e] : T{};
  return pack;
}
template <class T>
__device__ inline void load(float (&values)[kVector], const void* row, unsigned at, unsigned end,
                            bool whole) {
  const auto pack = load<T, kVector>(row, at, end, whole);
#pragma unroll
  for (int e = 0; e < kVector; ++e) values[e] = Wide<T>::from(pack.elements[e]);
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
struct Line {
  const byte* values;
  bool whole;
  std::size_t row;  // its number
};

// The partial sums of a row, of each summer.
using Partials = Pack<float, kEach>[kSummers];
inline constexpr std::size_t kPartialBytes = sizeof(Partials);  // of shared memory, for each row at a time

// Adds a summer's terms of a row: elements, or squares of their distances from the mean.
template <class T, bool kWhole>
__device__ inline Pack<float, kEach> terms_of(const Line& line, unsigned summer, unsigned count, bool squared,
                                              float mean) {
  constexpr int kAhead = kWhole ? 4 : 1;  // loads before the first addition
  constexpr unsigned kStride = norm::kPartials;
  Pack<float, kEach> sums{};
#pragma unroll 1
  for (unsigned first = summer * kEach; first < count; first += kAhead * kStride) {
    Pack<T, kEach> some[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (const unsigned at = first + k * kStride; at < count) {
        if constexpr (kWhole)  // a row of whole vectors
          some[k] = *reinterpret_cast<const Pack<T, kEach>*>(reinterpret_cast<const T*>(line.values) + at);
        else some[k] = load<T, kEach>(line.values, at, count, false);
      }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const unsigned at = first + k * kStride;
      if (at >= count) break;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const float value = Wide<T>::from(some[k].elements[e]), centred = value - mean;
        const float term = squared ? centred * centred : value;
        if (kWhole || at + e < count) sums.elements[e] = sums.elements[e] + term;
      }
    }
  }
  return sums;
}

// Returns the sum of a row's partial sums to each lane of a warp: a tree of halves, of the summers' sums,
// then of the elements of one summer.
__device__ inline float total_of(const Partials& partials) {
  const unsigned lane = threadIdx.x % kWarp;
  float sums[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const auto at = [&](unsigned warp) { return partials[lane + warp * kWarp].elements[e]; };
    sums[e] = ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
  }
#pragma unroll
  for (int kept = kEach / 2; kept > 0; kept /= 2) {  // a lane keeps the sums of one half of its elements
    const unsigned distance = kept * kWarp / kEach;
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int e = 0; e < kept; ++e) {
      const float own = upper ? sums[e + kept] : sums[e], other = upper ? sums[e] : sums[e + kept];
      sums[e] = own + __shfl_xor_sync(kAll, other, distance);
    }
  }
  float sum = sums[0];
#pragma unroll
  for (const unsigned distance : {4u, 2u, 1u, 16u, 8u}) sum = sum + __shfl_xor_sync(kAll, sum, distance);
  return sum;
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

// Normalises a span of each of a few rows, and quantises it. All threads of a block call it, of every block
// that has a span of the rows; all of each row is there.
template <class T>
class Finisher {
 public:
  // partials: shared memory, for every row at a time. Loads the thread's first weights.
  __device__ Finisher(const Work& work, const Span& span, byte* partials)
      : work_(work),
        span_(span),
        partials_(reinterpret_cast<Partials*>(partials)),
        weights_(load<T, kVector>(work.weight, first_of(span), span.end, work.whole)) {}

  // line(i): row i of `count`, at most kFewRanks; without values: none.
  template <class Lines>
  __device__ void run(unsigned count, const Lines& line) {
    __shared__ float means[cuda::kFewRanks], factors[cuda::kFewRanks];
    const unsigned thread = threadIdx.x, warp = thread / kWarp, groups = blockDim.x / kSummers;
#pragma unroll 1
    for (bool squared = !work_.layer;; squared = true) {
      const bool centred = squared && work_.layer;
#pragma unroll 1
      for (unsigned i = thread / kSummers; i < count && thread < groups * kSummers; i += groups)
        if (const Line one = line(i); one.values)
          partials_[i][thread % kSummers] = terms_of(one, thread % kSummers, squared, centred ? means[i] : 0);
      __syncthreads();
      if (warp < count) {
        const float mean = norm::mean_of(total_of(partials_[warp]), work_.hidden);
        if (thread % kWarp == 0) {
          if (squared) factors[warp] = norm::factor_of(mean, work_.eps);
          if (!centred) means[warp] = squared ? 0.0f : mean;
        }
      }
      __syncthreads();
      if (squared) break;
    }
#pragma unroll 1
    for (unsigned i = 0; i < count; ++i)
      if (const Line one = line(i); one.values) finish(one, means[i], factors[i]);
  }

 private:
  __device__ Pack<float, kEach> terms_of(const Line& line, unsigned summer, bool squared, float mean) const {
    if (work_.hidden % kEach == 0 && line.whole)
      return gpu::terms_of<T, true>(line, summer, work_.hidden, squared, mean);
    return gpu::terms_of<T, false>(line, summer, work_.hidden, squared, mean);
  }

  __device__ static unsigned first_of(const Span& span) { return span.begin + threadIdx.x * kVector; }

  // A row whose mean and factor are known.
  struct Scaled {
    Line line;
    float mean, factor;
  };

  __device__ void finish(const Line& line, float mean, float factor) const {
    const Scaled row{line, mean, factor};
    switch (work_.quant) {
      case NormQuant::none:
        return each(row, span_, [&](const Pack<T, kVector>& pack, unsigned at) {
          store(work_.out + line.row * work_.row_bytes, pack, at, span_.end, work_.whole);
        });
      case NormQuant::fp8:
        return each_wide(row, span_, [&](const float (&values)[kVector], unsigned at) {
          encode(row, values, at, work_.inverse, true);
        });
      case NormQuant::fp8_token: return by_row(row);
      default: return by_block(row);
    }
  }

  // Calls body(pack, at) for the thread's vectors of a span, with the elements of the norm.
  template <class Body>
  __device__ void each(const Scaled& row, const Span& span, const Body& body) const {
    for (unsigned at = first_of(span); at < span.end; at += blockDim.x * kVector) {
      float values[kVector], bias[kVector];
      load<T>(values, row.line.values, at, span.end, row.line.whole);
      const bool loaded = at == first_of(span_) && at < span_.end;
      const auto weight = loaded ? weights_ : load<T, kVector>(work_.weight, at, span.end, work_.whole);
      if (work_.bias) load<T>(bias, work_.bias, at, span.end, work_.whole);
      Pack<T, kVector> pack;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const float scaled = (values[e] - row.mean) * row.factor * Wide<T>::from(weight.elements[e]);
        pack.elements[e] = Wide<T>::to(work_.bias ? scaled + bias[e] : scaled);
      }
      body(pack, at);
    }
  }

  // Does the same with f32, and zeros past the end.
  template <class Body>
  __device__ void each_wide(const Scaled& row, const Span& span, const Body& body) const {
    each(row, span, [&](const Pack<T, kVector>& pack, unsigned at) {
      float values[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[e] = Wide<T>::from(pack.elements[e]);
      if (at + kVector > span.end)
#pragma unroll
        for (int e = 0; e < kVector; ++e)
          if (at + e >= span.end) values[e] = 0;
      body(values, at);
    });
  }

  __device__ void encode(const Scaled& row, const float (&values)[kVector], unsigned at, float inverse,
                         bool finite) const {
    const auto two = [&](int e) { return cuda::codes_of(values[e], values[e + 1], inverse); };
    constexpr std::uint32_t kNans = scales::kNanCode * 0x01010101u;
    const uint2 words{finite ? two(0) | two(2) << 16 : kNans, finite ? two(4) | two(6) << 16 : kNans};
    store(work_.out + row.line.row * work_.hidden, std::bit_cast<Pack<std::uint8_t, kVector>>(words), at,
          span_.end, work_.whole);
  }
  __device__ byte* scales(const Scaled& row) const { return work_.scales + row.line.row * work_.scale_bytes; }

  // A scale for the row, whose largest element every block finds by itself.
  __device__ void by_row(const Scaled& row) const {
    std::uint32_t mine = 0;
    each_wide(row, {0, work_.hidden},
              [&](const float (&values)[kVector], unsigned) { mine = max(mine, largest_of(values)); });
    const std::uint32_t largest = largest_of_block(mine);
    if (span_.begin == 0 && threadIdx.x == 0)
      *reinterpret_cast<float*>(scales(row)) = scales::scale_of(largest);
    const bool finite = scales::finite(largest);
    const float inverse = finite ? scales::inverse_of(largest) : 1.0f;
    each_wide(row, span_,
              [&](const float (&values)[kVector], unsigned at) { encode(row, values, at, inverse, finite); });
  }

  // A scale for each 128 elements, which 16 neighbours have.
  __device__ void by_block(const Scaled& row) const {
    constexpr auto kBlock = static_cast<unsigned>(scales::kBlock), kSharers = kBlock / kVector;
    const bool mx = work_.quant == NormQuant::mx;
    byte* const row_scales = scales(row);
    each_wide(row, span_, [&](const float (&values)[kVector], unsigned at) {
      const unsigned block = at / kBlock,
                     sharers = (min(kBlock, span_.end - block * kBlock) + kVector - 1) / kVector;
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
      encode(row, values, at, inverse, finite);
    });
    if (mx && span_.begin == 0)
      for (std::size_t b = scales::blocks_of(work_.hidden) + threadIdx.x; b < work_.scale_bytes;
           b += blockDim.x)
        row_scales[b] = byte{0};
  }

  const Work& work_;
  const Span span_;
  Partials* const partials_;
  const Pack<T, kVector> weights_;
};

}  // namespace unisono::fused::gpu
