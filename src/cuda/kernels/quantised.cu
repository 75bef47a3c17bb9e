// The kernels of the quantised all_reduce.
#include "cuda/device/cuda_block.cuh"
#include "cuda/device/exchange.cuh"
#include "cuda/device/quantise.cuh"
#include "cuda/device/wire_lines.cuh"
#include "cuda/programs.hpp"
#include "programs/all_reduce_quantised.hpp"

namespace unisono::cuda {
namespace {

template <class T, class Code, int kMost>
__global__ void __launch_bounds__(kMaxThreads) quantised(const __grid_constant__ LaunchOf<kMost> launch) {
  follow_last_kernel();
  using Lane = CudaBlock<kMost, Quantised<T, Code, kMost>>;
  typename Lane::Arrays arrays;
  Lane lane(launch.context, arrays, {launch.op == Op::avg});
  ChunkChannel channel(lane);
  all_reduce_quantised(channel, launch.args);
  lane.finish();
}

template <class T, int kMost>
const void* of_ranks(Wire wire) {
  return wire == Wire::fp8 ? reinterpret_cast<const void*>(quantised<T, wire::Fp8, kMost>)
                           : reinterpret_cast<const void*>(quantised<T, wire::Int8, kMost>);
}
template <class T>
const void* of(Wire wire, bool many) {
  return many ? of_ranks<T, kMaxRanks>(wire) : of_ranks<T, kFewRanks>(wire);
}

template <class T>
ExchangeKernel lines_of(Wire wire, int ranks) {
  return wire == Wire::fp8 ? exchange_of_ranks<Step::two_shot, WireLines<T, wire::Fp8>, SumOfWire>(ranks)
                           : exchange_of_ranks<Step::two_shot, WireLines<T, wire::Int8>, SumOfWire>(ranks);
}

}  // namespace

ExchangeKernel wire_kernel(DType dtype, Wire wire, int ranks) {
  switch (dtype) {
    case DType::f32: return lines_of<float>(wire, ranks);
    case DType::f16: return lines_of<F16>(wire, ranks);
    case DType::bf16: return lines_of<BF16>(wire, ranks);
    default: return nullptr;
  }
}

const void* quantised_kernel(DType dtype, Wire wire, bool many) {
  switch (dtype) {
    case DType::f32: return of<float>(wire, many);
    case DType::f16: return of<F16>(wire, many);
    case DType::bf16: return of<BF16>(wire, many);
    default: return nullptr;
  }
}

}  // namespace unisono::cuda
