// The rest of a call on a GPU: a block of threads for each row. Bits are those of src/host/norms.cpp.
#include "base/norm.hpp"
#include "fused/cuda/norm.hpp"

namespace unisono::fused::gpu {
namespace {

constexpr int kVector = 8;                           // elements of a thread's load
constexpr int kThreads = norm::kPartials / kVector;  // a thread has the partial sums of its elements
constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

template <class T>
struct alignas(sizeof(T) * kVector) Vector {
  T elements[kVector];
};

// Loads elements from `at` on, at most 8 of `count`. whole: by one load, if there are 8.
template <class T>
__device__ inline void load(float (&values)[kVector], const void* row, std::size_t at, std::size_t count,
                            bool whole) {
  const T* const from = static_cast<const T*>(row) + at;
  if (whole && at + kVector <= count) {
    const auto vector = *reinterpret_cast<const Vector<T>*>(from);
#pragma unroll
    for (int e = 0; e < kVector; ++e) values[e] = Wide<T>::from(vector.elements[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kVector; ++e) values[e] = at + e < count ? Wide<T>::from(from[e]) : 0.0f;
  }
}

template <class T>
__device__ inline void store(void* row, const T (&elements)[kVector], std::size_t at, std::size_t count,
                             bool whole) {
  T* const to = static_cast<T*>(row) + at;
  if (whole && at + kVector <= count) {
    Vector<T> vector;
#pragma unroll
    for (int e = 0; e < kVector; ++e) vector.elements[e] = elements[e];
    *reinterpret_cast<Vector<T>*>(to) = vector;
  } else {
#pragma unroll
    for (int e = 0; e < kVector; ++e)
      if (at + e < count) to[e] = elements[e];
  }
}

// Returns the row's sum to every thread: a tree of halves over all partial sums (base/norm.hpp). Thread t has
// numbers 8 t to 8 t + 7.
__device__ inline float total_of(float (&partials)[kVector]) {
  __shared__ float upper[kThreads * kVector];
  __shared__ float total;
  const int thread = static_cast<int>(threadIdx.x);
  for (int half = kThreads / 2; half >= kWarp; half /= 2) {
    if (thread >= half && thread < 2 * half)
#pragma unroll
      for (int e = 0; e < kVector; ++e) upper[thread * kVector + e] = partials[e];
    __syncthreads();
    if (thread < half)
#pragma unroll
      for (int e = 0; e < kVector; ++e) partials[e] = partials[e] + upper[(thread + half) * kVector + e];
  }
  if (thread < kWarp) {
    for (int half = kWarp / 2; half > 0; half /= 2)
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        partials[e] = partials[e] + __shfl_down_sync(kAll, partials[e], static_cast<unsigned>(half));
#pragma unroll
    for (int half = kVector / 2; half > 0; half /= 2)
#pragma unroll
      for (int e = 0; e < half; ++e) partials[e] = partials[e] + partials[e + half];
    if (thread == 0) total = partials[0];
  }
  __syncthreads();
  const float result = total;
  __syncthreads();  // the next sum may overwrite it
  return result;
}

// Returns the largest of all threads' numbers to each.
__device__ inline std::uint32_t largest_of_row(std::uint32_t mine) {
  __shared__ std::uint32_t found[kThreads / kWarp];
  mine = __reduce_max_sync(kAll, mine);
  if (threadIdx.x % kWarp == 0) found[threadIdx.x / kWarp] = mine;
  __syncthreads();
  std::uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kThreads / kWarp; ++w) largest = max(largest, found[w]);
  return largest;
}

__device__ inline std::uint32_t largest_of(const float (&values)[kVector]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int e = 0; e < kVector; ++e) largest = max(largest, numeric::as_bits(values[e]) & 0x7fffffffu);
  return largest;
}

// A thread's part of a row: its elements of every 1024, as residual_out has them.
template <class T, bool kLayer>
struct Row {
  const Work& work;
  std::size_t number, count;
  bool whole;
  float mean = 0, factor = 0;

  __device__ void* residual_out() const { return work.residual_out + number * work.row_bytes; }

  // Calls body(values, at) for the thread's vectors, with the elements of residual_out.
  template <class Body>
  __device__ void each(const Body& body) const {
    for (std::size_t at = threadIdx.x * kVector; at < count; at += norm::kPartials) {
      float values[kVector];
      load<T>(values, residual_out(), at, count, whole);
      body(values, at);
    }
  }

