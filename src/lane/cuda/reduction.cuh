// What a lane's move does with several sources. A program that only moves has none; the others take the
// reduction of the call from a table, or have it compiled in where that pays.
#pragma once

#include "lane/cuda/move.cuh"
#include "lane/cuda/packets.cuh"

namespace unisono::cuda {

struct Bytes {};

using Reduce = void (*)(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes);
struct Reducers {
  Reduce memory;
  ReducePackets packets;
};
extern __device__ const Reducers reductions[kDTypes][kOps];  // reductions.cu

struct ByTable {
  const Reducers* of;
  __device__ void memory(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                         std::size_t bytes) const {
    of->memory(dsts, n_dsts, srcs, n_srcs, bytes);
  }
  __device__ bool packets(const Rings& rings, const Dst* dsts, int n_dsts, const byte* const* srcs,
                          int n_srcs, std::size_t bytes) const {
    return of->packets(rings, dsts, n_dsts, srcs, n_srcs, bytes);
  }
};

template <class T, Op op>
struct Inline {
  __device__ static void memory(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                                std::size_t bytes) {
    reduce<T, op>(dsts, n_dsts, srcs, n_srcs, bytes);
  }
  __device__ static bool packets(const Rings& rings, const Dst* dsts, int n_dsts, const byte* const* srcs,
                                 int n_srcs, std::size_t bytes) {
    return reduce_packets<T, op>(rings, dsts, n_dsts, srcs, n_srcs, bytes);
  }
};

}  // namespace unisono::cuda
