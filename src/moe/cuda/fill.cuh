// What a dispatch sets where no token goes.
#pragma once

#include "moe/cuda/rows.cuh"

namespace unisono::moe::gpu {

// Sets what depends on the routing alone and no token fills.
__device__ inline void fill_tables(const Work& work, const Dispatch& dispatch) {
  const Dims& d = work.dims;
  const std::size_t first = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  const auto* const offsets = table<std::int32_t>(work, work.space.offsets);
  const auto* const counts = table<std::int32_t>(work, work.space.counts);
  if (d.expert_major()) {
    for (std::size_t row = first; row < d.rows_held; row += step) {
      const auto number = static_cast<std::int32_t>(row);
      int low = 0, high = d.local_experts;  // the expert before which the rows after this one begin
      while (low < high) {
        const int middle = (low + high) / 2;
        if (offsets[middle + 1] <= number) low = middle + 1;
        else high = middle;
      }
      const bool filled = low < d.local_experts && number < offsets[low] + counts[low];
      if (!dispatch.routed) table<std::int32_t>(work, work.space.row_expert)[row] = filled ? low : kNone;
      if (!filled) table<float>(work, work.space.weights)[row] = 0.0f;
    }
  } else if (d.layout == MoeLayout::rank_major) {
    const auto k = static_cast<std::size_t>(d.top_k);
    const auto* const source_rows = table<std::int32_t>(work, work.space.source_rows);
    for (std::size_t i = first; i < d.rows_held * k; i += step) {
      const std::size_t row = i / k;
      if (row % d.max_tokens < static_cast<std::size_t>(source_rows[row / d.max_tokens])) continue;
      if (!dispatch.routed) table<std::int32_t>(work, work.space.topk_idx)[i] = kNone;
      table<float>(work, work.space.weights)[i] = 0.0f;
    }
  }
}

// Clears the rows between those of two experts.
__device__ inline void clear_gaps(const Work& work, const Dispatch& dispatch) {
  const Dims& d = work.dims;
  if (!d.expert_major() || d.alignment == 1) return;
  const auto* const offsets = table<std::int32_t>(work, work.space.offsets);
  const auto* const counts = table<std::int32_t>(work, work.space.counts);
  const std::size_t items = static_cast<std::size_t>(d.local_experts) * d.alignment;
  for (std::size_t i = warp_of_grid(); i < items; i += warps_of_grid()) {
    const std::size_t e = i / d.alignment;
    const std::size_t row = static_cast<std::size_t>(offsets[e] + counts[e]) + i % d.alignment;
    if (row >= static_cast<std::size_t>(offsets[e + 1])) continue;
    if (d.scale_bytes > 0)
      clear_row(mine<byte>(work, work.space.x(work.epoch) + work.space.scales) + row * d.scale_bytes,
                d.scale_bytes, 1);
    for (int p = 0; p < dispatch.payloads.count; ++p) {
      const Payload& payload = dispatch.payloads.of[p];
      clear_row(mine<byte>(work, payload.to) + row * payload.bytes, payload.bytes, payload.word);
    }
  }
}

}  // namespace unisono::moe::gpu
