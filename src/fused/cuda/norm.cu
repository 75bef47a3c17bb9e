// The rest of a call on a GPU, after an all_reduce: a block of threads for each row.
#include "cuda/device/cluster.cuh"
#include "cuda/device/memory.cuh"
#include "fused/cuda/row.cuh"

namespace unisono::fused::gpu {
namespace {

// Adds the residual to a span of a row of sums, into residual_out and, if rows fit there, the shared memory
// of every block of the cluster.
template <class T, int kThreads, bool kWhole>
__device__ inline void join(const Finish& of, const Span& span, std::size_t row, byte* held) {
  // Vectors that a thread loads before it stores the first.
  constexpr int kAhead = kWhole ? (kThreads > kSummers ? 4 : 8) / sizeof(T) : 1;
  constexpr unsigned kStride = kThreads * kVector;
  using Elements = Pack<T, kVector>;
  const Work& work = of.work;
  const std::size_t begin = row * work.row_bytes;
  for (unsigned first = span.begin + threadIdx.x * kVector; first < span.end; first += kAhead * kStride) {
    Elements sums[kAhead], rest[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (const unsigned at = first + k * kStride; at < span.end) {
        sums[k] = load<T, kVector>(of.sums + begin, at, span.end, kWhole);
        rest[k] = load<T, kVector>(work.residual + begin, at, span.end, kWhole);
      }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const unsigned at = first + k * kStride;
      if (at >= span.end) break;
      Elements joined;
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        joined.elements[e] =
            Wide<T>::to(Wide<T>::from(sums[k].elements[e]) + Wide<T>::from(rest[k].elements[e]));
      store(work.residual_out + begin, joined, at, span.end, kWhole);
      if (of.row_bytes > 0)
        cuda::store_in_cluster(reinterpret_cast<Elements*>(reinterpret_cast<T*>(held) + at), joined,
                               of.cluster);
    }
  }
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads > kSummers ? 2 : 3)
    finish_rows(const __grid_constant__ Finish of) {
  extern __shared__ __align__(32) byte shared[];
  cuda::come_to_cluster(of.cluster);
  cuda::follow_last_kernel();
  const Work& work = of.work;
  const std::size_t row = blockIdx.x / of.cluster;
  const unsigned begin = blockIdx.x % of.cluster * of.part;
  const Span span{begin, min(begin + of.part, work.hidden)};
  byte* const held = shared + kPartialBytes;
  Finisher<T> finisher(work, span, shared);
  cuda::await_cluster(of.cluster);  // its blocks have begun
  if (work.whole) join<T, kThreads, true>(of, span, row, held);
  else join<T, kThreads, false>(of, span, row, held);
  cuda::meet_cluster(of.cluster);
  finisher.run(1, [&](unsigned) -> Line {
    if (of.row_bytes > 0) return {held, true, row};
    return {work.residual_out + row * work.row_bytes, work.whole, row};
  });
}

template <class T>
const void* of_threads(int threads) {
  void (*const kernel)(Finish) = threads > kSummers ? finish_rows<T, 512> : finish_rows<T, kSummers>;
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace

const void* finish_kernel(DType dtype, int threads) {
  if (dtype == DType::f32) return of_threads<float>(threads);
  return dtype == DType::f16 ? of_threads<F16>(threads) : of_threads<BF16>(threads);
}

std::size_t shared_bytes(unsigned row_bytes, std::size_t rows) { return rows * (kPartialBytes + row_bytes); }

cudaError_t load(int ranks) {
  constexpr auto kShared = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t state = cudaSuccess;
  const auto load_one = [&](const void* kernel) {
    cudaFuncAttributes attributes;
    if (state == cudaSuccess) state = cudaFuncSetAttribute(kernel, kShared, kMostShared);
    if (state == cudaSuccess) state = cudaFuncGetAttributes(&attributes, kernel);
  };
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int threads : {256, 512}) load_one(finish_kernel(dtype, threads));
    if (ranks == 1 || ranks > cuda::kFewRanks) continue;
    for (const bool lines : {false, true})
      for (const bool whole : {false, true})
        for (const auto kernel : {one_step_kernel, two_steps_kernel})
          load_one(kernel({lines, whole, ranks, dtype}));
  }
  return state;
}

}  // namespace unisono::fused::gpu
