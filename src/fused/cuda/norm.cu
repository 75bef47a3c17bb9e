// The rest of a call on a GPU, after an all_reduce: a block of threads for each row.
#include "cuda/device/memory.cuh"
#include "fused/cuda/row.cuh"

namespace unisono::fused::gpu {
namespace {

// Adds the residual to a row of sums, into residual_out and, if rows fit there, shared memory.
template <class T, int kThreads>
__device__ inline void join(const Finish& of, std::size_t row, byte* held) {
  // Vectors that a thread loads before it stores the first.
  constexpr int kAhead = kThreads > kSummers ? 1 : static_cast<int>(8 / sizeof(T));
  constexpr unsigned kStride = kThreads * kVector;
  using Elements = Pack<T, kVector>;
  const Work& work = of.work;
  const std::size_t begin = row * work.row_bytes;
  const byte *const sums = of.sums + begin, *const residual = work.residual + begin;
  const auto keep = [&](const float (&sum)[kVector], const float (&rest)[kVector], unsigned at) {
    Elements joined;
#pragma unroll
    for (int e = 0; e < kVector; ++e) joined.elements[e] = Wide<T>::to(sum[e] + rest[e]);
    store(work.residual_out + begin, joined, at, work.hidden, work.whole);
    if (of.row_bytes > 0) store(held, joined, at, work.hidden, true);
  };
  unsigned at = threadIdx.x * kVector;
  if (work.whole)
    for (; at < work.hidden; at += kAhead * kStride) {
      Elements sum[kAhead], rest[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (const unsigned here = at + k * kStride; here < work.hidden) {
          sum[k] = *reinterpret_cast<const Elements*>(sums + here * sizeof(T));
          rest[k] = *reinterpret_cast<const Elements*>(residual + here * sizeof(T));
        }
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (const unsigned here = at + k * kStride; here < work.hidden) {
          float some[kVector], others[kVector];
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            some[e] = Wide<T>::from(sum[k].elements[e]);
            others[e] = Wide<T>::from(rest[k].elements[e]);
          }
          keep(some, others, here);
        }
    }
  for (; at < work.hidden; at += kStride) {
    float some[kVector], others[kVector];
    load<T>(some, sums, at, work.hidden, false);
    load<T>(others, residual, at, work.hidden, false);
    keep(some, others, at);
  }
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads > kSummers ? 1 : 3)
    finish_rows(const __grid_constant__ Finish of) {
  extern __shared__ __align__(32) byte held[];
  cuda::follow_last_kernel();
  const Work& work = of.work;
  const std::size_t row = blockIdx.x;
  const Span span{0, work.hidden};
  const Weights<T> first(work, span);
  join<T, kThreads>(of, row, held);
  __syncthreads();
  const Values values =
      of.row_bytes > 0 ? Values{held, true} : Values{work.residual_out + row * work.row_bytes, work.whole};
  Finisher<T>(work, span, first, values, row).run();
}

template <class T>
const void* of_threads(int threads) {
  void (*const kernel)(Finish) = threads > kSummers ? finish_rows<T, 1024> : finish_rows<T, kSummers>;
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace

const void* finish_kernel(DType dtype, int threads) {
  if (dtype == DType::f32) return of_threads<float>(threads);
  return dtype == DType::f16 ? of_threads<F16>(threads) : of_threads<BF16>(threads);
}

cudaError_t load(int ranks) {
  constexpr auto kShared = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t state = cudaSuccess;
  const auto load_one = [&](const void* kernel) {
    cudaFuncAttributes attributes;
    if (state == cudaSuccess) state = cudaFuncSetAttribute(kernel, kShared, kMostShared);
    if (state == cudaSuccess) state = cudaFuncGetAttributes(&attributes, kernel);
  };
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int threads : {256, 1024}) load_one(finish_kernel(dtype, threads));
    if (ranks == 1 || ranks > cuda::kFewRanks) continue;
    for (const bool lines : {false, true})
      for (const bool whole : {false, true})
        for (const auto kernel : {one_step_kernel, two_steps_kernel})
          load_one(kernel({lines, whole, ranks, dtype}));
  }
  return state;
}

}  // namespace unisono::fused::gpu
