// What follows a row's sum, by the threads of a block. Bits are those of src/host/norms.cpp.
#pragma once

#include "cuda/device/codes.cuh"
#include "fused/cuda/totals.cuh"

namespace unisono::fused::gpu {

inline constexpr int kVector = 8;  // elements of a thread's load

__device__ inline std::uint32_t largest_of(const float (&values)[kVector]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int e = 0; e < kVector; ++e) largest = max(largest, numeric::as_bits(values[e]) & 0x7fffffffu);
  return largest;
}

// A thread's first weights of a share, which it loads before it has a row.
template <class T>
struct Weights {
  Elements<T, kVector> first;
};
template <class T>
__device__ inline Weights<T> weights_of(const Work& work, const Share& share) {
  Weights<T> weights;
  const unsigned i = threadIdx.x * kVector;
  if (work.whole && i < share.count)
    weights.first = Elements<T, kVector>::load(reinterpret_cast<const T*>(work.weight) + share.in_row(i));
  return weights;
}

// Returns the rounds of a row.
__device__ inline unsigned rounds_of(const Work& work) {
  return 1u + (work.layer ? 1u : 0u) + (work.quant == NormQuant::fp8_token ? 1u : 0u);
}

// Normalises a share of a row, and quantises it. All threads of a block call it, of every block that shares
// the row; the share is there. weights: of a fast row.
template <class T, bool kFast>
class Finisher {
 public:
  __device__ Finisher(const Work& work, const Share& share, const Weights<T>& weights, const Values& values,
                      std::size_t row, Rounds rounds)
      : work_(work), share_(share), weights_(weights), values_(values), row_(row), rounds_(rounds) {}

  __device__ void run() {
    const unsigned hidden = work_.hidden;
    if (work_.layer)
      mean_ = total_of<kFast, T>(rounds_, share_, values_, false, 0,
                                 [=](float sum) { return norm::mean_of(sum, hidden); });
    factor_ = total_of<kFast, T>(rounds_, share_, values_, true, mean_, [=, eps = work_.eps](float sum) {
      return norm::factor_of(norm::mean_of(sum, hidden), eps);
    });
    switch (work_.quant) {
      case NormQuant::none: {
        T* const out = reinterpret_cast<T*>(work_.out + row_ * work_.row_bytes);
        return each([&](const Normed& normed, unsigned i) {
          store<kFast>(out + share_.in_row(i), normed, share_.count - i, work_.whole);
        });
      }
      case NormQuant::fp8:
        return each_wide(
            [&](const float (&values)[kVector], unsigned i) { encode(values, i, work_.inverse, true); });
      case NormQuant::fp8_token: return by_row();
      default: return by_block();
    }
  }

 private:
  using Normed = Elements<T, kVector>;

  // Calls body(normed, i) for the thread's vectors of the share, with the elements of the norm from the i-th
  // on.
  template <class Body>
  __device__ void each(const Body& body) const {
    const auto from = [&](const byte* row, unsigned i, float (&values)[kVector]) {
      load<kFast, T, kVector>(reinterpret_cast<const T*>(row) + share_.in_row(i), share_.count - i,
                              work_.whole)
          .widen(values);
    };
    const unsigned first = threadIdx.x * kVector;
    for (unsigned i = first; i < share_.count; i += blockDim.x * kVector) {
      float values[kVector], weight[kVector], bias[kVector];
      values_.load<kFast, T, kVector>(share_, i).widen(values);
      if (kFast && i == first) weights_.first.widen(weight);
      else from(work_.weight, i, weight);
      if (work_.bias) from(work_.bias, i, bias);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        values[e] = (values[e] - mean_) * factor_ * weight[e];
        if (work_.bias) values[e] = values[e] + bias[e];
      }
      body(Normed::narrow(values), i);
    }
  }

  // Does the same with f32, and zeros past the end.
  template <class Body>
  __device__ void each_wide(const Body& body) const {
    each([&](const Normed& normed, unsigned i) {
      float values[kVector];
      normed.widen(values);
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (!kFast && i + e >= share_.count) values[e] = 0;
      body(values, i);
    });
  }

  __device__ void encode(const float (&values)[kVector], unsigned i, float inverse, bool finite) const {
    std::uint32_t words[kVector / 4];
#pragma unroll
    for (int w = 0; w < kVector / 4; ++w)
      words[w] = finite ? cuda::codes_of(values[4 * w], values[4 * w + 1], inverse) |
                              cuda::codes_of(values[4 * w + 2], values[4 * w + 3], inverse) << 16
                        : scales::kNanCode * 0x1010101u;
    byte* const to = work_.out + row_ * work_.hidden + share_.in_row(i);
    if (kFast || (work_.whole && i + kVector <= share_.count)) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (i + e < share_.count) to[e] = static_cast<byte>(words[e / 4] >> e % 4 * 8);
    }
  }

  __device__ byte* scales() const { return work_.scales + row_ * work_.scale_bytes; }

  // A scale for the row.
  __device__ void by_row() {
    std::uint32_t mine = 0;
    each_wide([&](const float (&values)[kVector], unsigned) { mine = max(mine, largest_of(values)); });
    const std::uint32_t largest = largest_of_row(rounds_, share_, mine, blockDim.x / kWarp);
    if (share_.block == 0 && threadIdx.x == 0)
      *reinterpret_cast<float*>(scales()) = scales::scale_of(largest);
    const bool finite = scales::finite(largest);
    const float inverse = finite ? scales::inverse_of(largest) : 1.0f;
    each_wide([&](const float (&values)[kVector], unsigned i) { encode(values, i, inverse, finite); });
  }

  // A scale for each 128 elements, which 16 neighbours have.
  __device__ void by_block() const {
    constexpr auto kBlock = static_cast<unsigned>(scales::kBlock), kSharers = kBlock / kVector;
    const bool mx = work_.quant == NormQuant::mx;
    byte* const row_scales = scales();
    each_wide([&](const float (&values)[kVector], unsigned i) {
      const unsigned block = share_.in_row(i) / kBlock,
                     elements = min(kBlock, share_.count - i / kBlock * kBlock);
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
      encode(values, i, inverse, finite);
    });
    if (mx && share_.block == 0)
      for (std::size_t b = scales::blocks_of(work_.hidden) + threadIdx.x; b < work_.scale_bytes;
           b += blockDim.x)
        row_scales[b] = byte{0};
  }

  const Work& work_;
  const Share& share_;
  const Weights<T>& weights_;
  const Values values_;
  const std::size_t row_;
  Rounds rounds_;
  float mean_ = 0, factor_ = 0;
};

}  // namespace unisono::fused::gpu
