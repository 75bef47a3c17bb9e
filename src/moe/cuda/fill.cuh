// Sets the tables and rows of a dispatch where no token goes.
#pragma once

#include "moe/cuda/rows.cuh"

namespace unisono::moe::gpu {

// Names an expert at each of its rows, and clears the weights of those that stay empty. A warp calls it.
__device__ inline void name_rows(const Work& work, unsigned expert) {
  const std::int32_t begin = table<std::int32_t>(work, work.space.offsets)[expert];
  const std::int32_t end = table<std::int32_t>(work, work.space.offsets)[expert + 1];
  const std::int32_t filled = begin + table<std::int32_t>(work, work.space.counts)[expert];
  for (std::int32_t row = begin + static_cast<std::int32_t>(lane()); row < end; row += 32) {
    table<std::int32_t>(work, work.space.row_expert)[row] =
        row < filled ? static_cast<std::int32_t>(expert) : kNone;
    if (row >= filled) table<float>(work, work.space.weights)[row] = 0.0f;
  }
}

// Sets the same of rows that belong to no expert, or to no token. source_rows: [ranks], of which tokens come.
__device__ inline void fill_rest(const Work& work, const std::uint32_t* source_rows) {
  const Dims& d = work.dims;
  const std::size_t first = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  if (d.expert_major()) {
    const auto rows = static_cast<std::size_t>(*table<std::int32_t>(work, work.space.rows));
    for (std::size_t row = rows + first; row < d.rows_held; row += step) {
      table<std::int32_t>(work, work.space.row_expert)[row] = kNone;
      table<float>(work, work.space.weights)[row] = 0.0f;
    }
  } else if (d.layout == MoeLayout::rank_major) {
    const auto k = static_cast<unsigned>(d.top_k), pairs = static_cast<unsigned>(d.max_tokens) * k;
    auto* experts = table<std::int32_t>(work, work.space.topk_idx);
    auto* weights = table<float>(work, work.space.weights);
    for (int s = 0; s < d.ranks; ++s, experts += pairs, weights += pairs)
      for (std::size_t i = source_rows[s] * k + first; i < pairs; i += step) {
        experts[i] = kNone;
        weights[i] = 0.0f;
      }
  }
}

// Sets what depends on the routing alone and no token fills. What was set for a kept routing stays.
__device__ inline void fill_tables(const Work& work, const Dispatch& dispatch,
                                   const std::uint32_t* source_rows) {
  if (dispatch.routed) return;
  const auto experts = work.dims.expert_major() ? static_cast<unsigned>(work.dims.local_experts) : 0;
  for (unsigned e = warps_of_grid() - 1 - warp_of_grid(); e < experts; e += warps_of_grid())
    name_rows(work, e);  // the last warps have the fewest tokens
  fill_rest(work, source_rows);
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
