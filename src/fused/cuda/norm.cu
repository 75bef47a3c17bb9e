// The rest of a call on a GPU, after an all_reduce: a block of threads for each row.
#include "cuda/api.hpp"
#include "cuda/device/memory.cuh"
#include "fused/cuda/row.cuh"

namespace unisono::fused::gpu {
namespace {

// Adds the residual to a row of sums, into residual_out and, if rows fit there, shared memory.
template <class T, int kThreads, bool kFast>
__device__ inline void join(const Finish& of, std::size_t row, byte* held) {
  // Vectors that a thread loads before it stores the first.
  constexpr int kAhead = kThreads > kSummers ? 1 : static_cast<int>(8 / sizeof(T));
  constexpr unsigned kStride = kThreads * kVector;
  using Joined = Elements<T, kVector>;
  const Work& work = of.work;
  const unsigned hidden = work.hidden;
  const auto elements = [&](const byte* rows) {
    return reinterpret_cast<const T*>(rows + row * work.row_bytes);
  };
  const T *const sums = elements(of.sums), *const residual = elements(work.residual);
  T *const out = const_cast<T*>(elements(work.residual_out)), *const kept = reinterpret_cast<T*>(held);
  for (unsigned first = threadIdx.x * kVector; first < hidden; first += kAhead * kStride) {
    Joined sum[kAhead], rest[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (const unsigned at = first + k * kStride; at < hidden) {
        sum[k] = load<kFast, T, kVector>(sums + at, hidden - at, work.whole);
        rest[k] = load<kFast, T, kVector>(residual + at, hidden - at, work.whole);
      }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const unsigned at = first + k * kStride;
      if (at >= hidden) break;
      float some[kVector], others[kVector];
      sum[k].widen(some);
      rest[k].widen(others);
#pragma unroll
      for (int e = 0; e < kVector; ++e) some[e] = some[e] + others[e];
      const auto joined = Joined::narrow(some);
      store<kFast>(out + at, joined, hidden - at, work.whole);
      if (kFast || of.row_bytes > 0) store<kFast>(kept + at, joined, hidden - at, true);
    }
  }
}

// kFast: rows are whole, and lie in shared memory.
template <class T, int kThreads, bool kFast>
__global__ void __launch_bounds__(kThreads, kThreads > kSummers ? 1 : 3)
    finish_rows(const __grid_constant__ Finish of) {
  extern __shared__ __align__(32) byte held[];
  cuda::follow_last_kernel();
  const Work& work = of.work;
  const std::size_t row = blockIdx.x;
  const Share share(0, kRowBits, work.hidden);
  const Weights<T> weights = weights_of<T>(work, share);
  join<T, kThreads, kFast>(of, row, held);
  __syncthreads();
  const Values values =
      kFast || of.row_bytes > 0
          ? Values{.at = held, .alone = true, .whole = true}
          : Values{.at = work.residual_out + row * work.row_bytes, .alone = true, .whole = work.whole};
  Finisher<T, kFast>(work, share, weights, values, row, Rounds(1, 0)).run();
}

template <class T, bool kFast>
const void* of_threads(int threads) {
  void (*const kernel)(Finish) =
      threads > kSummers ? finish_rows<T, 1024, kFast> : finish_rows<T, kSummers, kFast>;
  return reinterpret_cast<const void*>(kernel);
}
template <class T>
const void* of_rows(int threads, bool fast) {
  return fast ? of_threads<T, true>(threads) : of_threads<T, false>(threads);
}

}  // namespace

const void* finish_kernel(DType dtype, int threads, bool fast) {
  if (dtype == DType::f32) return of_rows<float>(threads, fast);
  return dtype == DType::f16 ? of_rows<F16>(threads, fast) : of_rows<BF16>(threads, fast);
}

void load(int ranks) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int threads : {256, 1024})
      for (const bool fast : {false, true}) cuda::load_with_shared(finish_kernel(dtype, threads, fast));
    for (const NormQuant quant :
         {NormQuant::none, NormQuant::fp8, NormQuant::fp8_token, NormQuant::fp8_128, NormQuant::mx})
      for (const std::size_t hidden : kShort) cuda::load(short_rows_kernel(dtype, quant, hidden));
    if (ranks == 1 || ranks > cuda::kFewRanks) continue;
    for (const bool lines : {false, true})
      for (const bool whole : {false, true})
        for (const auto kernel : {one_step_kernel, two_steps_kernel})
          cuda::load_with_shared(kernel({lines, whole, ranks, dtype}));
    for (const auto kernel : {short_one_step_by_lines, short_one_step_by_packets})
      for (const unsigned shares : {1u, 2u, 4u, 8u})
        for (const unsigned messages : {1u, 2u})
          if (const void* const short_rows = kernel({{}, true, ranks, dtype}, shares, messages))
            cuda::load_with_shared(short_rows);
  }
}

}  // namespace unisono::fused::gpu
