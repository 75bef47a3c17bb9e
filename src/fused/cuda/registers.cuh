// Rows, or blocks' shares of them, that the first kSummers threads of a block hold in registers, and what
// follows their sum. Bits are those of src/host/norms.cpp.
//
// A row on one SM waits for instructions to be issued. So each number is made once, and what does not need
// the row's factor is made before it is known.
#pragma once

#include <bit>

#include "cuda/device/codes.cuh"
#include "fused/cuda/totals.cuh"

namespace unisono::fused::gpu {

inline constexpr unsigned kStretch = norm::kPartials;  // elements of a share between two vectors of a thread
inline constexpr unsigned kBlock = scales::kBlock;     // elements that share a scale
static_assert(kBlock == kWarp * kEach);                // a vector of each lane

// Which elements of a row a thread has. kShares: blocks that share the row. kSure: vectors that every thread
// has. kMost: vectors of a thread.
template <unsigned kShares, int kSure, unsigned kMost>
struct Place {
  static constexpr unsigned kVectors = kMost;
  static constexpr unsigned kBetween = kShares * kStretch;  // elements of the row between two vectors
  static constexpr unsigned kBits = kRowBits - static_cast<unsigned>(std::countr_zero(kShares));
  static_assert(1u << kBits >= kBlock);  // neighbours in the share are neighbours in the row

  __device__ explicit Place(const Share& share)
      : first(share.in_row(threadIdx.x * kEach)), count(share.count) {}
  // Returns where the thread's v-th vector is, in the row. In 64 bits: one address, and constants.
  __device__ std::size_t at(unsigned v) const { return std::size_t{first} + v * kBetween; }
  // Returns where it is in the share.
  __device__ static unsigned in_share(unsigned v) { return v * kStretch + threadIdx.x * kEach; }
  // Returns whether it is part of the row.
  __device__ bool has(unsigned v) const { return static_cast<int>(v) < kSure || in_share(v) < count; }
  unsigned first, count;
};

// Returns the largest magnitude of a vector, and the f32 bits of such a magnitude. Magnitudes of 16 bits are
// compared as they lie.
template <class T>
__device__ inline std::uint32_t largest_of(const Elements<T, kEach>& vector) {
  if constexpr (sizeof(T) == 2) {
    const std::uint32_t most = __vmaxu2(vector.words[0] & 0x7fff7fffu, vector.words[1] & 0x7fff7fffu);
    return max(most & 0xffffu, most >> 16);
  } else {
    std::uint32_t most = 0;
#pragma unroll
    for (const std::uint32_t word : vector.words) most = max(most, word & 0x7fffffffu);
    return most;
  }
}
template <class T>
__device__ inline std::uint32_t widen_largest(std::uint32_t largest) {
  if constexpr (sizeof(T) == 2)
    return numeric::as_bits(Wide<T>::from(T{static_cast<std::uint16_t>(largest)}));
  else return largest;
}

// A thread's vectors. Zeros follow the row.
template <class T, class Of>
struct Vectors {
  using Vector = Elements<T, kEach>;
  Vectors() = default;
  __device__ Vectors(const T* row, const Of& place) {
#pragma unroll
    for (unsigned v = 0; v < Of::kVectors; ++v)
      of[v] = place.has(v) ? Vector::load(row + place.at(v)) : Vector{};
  }
  // Returns those of a share that lies by itself.
  __device__ static Vectors of_share(const T* share, const Of& place) {
    Vectors vectors;
#pragma unroll
    for (unsigned v = 0; v < Of::kVectors; ++v)
      vectors.of[v] = place.has(v) ? Vector::load(share + Of::in_share(v)) : Vector{};
    return vectors;
  }
  __device__ void store(T* row, const Of& place) const {
#pragma unroll
    for (unsigned v = 0; v < Of::kVectors; ++v)
      if (place.has(v)) of[v].store(row + place.at(v));
  }
  Vector of[Of::kVectors];
};

// Returns the rounded results of op(one, other) of the elements of two vectors.
template <class T, class Op>
__device__ inline Elements<T, kEach> combine(const Elements<T, kEach>& one, const Elements<T, kEach>& other,
                                             const Op& op) {
  float values[kEach], others[kEach];
  one.widen(values);
  other.widen(others);
#pragma unroll
  for (int e = 0; e < kEach; ++e) values[e] = op(values[e], others[e]);
  return Elements<T, kEach>::narrow(values);
}

// Adds a vector's squares to a thread's partial sums. Zeros change nothing.
template <class T>
__device__ inline void add_squares(float (&sums)[kEach], const Elements<T, kEach>& vector) {
  float some[kEach];
  vector.widen(some);
#pragma unroll
  for (int e = 0; e < kEach; ++e) sums[e] = sums[e] + some[e] * some[e];
}

// Stores the codes of a row. factors: of each vector's elements.
template <class T, class Of>
__device__ inline void store_codes(byte* row, const Of& place, const Vectors<T, Of>& normed,
                                   const float (&factors)[Of::kVectors]) {
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) {
    float values[kEach];
    normed.of[v].widen(values);
    const std::uint32_t codes = cuda::codes_of(values[0], values[1], factors[v]) |
                                cuda::codes_of(values[2], values[3], factors[v]) << 16;
    if (place.has(v)) *reinterpret_cast<std::uint32_t*>(row + place.at(v)) = codes;
  }
}

