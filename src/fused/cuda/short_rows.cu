// The rest of a call on a GPU for a few rows, after an all_reduce: a block of threads for each row, which it
// holds in registers. Bits are those of src/host/norms.cpp.
//
// A row on one SM waits for instructions to be issued and for memory. So each number is made once, what does
// not need the row's factor is made before it is known, and the row is asked for before its weights.
#include "cuda/device/codes.cuh"
#include "cuda/device/memory.cuh"
#include "fused/cuda/totals.cuh"

namespace unisono::fused::gpu {
namespace {

constexpr unsigned kStretch = norm::kPartials;  // elements between two vectors of a thread
constexpr unsigned kBlock = scales::kBlock;     // elements that share a scale
static_assert(kBlock == kWarp * kEach);         // a vector of each lane

// Rows of more than kSure stretches, and of at most kMost.
template <unsigned kSure, unsigned kMost>
struct Length {
  static constexpr unsigned kVectors = kMost;  // of a thread
  __device__ static unsigned at(unsigned v) { return v * kStretch + threadIdx.x * kEach; }
  // Returns whether the thread's v-th vector is part of the row.
  __device__ static bool has(unsigned v, unsigned hidden) { return v < kSure || at(v) < hidden; }
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

// A thread's vectors of a row. Zeros follow the row.
template <class T, class Of>
struct Vectors {
  using Vector = Elements<T, kEach>;
  Vectors() = default;
  __device__ Vectors(const T* row, unsigned hidden) {
#pragma unroll
    for (unsigned v = 0; v < Of::kVectors; ++v)
      of[v] = Of::has(v, hidden) ? Vector::load(row + Of::at(v)) : Vector{};
  }
  __device__ void store(T* row, unsigned hidden) const {
#pragma unroll
    for (unsigned v = 0; v < Of::kVectors; ++v)
      if (Of::has(v, hidden)) of[v].store(row + Of::at(v));
  }
  Vector of[Of::kVectors];
};

// Stores the codes of a row. factors: of each vector's elements.
template <class T, class Of>
__device__ inline void store_codes(byte* row, const Vectors<T, Of>& normed, unsigned hidden,
                                   const float (&factors)[Of::kVectors]) {
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) {
    float values[kEach];
    normed.of[v].widen(values);
    const std::uint32_t codes = cuda::codes_of(values[0], values[1], factors[v]) |
                                cuda::codes_of(values[2], values[3], factors[v]) << 16;
    if (Of::has(v, hidden)) *reinterpret_cast<std::uint32_t*>(row + Of::at(v)) = codes;
  }
}

// Stores a row's scales of 128 elements each, and returns the factors. Lane v has the scale of the warp's
// v-th vectors. The factor of elements of which one is no number is NaN, and so are their codes.
template <bool kPowers, class T, class Of>
__device__ inline void store_scales(const Work& work, byte* to, const Vectors<T, Of>& normed,
                                    float (&factors)[Of::kVectors]) {
  const unsigned lane = threadIdx.x % kWarp, hidden = work.hidden;
  std::uint32_t own = 0;
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) {
    const std::uint32_t most = __reduce_max_sync(kAll, largest_of(normed.of[v]));
    if (lane == v) own = most;
  }
  const std::uint32_t largest = widen_largest<T>(own);
  const unsigned block = lane * (kStretch / kBlock) + threadIdx.x / kWarp;
  const bool stores = lane < Of::kVectors && block * kBlock < hidden;
  float factor = cuda::inverse_of(largest);
  if constexpr (kPowers) {
    const std::uint32_t power = cuda::power_of(largest);
    if (stores) to[block] = static_cast<byte>(power);
    if (scales::finite(largest)) factor = scales::inverse_of_power(power);
    for (std::size_t b = scales::blocks_of(hidden) + threadIdx.x; b < work.scale_bytes; b += kSummers)
      to[b] = byte{0};
  } else {
    if (stores) reinterpret_cast<float*>(to)[block] = cuda::scale_of(largest);
  }
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) factors[v] = __shfl_sync(kAll, factor, static_cast<int>(v));
}

// Stores a row's one scale, and returns the factor of its elements.
template <class T, class Of>
__device__ inline float store_scale(float* to, const Vectors<T, Of>& normed, unsigned hidden,
                                    Rounds& rounds) {
  std::uint32_t most = 0;
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) most = max(most, largest_of(normed.of[v]));
  const std::uint32_t largest = largest_of_row(rounds, Share(0, kRowBits, hidden), widen_largest<T>(most));
  if (threadIdx.x == 0) *to = cuda::scale_of(largest);
  return cuda::inverse_of(largest);
}

