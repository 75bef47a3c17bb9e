// The rest of a call on a GPU for a few rows, after an all_reduce: a block of threads for each row, which it
// holds in registers. The row is asked for before its weights, since a row on one SM waits for memory too.
#include <type_traits>

#include "cuda/device/memory.cuh"
#include "fused/cuda/registers.cuh"

namespace unisono::fused::gpu {
namespace {

// An RMS norm of short rows that are fast.
template <class T, NormQuant kQuant, class Of>
__global__ void __launch_bounds__(kSummers, 1) finish_short_rows(const __grid_constant__ Finish of) {
  const Work& work = of.work;
  const std::size_t row = blockIdx.x;
  const Share share(0, kRowBits, work.hidden);
  const Of place(share);
  const auto elements = [&](const byte* rows) {
    return reinterpret_cast<const T*>(rows + row * work.row_bytes);
  };
  const T *const sums_of_row = elements(of.sums), *const residual_of_row = elements(work.residual);
  cuda::follow_last_kernel(sums_of_row + place.at(0), residual_of_row + place.at(0));
  Vectors<T, Of> joined(sums_of_row, place);
  const Vectors<T, Of> residual(residual_of_row, place);
  const Vectors<T, Of> weight(reinterpret_cast<const T*>(work.weight), place);
  float sums[kEach] = {};
#pragma unroll
  for (unsigned v = 0; v < Of::kVectors; ++v) {
    joined.of[v] = combine(joined.of[v], residual.of[v], [](float sum, float more) { return sum + more; });
    add_squares(sums, joined.of[v]);
  }
  Rounds rounds(1, 0);
  rounds.tell(0, threadIdx.x, sums);
  finish_told(work, row, share, place, rounds, joined, weight, std::integral_constant<NormQuant, kQuant>{});
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
  if (hidden <= kShort[0]) return of_quant<T, Place<1, kBorder(kNotShort), kFirst>>(quant);
  if (hidden <= kShort[1]) return of_quant<T, Place<1, kFirst, kSecond>>(quant);
  return of_quant<T, Place<1, kSecond, kLast>>(quant);
}

}  // namespace

const void* short_rows_kernel(DType dtype, NormQuant quant, std::size_t hidden) {
  if (dtype == DType::f32) return of_length<float>(quant, hidden);
  return dtype == DType::f16 ? of_length<F16>(quant, hidden) : of_length<BF16>(quant, hidden);
}

}  // namespace unisono::fused::gpu