// Stores the scales of 128 elements each, and returns the factors. Lane v has the scale of the warp's v-th
// vectors. The factor of elements of which one is no number is NaN, and so are their codes.
template <class T, class Of>
__device__ inline void store_scales(const Work& work, byte* to, bool powers, const Share& share,
                                    const Of& place, const Vectors<T, Of>& normed,
                                    float (&factors)[Of::kVectors]) {
  const unsigned lane = threadIdx.x % kWarp;
  std::uint32_t own = 0;
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) {
    const std::uint32_t most = __reduce_max_sync(kAll, largest_of(normed.of[v]));
    if (Of::kVectors == 1 || lane == v) own = most;
  }
  const std::uint32_t largest = widen_largest<T>(own);
  const unsigned block = (place.first + lane * Of::kBetween) / kBlock;
  const bool stores = lane < Of::kVectors && lane * kStretch + threadIdx.x / kWarp * kBlock < place.count;
  float factor = cuda::inverse_of(largest);
  if (powers) {
    const std::uint32_t power = cuda::power_of(largest);
    if (stores) to[block] = static_cast<byte>(power);
    if (scales::finite(largest)) factor = scales::inverse_of_power(power);
    if (share.block == 0)
      for (std::size_t b = scales::blocks_of(work.hidden) + threadIdx.x; b < work.scale_bytes; b += kSummers)
        to[b] = byte{0};
  } else {
    if (stores) reinterpret_cast<float*>(to)[block] = cuda::scale_of(largest);
  }
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v)
    factors[v] = Of::kVectors == 1 ? factor : __shfl_sync(kAll, factor, static_cast<int>(v));
}

// Stores a row's one scale, and returns the factor of its elements.
template <class T, class Of>
__device__ inline float store_scale(float* to, const Share& share, const Vectors<T, Of>& normed,
                                    Rounds& rounds) {
  std::uint32_t most = 0;
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) most = max(most, largest_of(normed.of[v]));
  const std::uint32_t largest = largest_of_row(rounds, share, widen_largest<T>(most), kSummers / kWarp);
  if (share.block == 0 && threadIdx.x == 0) *to = cuda::scale_of(largest);
  return cuda::inverse_of(largest);
}

// Finishes an RMS norm's row, of which each thread has told its partial sums. joined: with the residual.
// quant: a NormQuant, or an std::integral_constant of one. The block's first kSummers threads call it, of
// every block that shares the row; no other thread of a block is left.
template <class T, class Of, class Quant>
__device__ inline void finish_told(const Work& work, std::size_t row, const Share& share, const Of& place,
                                   Rounds& rounds, const Vectors<T, Of>& joined, const Vectors<T, Of>& weight,
                                   const Quant& quant) {
  joined.store(reinterpret_cast<T*>(work.residual_out + row * work.row_bytes), place);
  const float factor = total_told(rounds, [hidden = work.hidden, eps = work.eps](float sum) {
    return norm::factor_of(norm::mean_of(sum, hidden), eps);
  });
  Vectors<T, Of> normed;
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v)
    normed.of[v] = combine(joined.of[v], weight.of[v],
                           [factor](float value, float scale) { return value * factor * scale; });
  if (quant == NormQuant::none)
    return normed.store(reinterpret_cast<T*>(work.out + row * work.row_bytes), place);
  float factors[Of::kVectors];
  byte* const scales = work.scales + row * work.scale_bytes;
  if (quant == NormQuant::fp8_128 || quant == NormQuant::mx) {
    store_scales(work, scales, quant == NormQuant::mx, share, place, normed, factors);
  } else {
    const float one = quant == NormQuant::fp8
                          ? work.inverse
                          : store_scale(reinterpret_cast<float*>(scales), share, normed, rounds);
#pragma unroll
    for (float& of_vector : factors) of_vector = one;
  }
  store_codes(work.out + row * work.hidden, place, normed, factors);
}

}  // namespace unisono::fused::gpu
