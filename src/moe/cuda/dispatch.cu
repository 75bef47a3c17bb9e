// Sends tokens to the ranks of their experts, each to its final place, and finishes what has come.
#include <cuda_runtime.h>

#include "cuda/api.hpp"
#include "moe/cuda/fill.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/permute.cuh"
#include "moe/cuda/token.cuh"

namespace unisono::moe::gpu {
namespace {

// kScales: of x, whose elements are of type T.
template <class T, MoeScales kScales>
__device__ void send_rows(const Work& work, const Dispatch& dispatch, Targets& targets, int count,
                          unsigned token, unsigned segment, unsigned segments) {
  const Dims& d = work.dims;
  constexpr bool kQuantised = kScales != MoeScales::none;
  if constexpr (kQuantised) {
    const Payload& x = dispatch.payloads.of[0];
    aim(work, targets, count, x.to, x.bytes);
    quantise_row<T, kScales>(work, x.from + token * d.row_bytes, targets, count,
                             work.space.x(work.epoch) + work.space.scales, dispatch.wide, segment, segments);
  }
  copy_payloads(work, dispatch, targets, count, kQuantised ? 1 : 0, token, segment, segments);
}

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
  const unsigned segments = segments_of(dispatch.tokens);
  for (unsigned item = warp_of_grid(); item < dispatch.tokens * segments; item += warps_of_grid()) {
    const unsigned number = dispatch.first + item / segments, segment = item % segments;
    const Token token(work, number);
    const int count = find_targets(work, dispatch, token, targets);
    if (segment == 0) tell_routes(work, dispatch, token, number);
    send_rows<T, kScales>(work, dispatch, targets, count, number, segment, segments);
    __syncwarp();
  }
  if (dispatch.first + dispatch.tokens < work.tokens) return;  // another launch follows
  fill_tables(work, dispatch);
  clear_gaps(work, dispatch);
  tell_weighted(work, dispatch);
  if (work.dims.ranks == 1 || !last_block(work, kSentTicket)) return;
  if (threadIdx.x == 0 && dispatch.routed) ++counters(work).dispatches;
  tell_all(work, Told::data);
  if (!dispatch.lands) return;
  const std::uint32_t landed = counters(work).landed + 1;
  if (hear_all(work, Told::data, landed) && threadIdx.x == 0) counters(work).landed = landed;
}

// Copies a segment of a peer's row to the other experts of its token.
__device__ void fan_out(const Work& work, const Dispatch& dispatch, Targets& targets, std::size_t token_row,
                        unsigned segment, unsigned segments) {
  const Dims& d = work.dims;
  const auto k = static_cast<unsigned>(d.top_k);
  const std::int32_t row =
      lane() < k ? table<std::int32_t>(work, work.space.pair_rows)[token_row * k + lane()] : kNone;
  const unsigned rows = __ballot_sync(kAllLanes, row != kNone);
  if (__popc(rows) < 2) return;
  const auto from = static_cast<std::size_t>(__shfl_sync(kAllLanes, row, __ffs(static_cast<int>(rows)) - 1));
  const int place = __popc(rows & ((1u << lane()) - 1));
  if (row != kNone && place > 0) targets.of[place - 1] = {d.rank, row};
  const int count = __popc(rows) - 1;
  const auto copy = [&](std::size_t array, std::size_t bytes) {
    aim(work, targets, count, array, bytes);
    const int word = bytes % 16 == 0 ? 16 : bytes % 4 == 0 ? 4 : 1;
    copy_row(mine<byte>(work, array) + from * bytes, targets.at, count, bytes, word, segment, segments);
  };
  if (d.scale_bytes > 0) copy(work.space.x(work.epoch) + work.space.scales, d.scale_bytes);
  for (int p = 0; p < dispatch.payloads.count; ++p)
    copy(dispatch.payloads.of[p].to, dispatch.payloads.of[p].bytes);
  __syncwarp();
}

__device__ void fan_out_all(const Work& work, const Dispatch& dispatch, Targets& targets) {
  const Dims& d = work.dims;
  const auto* const source_rows = table<std::int32_t>(work, work.space.source_rows);
  for (int i = 1; i < d.ranks; ++i) {
    const int source = (d.rank + i) % d.ranks;
    const auto rows = static_cast<unsigned>(source_rows[source]);
    const unsigned segments = segments_of(rows);
    for (unsigned item = warp_of_grid(); item < rows * segments; item += warps_of_grid())
      fan_out(work, dispatch, targets, static_cast<std::size_t>(source) * d.max_tokens + item / segments,
              item % segments, segments);
  }
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
  const std::uint32_t landed = counters(work).landed + 1;
  if (failed(work) || !hear_all(work, Told::data, landed)) return;
  if (dispatch.copies && !hear_all(work, Told::copied, dispatch.copied)) return;
  if (work.dims.expert_major()) fan_out_all(work, dispatch, all_targets[warp_of_block()]);
  if (last_block(work, kEndTicket) && threadIdx.x == 0) counters(work).landed = landed;
}

// The kernels that send x as `dims` has it.
struct Kernels {
  template <class T>
  static Kernels of(MoeScales scales) {
    return scales == MoeScales::mx ? of<T, MoeScales::mx>() : of<T, MoeScales::e4m3_128>();
  }
  template <class T, MoeScales kScales>
  static Kernels of() {
    return {reinterpret_cast<const void*>(send_kernel<T, kScales>),
            reinterpret_cast<const void*>(permute_kernel<T, kScales>)};
  }
  static Kernels of(const Dims& dims) {
    if (dims.scales == MoeScales::none) return of<float, MoeScales::none>();  // rows go as bytes
    if (dims.dtype == DType::f32) return of<float>(dims.scales);
    return dims.dtype == DType::f16 ? of<F16>(dims.scales) : of<BF16>(dims.scales);
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
