// Sends tokens to the ranks of their experts, each to its final place, and finishes what has come.
#include <cuda_runtime.h>

#include "cuda/api.hpp"
#include "moe/cuda/fill.cuh"
#include "moe/cuda/land.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/permute.cuh"
#include "moe/cuda/token.cuh"

namespace unisono::moe::gpu {
namespace {

// Waits until every peer has begun this dispatch too, unless a kernel before has done so.
__device__ bool begin(const Work& work, const Dispatch& dispatch) {
  if (!dispatch.routed || dispatch.first > 0 || work.dims.ranks == 1) return true;
  if (blockIdx.x == 0) tell_all(work, Told::begun);
  return hear_all(work, Told::begun, counters(work).dispatches + 1);
}

template <class T, MoeScales kScales>
__global__ void __launch_bounds__(kThreads, kScales == MoeScales::none ? 2 : 1)
    send_kernel(const __grid_constant__ Work work, const __grid_constant__ Dispatch dispatch) {
  __shared__ Targets all_targets[kWarps];
  if (failed(work) || !begin(work, dispatch)) return;
  Targets& targets = all_targets[warp_of_block()];
  const Segments share = Segments::exact(dispatch.tokens, warps_of_grid());
  for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid()) {
    const unsigned number = dispatch.first + share.row_of(item), segment = share.segment_of(item);
    const Token token(work, number);
    const int count = find_targets(work, dispatch, token, targets);
    if (segment == 0) tell_routes(work, dispatch, token, number);
    send_rows<T, kScales>(work, dispatch, targets, count, number, segment, share);
    __syncwarp();
  }
  if (dispatch.first + dispatch.tokens < work.tokens) return;  // another launch follows
  fill_tables(work, dispatch, table<std::uint32_t>(work, work.space.source_rows));
  clear_gaps(work, dispatch);
  tell_weighted(work, dispatch);
  if (work.dims.ranks == 1) return;
  tell_sent(work, dispatch);
  if (dispatch.lands) await_rows(work);
}

// Copies the rows of x to where the caller wants them.
__global__ void __launch_bounds__(kThreads)
    copy_out_kernel(const __grid_constant__ Work work, byte* out, std::size_t row_bytes) {
  if (failed(work)) return;
  const std::size_t bytes = static_cast<std::size_t>(*table<std::int32_t>(work, work.space.rows)) * row_bytes;
  device::thread_copy(out, mine<byte>(work, work.space.x(work.epoch)), bytes,
                      blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

__global__ void __launch_bounds__(kThreads)
    land_kernel(const __grid_constant__ Work work, const __grid_constant__ Dispatch dispatch) {
  __shared__ Targets all_targets[kWarps];
  if (failed(work)) return;
  if (dispatch.copies && !hear_all(work, Told::copied, dispatch.copied)) return;
  land_rows(work, dispatch, all_targets[warp_of_block()], table<std::uint32_t>(work, work.space.source_rows));
}

// The kernels that send x.
struct Kernels {
  static Kernels of(const Dims& dims) {
    return by_form(dims, []<class T, MoeScales kScales>(Form<T, kScales>) -> Kernels {
      return {reinterpret_cast<const void*>(send_kernel<T, kScales>),
              reinterpret_cast<const void*>(permute_kernel<T, kScales>)};
    });
  }
  const void *send, *permute;
};

}  // namespace

void load_dispatch(const Dims& dims, int& blocks, bool& bulk) {
  const Kernels kernels = Kernels::of(dims);
  for (const void* kernel : {kernels.send, reinterpret_cast<const void*>(land_kernel),
                             reinterpret_cast<const void*>(copy_out_kernel)})
    cuda::load(kernel);
  const cudaFuncAttributes permute = cuda::load_with_shared(kernels.permute);
  bulk = dims.ranks == 1 && permute.binaryVersion >= 90 &&
         permute.maxDynamicSharedSizeBytes >= static_cast<int>(kRowsBytes) &&
         permuting_warps(dims, dims.row_bytes) > 0;
  blocks = bulk ? 1 : cuda::resident_blocks(kernels.send, kThreads);
}

cudaError_t send(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream) {
  const Kernels kernels = Kernels::of(work.dims);
  void* parameters[] = {const_cast<Work*>(&work), const_cast<Dispatch*>(&dispatch)};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.stream = stream;
  if (!dispatch.bulk)
    return cudaLaunchKernel(kernels.send, config.gridDim, dim3(kThreads), parameters, 0, stream);
  cudaLaunchAttribute early{};  // the kernel of routes lets this one start
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.blockDim = dim3(32 * permuting_warps(work.dims, dispatch.payloads.of[0].bytes));
  config.dynamicSmemBytes = kRowsBytes;
  config.attrs = &early;
  config.numAttrs = dispatch.routed ? 0 : 1;
  return cudaLaunchKernelExC(&config, kernels.permute, parameters);
}

cudaError_t land(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream) {
  if (!dispatch.lands)
    land_kernel<<<work.dims.expert_major() ? blocks : 1, kThreads, 0, stream>>>(work, dispatch);
  if (dispatch.out)
    copy_out_kernel<<<blocks, kThreads, 0, stream>>>(work, dispatch.out, dispatch.payloads.of[0].bytes);
  return cudaGetLastError();
}

}  // namespace unisono::moe::gpu
