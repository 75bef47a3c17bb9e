// The dispatch of a rank alone, from sm_90 on: rows go by bulk copies through shared memory.
#pragma once

#include <algorithm>

#include "moe/cuda/bulk.cuh"
#include "moe/cuda/fill.cuh"
#include "moe/cuda/land.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/token.cuh"

namespace unisono::moe::gpu {
namespace {

// Bulk copies from or to other addresses of shared memory take a fifth longer. The linker keeps no alignment
// of what a kernel declares there beyond 16 bytes.
constexpr std::size_t kBufferAlign = 128;

// How permute_kernel moves rows: whole, as bytes; or in segments that a warp quantises in a short time.
struct RowSegments {
  UNISONO_PORTABLE RowSegments(const Dims& dims, MoeScales scales, std::uint32_t bytes_of_row) {
    if (scales == MoeScales::none) {
      each = all = bytes_of_row;
      buffer_bytes = scales_at = round_up(each, kBufferAlign);
      return;
    }
    element_bytes = dims.dtype == DType::f32 ? 4 : 2;
    scale_bytes = scales == MoeScales::e4m3_128 ? sizeof(float) : 1;
    all = static_cast<unsigned>(dims.hidden);
    const unsigned most = dims.dtype == DType::f32 ? kMostBytes / 4 : kMostBytes / 2;
    count = (all + most - 1) / most;
    each = count > 1 ? most : all;
    scales_at = round_up(each * element_bytes, kBufferAlign);
    buffer_bytes = scales_at + round_up(scales::blocks_of(each) * scale_bytes, kBufferAlign);
  }
  static constexpr unsigned kMostBytes = 4096;  // of a segment; some steps of a warp, all of them whole
  unsigned count = 1;
  unsigned all, each;                           // elements of a row, and of a segment
  unsigned element_bytes = 1, scale_bytes = 1;  // of one
  std::size_t scales_at, buffer_bytes;          // where scales lie in a warp's buffer, and its bytes
};

// Returns the buffers of a warp: one that quantises loads its next segment meanwhile.
constexpr unsigned buffers_of_warp(MoeScales scales) { return scales == MoeScales::none ? 1 : 2; }

constexpr std::size_t kPassing = 32 << 20;  // bytes of rows, of which L2 keeps too few for the next kernel

// Stores the scales of a token's segment: `bytes` of them, and zeros up to a word. to: in the first row's
// scales. A lane that `sends` has a row.
__device__ void store_scales(byte* to, std::size_t bytes_of_row, bool sends, std::int32_t row,
                             const byte* scales, unsigned bytes) {
  std::uint32_t word = 0;
  const unsigned first = lane() * 4;
  if (first < bytes) word = *reinterpret_cast<const std::uint32_t*>(scales + first);
  if (first + 4 > bytes) word &= (1u << (bytes - first) % 4 * 8) - 1;
  for (unsigned rest = __ballot_sync(kAllLanes, sends); rest != 0; rest &= rest - 1) {
    const auto at = static_cast<std::size_t>(__shfl_sync(kAllLanes, row, __ffs(static_cast<int>(rest)) - 1));
    if (first < bytes) *reinterpret_cast<std::uint32_t*>(to + at * bytes_of_row + first) = word;
  }
}

// Sends what else is known of a token of a rank alone.
__device__ void send_rest(const Work& work, const Dispatch& dispatch, Targets& targets, unsigned number) {
  if (dispatch.routed && !dispatch.weights && dispatch.payloads.count == 1) return;
  const Token token(work, number);
  tell_routes(work, dispatch, token, number);
  if (dispatch.payloads.count == 1) return;
  const int count = find_targets(work, dispatch, token, targets);
  copy_payloads(work, dispatch, targets, count, 1, number, 0, Segments::exact(1, 1));
}

// Sends the tokens of a rank alone: a warp has a row in shared memory, from which it goes to all its places.
// Warps take the items of their block, as they are free: segments of rows, then experts whose rows are named.
template <class T, MoeScales kScales>
__global__ void __launch_bounds__(kThreads)
    permute_kernel(const __grid_constant__ Work work, const __grid_constant__ Dispatch dispatch) {
  extern __shared__ __align__(16) byte shared[];
  __shared__ Targets all_targets[kWarps];
  __shared__ std::uint64_t barriers[2 * kWarps];
  __shared__ unsigned taken;
  constexpr bool kQuantised = kScales != MoeScales::none;
  const Dims& d = work.dims;
  const Payload& x = dispatch.payloads.of[0];
  const RowSegments segments(d, kScales, x.bytes);
  const unsigned tokens = (work.tokens + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  const unsigned experts = (static_cast<unsigned>(d.local_experts) + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  const unsigned rows = tokens * segments.count;
  const unsigned items = rows + (!dispatch.routed && d.expert_major() ? experts : 0);
  constexpr unsigned kBuffers = buffers_of_warp(kScales);
  byte* const buffers =
      shared + round_up(RowBuffer::address(shared), kBufferAlign) - RowBuffer::address(shared);
  const auto buffer_of = [&](unsigned number) {
    const unsigned index = warp_of_block() * kBuffers + number;
    return RowBuffer(buffers + index * segments.buffer_bytes, barriers + index);
  };
  RowBuffer buffer = buffer_of(0), other = kBuffers > 1 ? buffer_of(1) : buffer;
  struct Item {
    unsigned number, token;
    unsigned first, count;  // elements of the segment
    std::int32_t place;     // of the lane's copy of the token
  };
  const auto begin = [&](const RowBuffer& to, unsigned number) -> Item {
    if (number >= rows) return {.number = number};
    Item item{.number = number,
              .token = blockIdx.x + number / segments.count * gridDim.x,
              .first = number % segments.count * segments.each};
    item.count = min(segments.each, segments.all - item.first);
    if (lane() == 0)
      to.load(x.from + (std::size_t{item.token} * segments.all + item.first) * segments.element_bytes,
              item.count * segments.element_bytes);
    return item;
  };
  const std::int32_t* const places =
      table<std::int32_t>(work, d.expert_major() ? work.space.places : work.space.homes);
  const auto k = static_cast<unsigned>(d.top_k);
  const auto find_place = [&](Item& item) {
    item.place = item.number < rows && lane() < k ? places[std::size_t{item.token} * k + lane()] : kNone;
  };
  const auto begin_next = [&] {
    RowBuffer::drain();
    unsigned number = 0;
    if (lane() == 0) number = atomicAdd(&taken, 1u);
    Item next = begin(other, __shfl_sync(kAllLanes, number, 0));
    find_place(next);  // which is there when its elements are
    return next;
  };
  if (threadIdx.x == 0) taken = blockDim.x / 32;
  Item item = begin(buffer, warp_of_block());  // what is loaded is older than the kernel of routes
  await_last_kernel();
  const bool fails = failed(work);
  find_place(item);
  const std::int32_t first_row =
      d.expert_major() ? 0 : table<std::int32_t>(work, work.space.first_there)[d.rank];
  const bool passes = std::size_t{work.tokens} * k * x.bytes > kPassing;
  Targets& targets = all_targets[warp_of_block()];
  while (item.number < items) {
    Item next;
    if (item.number < rows) {
      if (fails) return buffer.await();
      if (kBuffers == 1) send_rest(work, dispatch, targets, item.token);
      buffer.await();
      if constexpr (kBuffers > 1) next = begin_next();
      if constexpr (kQuantised) {
        quantise_in_place<T, kScales>(buffer.row, buffer.row + segments.scales_at, item.count);
        buffer.publish();
      }
      const bool sends = item.place != kNone;
      const std::int32_t row = first_row + (d.expert_major() ? item.place : Home(item.place).position);
      if (sends)
        buffer.store(mine<byte>(work, x.to) + static_cast<std::size_t>(row) * x.bytes + item.first,
                     item.count, passes);
      if constexpr (kQuantised) {
        byte* const to = mine<byte>(work, work.space.x(work.epoch) + work.space.scales) +
                         item.first / kScaleBlock * segments.scale_bytes;
        store_scales(to, d.scale_bytes, sends, row, buffer.row + segments.scales_at,
                     static_cast<unsigned>(scales::blocks_of(item.count)) * segments.scale_bytes);
      }
      if constexpr (kBuffers == 1) next = begin_next();
      else if (item.first == 0) send_rest(work, dispatch, targets, item.token);
    } else {
      if (!fails) name_rows(work, blockIdx.x + (item.number - rows) * gridDim.x);
      next = begin_next();
    }
    item = next;
    if constexpr (kBuffers > 1) {
      const RowBuffer used = buffer;
      buffer = other;
      other = used;
    }
  }
  RowBuffer::drain();
  if (fails) return;
  if (!dispatch.routed) fill_rest(work, table<std::uint32_t>(work, work.space.source_rows));
  clear_gaps(work, dispatch);
  tell_weighted(work, dispatch);
}

// Shared memory of a block of permute_kernel for rows. So much that an SM has one block: of those that start
// while routes are read, two would share an SM.
constexpr std::size_t kRowsBytes = 172 << 10;

// Returns the warps of a block of permute_kernel, or 0 if rows are too wide for it.
unsigned permuting_warps(const Dims& dims, std::uint32_t bytes_of_row) {
  const std::size_t warps = (kRowsBytes - kBufferAlign) /
                            RowSegments(dims, dims.scales, bytes_of_row).buffer_bytes /
                            buffers_of_warp(dims.scales);
  return warps < 4 ? 0 : static_cast<unsigned>(std::min<std::size_t>(warps, kWarps));
}

}  // namespace
}  // namespace unisono::moe::gpu
