// The sizes of a Moe that follow from its shape, its options and its rank. For host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"
#include "base/scales.hpp"
#include "unisono/moe.hpp"

namespace unisono::moe {

// Returns a number that is not negative as an index.
UNISONO_PORTABLE constexpr std::size_t at(std::int32_t number) { return static_cast<std::size_t>(number); }

inline constexpr std::size_t kScaleBlock = scales::kBlock;  // elements that share a scale

struct Dims {
  int rank = 0, ranks = 1;
  int experts = 0, local_experts = 0, top_k = 0;
  std::size_t hidden = 0, max_tokens = 0;
  DType dtype = DType::bf16;
  MoeLayout layout = MoeLayout::flat;
  MoeScales scales = MoeScales::none;
  std::size_t alignment = 1, capacity = 0;
  bool drop = false;
  std::size_t row_bytes = 0;    // of a row of x
  std::size_t sent_bytes = 0;   // of a row of x as it travels
  std::size_t scale_bytes = 0;  // of its scales; 0: none
  std::size_t more_bytes = 0;
  std::size_t pairs_held = 0;   // the most (token, expert) pairs that can come, before alignment
  std::size_t rows_held = 0;    // rows of received buffers
  std::size_t tokens_held = 0;  // tokens that can come: ranks * max_tokens
  int handles = 1;
  std::int32_t number = 0;  // of the Moe, which all ranks have alike

  UNISONO_PORTABLE constexpr bool expert_major() const { return layout == MoeLayout::expert_major; }
  UNISONO_PORTABLE constexpr int rank_of(int expert) const { return expert / local_experts; }
  UNISONO_PORTABLE constexpr int first_expert() const { return rank * local_experts; }
};

// Throws UsageError for a shape or options that cannot be.
Dims dims_of(const MoeShape& shape, const MoeOptions& options, int rank, int ranks);

}  // namespace unisono::moe
