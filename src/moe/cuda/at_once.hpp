// The kernels that dispatch some tokens, each in one launch (at_once.cu).
#pragma once

#include "moe/cuda/layout.hpp"

namespace unisono::moe::gpu {

// A kernel of the parameters Work, Dispatch, Shares and Segments.
struct AtOnce {
  const void* kernel;
  std::size_t shared_bytes;  // that its launch asks for
};

AtOnce at_once_by_expert(const Dims& dims, const Space& space);  // to expert_major rows
AtOnce at_once_by_rank(const Dims& dims, const Space& space);    // to flat or rank_major rows

// Returns how many of a grid's blocks send rows by rank: the last one sets tables, if it is not the only one.
UNISONO_PORTABLE constexpr unsigned senders_by_rank(unsigned blocks) { return blocks > 1 ? blocks - 1 : 1; }

}  // namespace unisono::moe::gpu
