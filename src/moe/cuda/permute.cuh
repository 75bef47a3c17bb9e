// The dispatch of a rank alone, from sm_90 on: rows go by bulk copies through shared memory.
#pragma once

#include <algorithm>

#include "moe/cuda/bulk.cuh"
#include "moe/cuda/fill.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/token.cuh"

namespace unisono::moe::gpu {
namespace {

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

// Returns the buffers of a warp: one that quantises loads its next segment meanwhile.
constexpr unsigned buffers_of_warp(MoeScales scales) { return scales == MoeScales::none ? 1 : 2; }

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
  __shared__ std::uint64_t barriers[2 * kWarps];
  __shared__ unsigned taken;
  constexpr bool kQuantised = kScales != MoeScales::none;
  const Dims& d = work.dims;
  const Payload& x = dispatch.payloads.of[0];
  const Segments segments(d, x.bytes);
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
    std::size_t first, count;  // elements of the segment
  };
  const auto begin = [&](const RowBuffer& to, unsigned number) -> Item {
    if (number >= rows) return {.number = number};
    Item item{.number = number,
              .token = blockIdx.x + number / segments.count * gridDim.x,
              .first = number % segments.count * segments.each};
    item.count = smaller(segments.each, segments.all - item.first);
    if (lane() == 0)
      to.load(x.from + (item.token * segments.all + item.first) * segments.element_bytes,
              static_cast<std::uint32_t>(item.count * segments.element_bytes));
    return item;
  };
  const auto begin_next = [&] {
    RowBuffer::drain();
    unsigned number = 0;
    if (lane() == 0) number = atomicAdd(&taken, 1u);
    return begin(other, __shfl_sync(kAllLanes, number, 0));
  };
  if (threadIdx.x == 0) taken = blockDim.x / 32;
  Item item = begin(buffer, warp_of_block());  // what is loaded is older than the kernel of routes
  await_last_kernel();
  const bool fails = failed(work);
  const bool passes = std::size_t{work.tokens} * static_cast<unsigned>(d.top_k) * x.bytes > kPassing;
  Targets& targets = all_targets[warp_of_block()];
  while (item.number < items) {
    Item next;
    if (item.number < rows) {
      if (fails) return buffer.await();
      const Token token(work, item.token);
      const int count = find_targets(work, dispatch, token, targets);
      if (item.first == 0) tell_routes(work, dispatch, token, item.token);
      aim(work, targets, count, x.to, x.bytes);
      buffer.await();
      if constexpr (kBuffers > 1) next = begin_next();
      if constexpr (kQuantised) {
        quantise_in_place<T, kScales>(buffer.row, buffer.row + segments.scales_at, item.count);
        buffer.publish();
      }
      if (static_cast<int>(lane()) < count)
        buffer.store(targets.at[lane()] + item.first, static_cast<std::uint32_t>(item.count), passes);
      if constexpr (kQuantised) {
        const std::size_t from = item.first / kScaleBlock * segments.scale_bytes;
        const std::size_t given = scales::blocks_of(item.count) * segments.scale_bytes;
        store_scales(work, targets, count, buffer.row + segments.scales_at, from,
                     item.first + item.count < d.hidden ? given : d.scale_bytes - from, given);
      }
      if (item.first == 0) copy_payloads(work, dispatch, targets, count, 1, item.token, 0, 1);
      if constexpr (kBuffers == 1) next = begin_next();
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
  if (!dispatch.routed) fill_rest(work);
  clear_gaps(work, dispatch);
  tell_weighted(work, dispatch);
}

// Shared memory of a block of permute_kernel for rows. So much that an SM has one block: of those that start
// while routes are read, two would share an SM.
constexpr std::size_t kRowsBytes = 172 << 10;

// Returns the warps of a block of permute_kernel, or 0 if rows are too wide for it.
unsigned permuting_warps(const Dims& dims, std::size_t bytes_of_row) {
  const std::size_t warps =
      (kRowsBytes - kBufferAlign) / Segments(dims, bytes_of_row).buffer_bytes / buffers_of_warp(dims.scales);
  return warps < 4 ? 0 : static_cast<unsigned>(std::min<std::size_t>(warps, kWarps));
}

}  // namespace
}  // namespace unisono::moe::gpu