// An RMS norm of short rows that are fast.
template <class T, NormQuant kQuant, class Of>
__global__ void __launch_bounds__(kSummers, 1) finish_short_rows(const __grid_constant__ Finish of) {
  const Work& work = of.work;
  const std::size_t row = blockIdx.x;
  const unsigned hidden = work.hidden;
  const auto elements = [&](const byte* rows) {
    return reinterpret_cast<const T*>(rows + row * work.row_bytes);
  };
  const T *const sums_of_row = elements(of.sums), *const residual_of_row = elements(work.residual);
  cuda::follow_last_kernel(sums_of_row + Of::at(0), residual_of_row + Of::at(0));
  Vectors<T, Of> joined(sums_of_row, hidden);
  const Vectors<T, Of> residual(residual_of_row, hidden);
  const Vectors<T, Of> weight(reinterpret_cast<const T*>(work.weight), hidden);
  float sums[kEach] = {};
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) {
    float some[kEach], others[kEach];
    joined.of[v].widen(some);
    residual.of[v].widen(others);
#pragma unroll
    for (int e = 0; e < kEach; ++e) some[e] = some[e] + others[e];
    joined.of[v] = Elements<T, kEach>::narrow(some);
    joined.of[v].widen(some);
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums[e] = sums[e] + some[e] * some[e];  // zeros change nothing
  }
  Rounds rounds(1, 0);
  rounds.tell(0, threadIdx.x, sums);
  joined.store(const_cast<T*>(elements(work.residual_out)), hidden);
  const float factor = total_told(
      rounds, [=, eps = work.eps](float sum) { return norm::factor_of(norm::mean_of(sum, hidden), eps); });
  Vectors<T, Of> normed;
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) {
    float values[kEach], weights[kEach];
    joined.of[v].widen(values);
    weight.of[v].widen(weights);
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] = values[e] * factor * weights[e];
    normed.of[v] = Elements<T, kEach>::narrow(values);
  }
  if constexpr (kQuant == NormQuant::none) {
    normed.store(const_cast<T*>(elements(work.out)), hidden);
  } else {
    float factors[Of::kVectors];
    byte* const scales = work.scales + row * work.scale_bytes;
    if constexpr (kQuant == NormQuant::fp8_128 || kQuant == NormQuant::mx) {
      store_scales<kQuant == NormQuant::mx>(work, scales, normed, factors);
    } else {
      const float one = kQuant == NormQuant::fp8
                            ? work.inverse
                            : store_scale(reinterpret_cast<float*>(scales), normed, hidden, rounds);
#pragma unroll
      for (float& of_vector : factors) of_vector = one;
    }
    store_codes(work.out + row * hidden, normed, hidden, factors);
  }
}

template <class T, class Of>
const void* of_quant(NormQuant quant) {
  const auto address = [](void (*kernel)(Finish)) { return reinterpret_cast<const void*>(kernel); };
  switch (quant) {
    case NormQuant::fp8: return address(finish_short_rows<T, NormQuant::fp8, Of>);
    case NormQuant::fp8_token: return address(finish_short_rows<T, NormQuant::fp8_token, Of>);
    case NormQuant::fp8_128: return address(finish_short_rows<T, NormQuant::fp8_128, Of>);
    case NormQuant::mx: return address(finish_short_rows<T, NormQuant::mx, Of>);
    default: return address(finish_short_rows<T, NormQuant::none, Of>);
  }
}
template <class T>
const void* of_length(NormQuant quant, std::size_t hidden) {
  constexpr auto kBorder = [](std::size_t elements) { return static_cast<unsigned>(elements / kStretch); };
  constexpr unsigned kFirst = kBorder(kShort[0]), kSecond = kBorder(kShort[1]), kLast = kBorder(kShort[2]);
  if (hidden <= kShort[0]) return of_quant<T, Length<kBorder(kNotShort), kFirst>>(quant);
  if (hidden <= kShort[1]) return of_quant<T, Length<kFirst, kSecond>>(quant);
  return of_quant<T, Length<kSecond, kLast>>(quant);
}

}  // namespace

const void* short_rows_kernel(DType dtype, NormQuant quant, std::size_t hidden) {
  if (dtype == DType::f32) return of_length<float>(quant, hidden);
  return dtype == DType::f16 ? of_length<F16>(quant, hidden) : of_length<BF16>(quant, hidden);
}

}  // namespace unisono::fused::gpu