  __device__ void join() {
    float squares[kVector] = {};
    for (std::size_t at = threadIdx.x * kVector; at < count; at += norm::kPartials) {
      float sums[kVector], residual[kVector];
      load<T>(sums, work.sums + number * work.row_bytes, at, count, whole);
      load<T>(residual, work.residual + number * work.row_bytes, at, count, whole);
      T joined[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) joined[e] = Wide<T>::to(sums[e] + residual[e]);
      store(residual_out(), joined, at, count, whole);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const float value = at + e < count ? Wide<T>::from(joined[e]) : 0.0f;
        squares[e] = squares[e] + (kLayer ? value : value * value);
      }
    }
    float sum = total_of(squares);
    if constexpr (kLayer) {
      mean = norm::mean_of(sum, count);
      float centred[kVector] = {};
      each([&](const float (&values)[kVector], std::size_t at) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const float value = values[e] - mean;
          if (at + e < count) centred[e] = centred[e] + value * value;
        }
      });
      sum = total_of(centred);
    }
    factor = norm::factor_of(norm::mean_of(sum, count), work.eps);
  }

  // Calls body(elements, at) for the thread's vectors, with the elements of the norm.
  template <class Body>
  __device__ void normalise(const Body& body) const {
    each([&](const float (&values)[kVector], std::size_t at) {
      float weight[kVector], bias[kVector];
      load<T>(weight, work.weight, at, count, whole);
      if (work.bias) load<T>(bias, work.bias, at, count, whole);
      T elements[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const float scaled = (kLayer ? values[e] - mean : values[e]) * factor * weight[e];
        elements[e] = Wide<T>::to(work.bias ? scaled + bias[e] : scaled);
      }
      body(elements, at);
    });
  }

  // Does the same with f32, and zeros past the end. Threads without elements take part too.
  template <class Body>
  __device__ void normalise_wide(const Body& body) const {
    normalise([&](const T(&elements)[kVector], std::size_t at) {
      float values[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[e] = at + e < count ? Wide<T>::from(elements[e]) : 0.0f;
      body(values, at);
    });
  }

  __device__ void encode(const float (&values)[kVector], std::size_t at, float inverse, bool finite) const {
    std::uint8_t codes[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e)
      codes[e] = finite ? norm::saturated_code_of(values[e], inverse) : scales::kNanCode;
    store(work.out + number * count, codes, at, count, whole);
  }
};

template <class T, bool kLayer>
__global__ void __launch_bounds__(kThreads) finish_rows(Work work) {
  Row<T, kLayer> row{work, blockIdx.x, work.hidden, work.whole};
  row.join();
  const std::size_t count = row.count;
  byte* const row_scales = work.scales + row.number * work.scale_bytes;
  switch (work.quant) {
    case NormQuant::none:
      return row.normalise([&](const T(&elements)[kVector], std::size_t at) {
        store(work.out + row.number * work.row_bytes, elements, at, count, row.whole);
      });
    case NormQuant::fp8:
      return row.normalise_wide([&](const float (&values)[kVector], std::size_t at) {
        row.encode(values, at, work.inverse, true);
      });
    case NormQuant::fp8_token: {
      std::uint32_t mine = 0;
      row.normalise_wide(
          [&](const float (&values)[kVector], std::size_t) { mine = max(mine, largest_of(values)); });
      const std::uint32_t largest = largest_of_row(mine);
      if (threadIdx.x == 0) *reinterpret_cast<float*>(row_scales) = scales::scale_of(largest);
      const bool finite = scales::finite(largest);
      const float inverse = finite ? scales::inverse_of(largest) : 1.0f;
      return row.normalise_wide(
          [&](const float (&values)[kVector], std::size_t at) { row.encode(values, at, inverse, finite); });
    }
    default: break;
  }
  // a scale for each 128 elements: 16 threads have them
  constexpr int kSharers = static_cast<int>(scales::kBlock) / kVector;
  row.normalise_wide([&](const float (&values)[kVector], std::size_t at) {
    const std::size_t block = at / scales::kBlock;
    const std::size_t elements = smaller(scales::kBlock, count - block * scales::kBlock);
    const auto sharers = static_cast<unsigned>((elements + kVector - 1) / kVector);
    const unsigned mask = ((1u << sharers) - 1) << (threadIdx.x % kWarp / kSharers * kSharers);
    const std::uint32_t largest = __reduce_max_sync(mask, largest_of(values));
    const bool finite = scales::finite(largest), first = threadIdx.x % kSharers == 0;
    float inverse = 1;
    if (work.quant == NormQuant::mx) {
      const std::uint32_t power = scales::power_of(largest);
      if (first) row_scales[block] = static_cast<byte>(power);
      if (finite) inverse = scales::inverse_of_power(power);
    } else {
      if (first) reinterpret_cast<float*>(row_scales)[block] = scales::scale_of(largest);
      if (finite) inverse = scales::inverse_of(largest);
    }
    row.encode(values, at, inverse, finite);
  });
  if (work.quant == NormQuant::mx)
    for (std::size_t b = scales::blocks_of(count) + threadIdx.x; b < work.scale_bytes; b += kThreads)
      row_scales[b] = byte{0};
}

template <class T>
const void* kernel_of(bool layer) {
  return layer ? reinterpret_cast<const void*>(finish_rows<T, true>)
               : reinterpret_cast<const void*>(finish_rows<T, false>);
}

}  // namespace

cudaError_t finish(const Work& work, std::size_t rows, DType dtype, bool layer, cudaStream_t stream) {
  const void* const kernel = dtype == DType::f32   ? kernel_of<float>(layer)
                             : dtype == DType::f16 ? kernel_of<F16>(layer)
                                                   : kernel_of<BF16>(layer);
  Work copy = work;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(rows)), dim3(kThreads), arguments, 0, stream);
}

}  // namespace unisono::fused::gpu
