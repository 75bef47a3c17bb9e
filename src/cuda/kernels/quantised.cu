// The kernels of the quantised all_reduce.
#include "cuda/device/cuda_block.cuh"
#include "cuda/device/quantise.cuh"
#include "cuda/programs.hpp"
#include "programs/all_reduce_quantised.hpp"

namespace unisono::cuda {
namespace {

template <class T, class Code>
__global__ void __launch_bounds__(kMaxThreads) quantised(const __grid_constant__ Launch launch) {
  follow_last_kernel();
  using Lane = CudaBlock<Quantised<T, Code>>;
  typename Lane::Arrays arrays;
  Lane lane(launch.context, arrays, {launch.op == Op::avg});
  ChunkChannel channel(lane);
  all_reduce_quantised(channel, launch.args);
  lane.finish();
}

template <class T>
Kernel of(Wire wire) {
  return wire == Wire::fp8 ? quantised<T, wire::Fp8> : quantised<T, wire::Int8>;
}

}  // namespace

Kernel quantised_kernel(DType dtype, Wire wire) {
  switch (dtype) {
    case DType::f32: return of<float>(wire);
    case DType::f16: return of<F16>(wire);
    case DType::bf16: return of<BF16>(wire);
    default: return nullptr;
  }
}

}  // namespace unisono::cuda
