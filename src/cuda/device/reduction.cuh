// The reductions of a lane's move with several sources. A program that only moves has none. The others look
// the call's reduction up in a table, or have it compiled in if that pays.
#pragma once

#include "cuda/device/move.cuh"

namespace unisono::cuda {

struct Bytes {};

using Reduce = void (*)(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes);
// reductions.cu; of up to kFewRanks sources, and of any number
extern __device__ const Reduce reductions[kDTypes][kOps], reductions_of_many[kDTypes][kOps];

struct ByTable {
  Reduce reduce;
  __device__ void operator()(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                             std::size_t bytes) const {
    reduce(dsts, n_dsts, srcs, n_srcs, bytes);
  }
};

// The same on more than kFewRanks ranks.
struct ByTableOfMany : ByTable {};

template <class T, Op op>
struct Inline {
  __device__ void operator()(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                             std::size_t bytes) const {
    reduce<T, op>(dsts, n_dsts, srcs, n_srcs, bytes);
  }
};

}  // namespace unisono::cuda
