// The end of a dispatch: ranks tell each other what has come, and copy the rows of several experts.
#pragma once

#include "moe/cuda/rows.cuh"

namespace unisono::moe::gpu {

// Tells the receivers whether weights have come.
__device__ inline void tell_weighted(const Work& work, const Dispatch& dispatch) {
  if (blockIdx.x > 0) return;
  for (unsigned r = threadIdx.x; r < static_cast<unsigned>(work.dims.ranks); r += blockDim.x)
    table<std::uint32_t>(work, static_cast<int>(r), work.space.weighted)[work.dims.rank] =
        dispatch.weights ? 1 : 0;
}

// Tells the receivers that the rows of this block have come.
__device__ inline void tell_sent(const Work& work, const Dispatch& dispatch) {
  __syncthreads();
  tell_all(work, Told::data, part_of_block());
  if (dispatch.routed && last_block(work, kSentTicket) && threadIdx.x == 0) ++counters(work).dispatches;
}

// Waits for the rows of all peers, in one block.
__device__ inline void await_rows(const Work& work) {
  if (blockIdx.x > 0) return;
  const std::uint32_t landed = counters(work).landed + 1;
  if (hear_all(work, Told::data, landed * kWhole) && threadIdx.x == 0) counters(work).landed = landed;
}

// Copies a segment of a peer's row to the other experts of its token.
__device__ inline void fan_out(const Work& work, const Dispatch& dispatch, Targets& targets,
                               std::size_t token_row, unsigned segment, const Segments& share) {
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
    copy_row(mine<byte>(work, array) + from * bytes, targets.at, count, static_cast<std::uint32_t>(bytes),
             word, segment, share);
  };
  if (d.scale_bytes > 0) copy(work.space.x(work.epoch) + work.space.scales, d.scale_bytes);
  for (int p = 0; p < dispatch.payloads.count; ++p)
    copy(dispatch.payloads.of[p].to, dispatch.payloads.of[p].bytes);
  __syncwarp();
}

__device__ inline void fan_out_all(const Work& work, const Dispatch& dispatch, Targets& targets,
                                   const std::uint32_t* source_rows) {
  const Dims& d = work.dims;
  for (int i = 1; i < d.ranks; ++i) {
    const int source = (d.rank + i) % d.ranks;
    const Segments share = Segments::exact(source_rows[source], warps_of_grid());
    for (unsigned item = warp_of_grid(); item < share.items; item += warps_of_grid())
      fan_out(work, dispatch, targets, static_cast<std::size_t>(source) * d.max_tokens + share.row_of(item),
              share.segment_of(item), share);
  }
}

// Waits for the rows of all peers, in all blocks, which copy what belongs to several experts. source_rows:
// how many come from each rank.
__device__ inline void land_rows(const Work& work, const Dispatch& dispatch, Targets& targets,
                                 const std::uint32_t* source_rows) {
  const std::uint32_t landed = counters(work).landed + 1;
  if (!hear_all(work, Told::data, landed * kWhole)) return;
  if (work.dims.expert_major()) fan_out_all(work, dispatch, targets, source_rows);
  if (last_block(work, kEndTicket) && threadIdx.x == 0) counters(work).landed = landed;
}

}  // namespace unisono::moe::gpu
