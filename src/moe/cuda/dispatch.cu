// Sends tokens to the ranks of their experts, each to its final place, and finishes what has come.
#include <cuda_runtime.h>

#include "moe/cuda/fill.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/rows.cuh"

namespace unisono::moe::gpu {
namespace {

// A token as a warp has it: lane i has the token's i-th expert and its i-th copy.
struct Token {
  __device__ Token(const Work& work, unsigned token) {
    const auto k = static_cast<unsigned>(work.dims.top_k);
    const std::size_t at = std::size_t{token} * k + lane();
    const bool has = lane() < k;
    expert = has ? table<std::int32_t>(work, work.space.experts)[at] : kNone;
    place = has ? table<std::int32_t>(work, work.space.places)[at] : kNone;
    home = has ? table<std::int32_t>(work, work.space.homes)[at] : kNone;
    rank = expert < 0 ? kNone : work.dims.rank_of(expert);
    homes = __popc(__ballot_sync(kAllLanes, home != kNone));
  }
  std::int32_t expert, place, home;
  int rank, homes;
};

// Returns the row of a copy at its rank. Rows of tokens with expert_major are those of pair_rows.
__device__ std::int32_t row_of(const Work& work, const Home& home) {
  return table<std::int32_t>(work, work.space.first_there)[home.rank] + home.position;
}

// Lists the rows to which a token's row goes: each copy; or each pair at this rank, and one at each other.
__device__ int find_targets(const Work& work, const Token& token, Targets& targets) {
  bool sends = token.home != kNone;
  Target target{};
  if (work.dims.expert_major()) {
    const bool exists = token.place != kNone;
    const unsigned alike =
        __match_any_sync(kAllLanes, exists ? static_cast<unsigned>(token.rank) : 0x80000000u | lane());
    sends = exists && (token.rank == work.dims.rank || (alike & ((1u << lane()) - 1)) == 0);
    target = {token.rank, token.place};
  } else if (sends) {
    const Home home(token.home);
    target = {home.rank, row_of(work, home)};
  }
  const unsigned all = __ballot_sync(kAllLanes, sends);
  if (sends) targets.of[__popc(all & ((1u << lane()) - 1))] = target;
  __syncwarp();
  return __popc(all);
}

// Tells a token's receivers its experts there, and their weights.
__device__ void tell_routes(const Work& work, const Dispatch& dispatch, const Token& token, unsigned number) {
  const Dims& d = work.dims;
  const auto k = static_cast<unsigned>(d.top_k);
  const float weight =
      dispatch.weights && lane() < k ? dispatch.weights[std::size_t{number} * k + lane()] : 0;
  for (int h = 0; h < token.homes; ++h) {
    const Home home(__shfl_sync(kAllLanes, token.home, h));
    const std::size_t row = static_cast<std::size_t>(row_of(work, home)) * k + lane();
    const bool here = token.rank == home.rank;
    if (lane() >= k) continue;
    if (d.expert_major()) {
      if (!dispatch.routed && home.rank != d.rank)
        table<std::int32_t>(work, home.rank, work.space.pair_rows)[row] = here ? token.place : kNone;
      continue;
    }
    if (!dispatch.routed)
      table<std::int32_t>(work, home.rank, work.space.topk_idx)[row] =
          here ? token.expert - home.rank * d.local_experts : kNone;
    if (!dispatch.routed && here && !d.drop)  // otherwise the receiver sorts
      table<std::int32_t>(work, home.rank, work.space.expert_rows)[token.place] = row_of(work, home);
    if (dispatch.weights) table<float>(work, home.rank, work.space.weights)[row] = here ? weight : 0.0f;
  }
  if (d.expert_major() && dispatch.weights && token.place != kNone)
    table<float>(work, token.rank, work.space.weights)[token.place] = weight;
}

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
  for (int p = kQuantised ? 1 : 0; p < dispatch.payloads.count; ++p) {
    const Payload& payload = dispatch.payloads.of[p];
    aim(work, targets, count, payload.to, payload.bytes);
    copy_row(payload.from + std::size_t{token} * payload.bytes, targets.at, count, payload.bytes,
             payload.word, segment, segments);
  }
}

// Waits until every peer has begun this dispatch too, unless the kernel of its routes has done so.
__device__ bool begin(const Work& work, const Dispatch& dispatch) {
  if (!dispatch.routed || work.dims.ranks == 1) return true;
  if (blockIdx.x == 0) tell_all(work, Told::begun);
  return hear_all(work, Told::begun, counters(work).dispatches + 1);
}

template <class T, MoeScales kScales>
__global__ void __launch_bounds__(kThreads, kScales == MoeScales::none ? 2 : 1)
    send_kernel(const __grid_constant__ Work work, const __grid_constant__ Dispatch dispatch) {
  __shared__ Targets all_targets[kWarps];
  if (failed(work) || !begin(work, dispatch)) return;
  Targets& targets = all_targets[warp_of_block()];
  const unsigned segments = max(1u, min(warps_of_grid() / max(work.tokens, 1u), 16u));
  for (unsigned item = warp_of_grid(); item < work.tokens * segments; item += warps_of_grid()) {
    const unsigned number = item / segments, segment = item % segments;
    const Token token(work, number);
    const int count = find_targets(work, token, targets);
    if (segment == 0) tell_routes(work, dispatch, token, number);
    send_rows<T, kScales>(work, dispatch, targets, count, number, segment, segments);
    __syncwarp();
  }
  if (!dispatch.routed || dispatch.weights) fill_tables(work, dispatch);
  clear_gaps(work, dispatch);
  if (blockIdx.x == 0)
    for (int r = static_cast<int>(threadIdx.x); r < work.dims.ranks; r += kThreads)
      table<std::uint32_t>(work, r, work.space.weighted)[work.dims.rank] = dispatch.weights ? 1 : 0;
  if (work.dims.ranks == 1 || !last_block(work, kSentTicket)) return;
  if (threadIdx.x == 0 && dispatch.routed) ++counters(work).dispatches;
  tell_all(work, Told::data);
  if (!dispatch.lands) return;
  const std::uint32_t landed = counters(work).landed + 1;
  if (hear_all(work, Told::data, landed) && threadIdx.x == 0) counters(work).landed = landed;
}

// Copies a peer's row to the other experts of its token.
__device__ void fan_out(const Work& work, const Dispatch& dispatch, Targets& targets, std::size_t token_row) {
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
    copy_row(mine<byte>(work, array) + from * bytes, targets.at, count, bytes, word, 0, 1);
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
    for (unsigned row = warp_of_grid(); row < rows; row += warps_of_grid())
      fan_out(work, dispatch, targets, static_cast<std::size_t>(source) * d.max_tokens + row);
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
  if (work.dims.expert_major()) fan_out_all(work, dispatch, all_targets[warp_of_block()]);
  if (last_block(work, kEndTicket) && threadIdx.x == 0) counters(work).landed = landed;
}

template <class T>
const void* send_of(MoeScales scales) {
  return scales == MoeScales::mx ? reinterpret_cast<const void*>(send_kernel<T, MoeScales::mx>)
                                 : reinterpret_cast<const void*>(send_kernel<T, MoeScales::e4m3_128>);
}
const void* send_of(const Dims& dims) {
  if (dims.scales == MoeScales::none)  // rows go as bytes
    return reinterpret_cast<const void*>(send_kernel<float, MoeScales::none>);
  if (dims.dtype == DType::f32) return send_of<float>(dims.scales);
  return dims.dtype == DType::f16 ? send_of<F16>(dims.scales) : send_of<BF16>(dims.scales);
}

}  // namespace

cudaError_t load_dispatch(const Dims& dims, int& blocks) {
  cudaFuncAttributes attributes;
  for (const void* kernel : {send_of(dims), reinterpret_cast<const void*>(land_kernel),
                             reinterpret_cast<const void*>(copy_out_kernel)})
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
      return error;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, send_of(dims), kThreads, 0);
}

cudaError_t send(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<Work*>(&work), const_cast<Dispatch*>(&dispatch)};
  return cudaLaunchKernel(send_of(work.dims), dim3(static_cast<unsigned>(blocks)), dim3(kThreads), parameters,
                          0, stream);
}

cudaError_t land(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream) {
  if (!dispatch.lands)
    land_kernel<<<work.dims.expert_major() ? blocks : 1, kThreads, 0, stream>>>(work, dispatch);
  if (dispatch.out)
    copy_out_kernel<<<blocks, kThreads, 0, stream>>>(work, dispatch.out, dispatch.payloads.of[0].bytes);
  return cudaGetLastError();
}

}  // namespace unisono::moe::gpu
