// Sends tokens to the ranks of their experts, each to its final place, and finishes what has come.
#include <cuda_runtime.h>

#include <algorithm>

#include "moe/cuda/bulk.cuh"
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
__device__ int find_targets(const Work& work, const Dispatch& dispatch, const Token& token,
                            Targets& targets) {
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
    if (dispatch.copies && home.rank != work.dims.rank)  // waits here
      target = {
          work.dims.rank,
          static_cast<std::int32_t>(work.space.leaving + home.rank * work.dims.max_tokens) + home.position};
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
      if (!dispatch.routed && d.ranks > 1)
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

// Copies a segment of a token's rows, of all payloads from the first one on.
__device__ void copy_payloads(const Work& work, const Dispatch& dispatch, Targets& targets, int count,
                              int first, unsigned token, unsigned segment, unsigned segments) {
  for (int p = first; p < dispatch.payloads.count; ++p) {
    const Payload& payload = dispatch.payloads.of[p];
    aim(work, targets, count, payload.to, payload.bytes);
    copy_row(payload.from + std::size_t{token} * payload.bytes, targets.at, count, payload.bytes,
             payload.word, segment, segments);
  }
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
  copy_payloads(work, dispatch, targets, count, kQuantised ? 1 : 0, token, segment, segments);
}

// Tells the receivers whether weights have come.
__device__ void tell_weighted(const Work& work, const Dispatch& dispatch) {
  if (blockIdx.x > 0) return;
  for (unsigned r = threadIdx.x; r < static_cast<unsigned>(work.dims.ranks); r += blockDim.x)
    table<std::uint32_t>(work, static_cast<int>(r), work.space.weighted)[work.dims.rank] =
        dispatch.weights ? 1 : 0;
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

// Bulk copies from or to other addresses of shared memory take a fifth longer. The linker keeps no alignment
// of what a kernel declares there beyond 16 bytes.
constexpr std::size_t kBufferAlign = 128;

// How permute_kernel moves rows: whole, as bytes; or in segments that a warp quantises in a short time.
struct Segments {
  UNISONO_PORTABLE Segments(const Dims& dims, std::size_t bytes_of_row) {
    const bool scaled = dims.scales != MoeScales::none;
    all = scaled ? dims.hidden : bytes_of_row;
    count = scaled ? static_cast<unsigned>((all + kMost - 1) / kMost) : 1;
    each = scaled ? round_up((all + count - 1) / count, kScaleBlock) : all;
    if (scaled) count = static_cast<unsigned>((all + each - 1) / each);
    element_bytes = scaled ? dims.row_bytes / dims.hidden : 1;
    scale_bytes = dims.scales == MoeScales::e4m3_128 ? sizeof(float) : 1;
    scales_at = round_up(smaller(each, all) * element_bytes, kBufferAlign);
    buffer_bytes = scales_at + (scaled ? round_up(each / kScaleBlock * scale_bytes, kBufferAlign) : 0);
  }
  static constexpr std::size_t kMost = 2048;
  unsigned count;
  std::size_t all, each;                   // elements of a row, and of a segment
  std::size_t element_bytes, scale_bytes;  // of one
  std::size_t scales_at, buffer_bytes;     // where scales lie in a warp's buffer, and its bytes
};

constexpr std::size_t kPassing = 32 << 20;  // bytes of rows, of which L2 keeps too few for the next kernel

// Stores a segment's scales, `bytes` bytes from `from` of each target's. Zeros follow the first `given` ones.
__device__ void store_scales(const Work& work, const Targets& targets, int count, const byte* scales,
                             std::size_t from, std::size_t bytes, std::size_t given) {
  __syncwarp();
  for (int t = 0; t < count; ++t) {
    byte* const to = scales_at(work, targets.of[t], work.space.x(work.epoch) + work.space.scales) + from;
    if (given % 4 == 0 && from % 4 == 0) {
      for (std::size_t i = lane(); i < bytes / 4; i += 32)
        reinterpret_cast<std::uint32_t*>(to)[i] =
            i < given / 4 ? reinterpret_cast<const std::uint32_t*>(scales)[i] : 0;
    } else {
      for (std::size_t i = lane(); i < bytes; i += 32) to[i] = i < given ? scales[i] : byte{0};
    }
  }
}

// Sends the tokens of a rank alone: a warp has a row in shared memory, from which it goes to all its places.
// Warps take the items of their block, as they are free: segments of rows, then experts whose rows are named.
template <class T, MoeScales kScales>
__global__ void __launch_bounds__(kThreads)
    permute_kernel(const __grid_constant__ Work work, const __grid_constant__ Dispatch dispatch) {
  extern __shared__ __align__(16) byte shared[];
  __shared__ Targets all_targets[kWarps];
  __shared__ std::uint64_t barriers[kWarps];
  __shared__ unsigned taken;
  constexpr bool kQuantised = kScales != MoeScales::none;
  const Dims& d = work.dims;
  const Payload& x = dispatch.payloads.of[0];
  const Segments segments(d, x.bytes);
  const unsigned tokens = (work.tokens + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  const unsigned experts = (static_cast<unsigned>(d.local_experts) + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  const unsigned rows = tokens * segments.count;
  const unsigned items = rows + (!dispatch.routed && d.expert_major() ? experts : 0);
  byte* const buffers =
      shared + round_up(RowBuffer::address(shared), kBufferAlign) - RowBuffer::address(shared);
  RowBuffer buffer(buffers + warp_of_block() * segments.buffer_bytes, barriers + warp_of_block());
  unsigned item = warp_of_block(), token_number = 0;
  std::size_t first = 0, count_of = 0;  // elements of the segment
  const auto begin_item = [&] {
    if (item >= rows) return;
    token_number = blockIdx.x + item / segments.count * gridDim.x;
    first = item % segments.count * segments.each;
    count_of = smaller(segments.each, segments.all - first);
    if (lane() == 0)
      buffer.load(x.from + (token_number * segments.all + first) * segments.element_bytes,
                  static_cast<std::uint32_t>(count_of * segments.element_bytes));
  };
  if (threadIdx.x == 0) taken = blockDim.x / 32;
  begin_item();  // what is loaded is older than the kernel of routes
  await_last_kernel();
  const bool fails = failed(work);
  const bool passes = std::size_t{work.tokens} * static_cast<unsigned>(d.top_k) * x.bytes > kPassing;
  Targets& targets = all_targets[warp_of_block()];
  while (item < items) {
    if (item < rows) {
      if (fails) return buffer.await();
      const Token token(work, token_number);
      const int count = find_targets(work, dispatch, token, targets);
      if (first == 0) tell_routes(work, dispatch, token, token_number);
      aim(work, targets, count, x.to, x.bytes);
      buffer.await();
      if constexpr (kQuantised) {
        quantise_in_place<T, kScales>(buffer.row, buffer.row + segments.scales_at, count_of);
        buffer.publish();
      }
      if (static_cast<int>(lane()) < count)
        buffer.store(targets.at[lane()] + first, static_cast<std::uint32_t>(count_of), passes);
      if constexpr (kQuantised) {
        const std::size_t from = first / kScaleBlock * segments.scale_bytes;
        const std::size_t given = scales::blocks_of(count_of) * segments.scale_bytes;
        store_scales(work, targets, count, buffer.row + segments.scales_at, from,
                     first + count_of < d.hidden ? given : d.scale_bytes - from, given);
      }
      if (first == 0) copy_payloads(work, dispatch, targets, count, 1, token_number, 0, 1);
      buffer.drain();
    } else if (!fails) {
      name_rows(work, blockIdx.x + (item - rows) * gridDim.x);
    }
    if (lane() == 0) item = atomicAdd(&taken, 1u);
    item = __shfl_sync(kAllLanes, item, 0);
    begin_item();
  }
  if (fails) return;
  if (!dispatch.routed) fill_rest(work);
  clear_gaps(work, dispatch);
  tell_weighted(work, dispatch);
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

// Shared memory of a block of permute_kernel for rows. So much that an SM has one block: of those that start
// while routes are read, two would share an SM.
constexpr std::size_t kRowsBytes = 172 << 10;

// Returns the warps of a block of permute_kernel, or 0 if rows are too wide for it.
unsigned permuting_warps(const Dims& dims, std::size_t bytes_of_row) {
  const std::size_t warps = (kRowsBytes - kBufferAlign) / Segments(dims, bytes_of_row).buffer_bytes;
  return warps < 4 ? 0 : static_cast<unsigned>(std::min<std::size_t>(warps, kWarps));
}

}  // namespace

cudaError_t load_dispatch(const Dims& dims, int& blocks, bool& bulk) {
  cudaFuncAttributes attributes;
  const Kernels kernels = Kernels::of(dims);
  for (const void* kernel : {kernels.send, reinterpret_cast<const void*>(land_kernel),
                             reinterpret_cast<const void*>(copy_out_kernel), kernels.permute})
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
      return error;
  int device = 0, shared = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      error != cudaSuccess)
    return error;
  bulk = dims.ranks == 1 && attributes.binaryVersion >= 90 &&
         attributes.sharedSizeBytes + kRowsBytes <= static_cast<std::size_t>(shared) &&
         permuting_warps(dims, dims.row_bytes) > 0;
  if (!bulk) return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernels.send, kThreads, 0);
  blocks = 1;
  return cudaFuncSetAttribute(kernels.permute, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kRowsBytes));
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
