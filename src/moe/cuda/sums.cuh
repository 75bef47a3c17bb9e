// Sums of rows, which the kernels of a combine share.
#pragma once

#include "base/numeric.hpp"
#include "moe/cuda/rows.cuh"

namespace unisono::moe::gpu {

// The rows that a warp sums, in order, in shared memory. Weights come while rows are loaded: who reads them
// awaits them first.
struct Rows {
  __device__ void take_weight(int place, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                     static_cast<std::uint32_t>(__cvta_generic_to_shared(&weights[place]))),
                 "l"(from)
                 : "memory");
  }
  // Waits for what this warp has begun to load. A warp calls it.
  __device__ static void await() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }
  const byte* at[kMostTopK];
  float weights[kMostTopK];
};

// Returns the weights of rows of tokens of that source, or null.
__device__ inline const float* weights_of(const Work& work, const Combine& combine, int source) {
  if (combine.weights || !work.dims.expert_major()) return combine.weights;
  return table<std::uint32_t>(work, work.space.weighted)[source] ? table<float>(work, work.space.weights)
                                                                 : nullptr;
}

// A sum that begins with -0, to which adding a number gives that number.
template <class T, int kEach>
struct Sum {
  using Vector = Pack<T, kEach>;

  __device__ Sum() {
#pragma unroll
    for (float& value : values) value = -0.0f;
  }
  __device__ void add(const Vector& vector) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] += Wide<T>::from(vector.get(e));
  }
  __device__ void add(const Vector& vector, float weight) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] += weight * Wide<T>::from(vector.get(e));
  }
  __device__ Vector rounded() const {
    Vector vector;
#pragma unroll
    for (int e = 0; e < kEach; ++e) vector.set(e, Wide<T>::to(values[e]));
    return vector;
  }

  float values[kEach];
};

// Lists the rows of pairs, one in each lane that has one. Returns how many there are. A warp calls it.
__device__ inline int list_rows(const Combine& combine, const float* weights, Rows& rows, std::int32_t row) {
  const unsigned all = __ballot_sync(kAllLanes, row != kNone);
  __syncwarp();
  if (row != kNone) {
    const int place = __popc(all & ((1u << lane()) - 1));
    rows.at[place] = combine.y + static_cast<std::size_t>(row) * combine.bytes;
    if (weights) rows.take_weight(place, weights + row);
  }
  __syncwarp();
  return __popc(all);
}

// Lists this rank's rows of a token: the position-th of its source, whose `pair_rows` peers have set.
__device__ inline int find_rows(const Work& work, const Combine& combine, int source, unsigned position,
                                const float* weights, Rows& rows) {
  const Dims& d = work.dims;
  std::int32_t row = kNone;
  if (d.expert_major()) {
    const std::size_t of_token = source * d.max_tokens + position;
    if (lane() < static_cast<unsigned>(d.top_k))
      row = table<std::int32_t>(work, work.space.pair_rows)[of_token * d.top_k + lane()];
  } else if (lane() == 0) {
    row = table<std::int32_t>(work, work.space.first_rows)[source] + static_cast<std::int32_t>(position);
  }
  return list_rows(combine, weights, rows, row);
}

}  // namespace unisono::moe::gpu
