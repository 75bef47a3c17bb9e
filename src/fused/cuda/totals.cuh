// Totals of a row, by the threads of the blocks that share it. Bits are those of src/host/norms.cpp.
#pragma once

#include "cuda/device/cluster.cuh"
#include "cuda/device/elements.cuh"
#include "fused/cuda/norm.hpp"

namespace unisono::fused::gpu {

using cuda::Elements;

inline constexpr int kWarp = 32;
inline constexpr unsigned kAll = 0xffffffffu;
// Threads that add a row's terms. Each has neighbouring partial sums (base/norm.hpp).
inline constexpr int kSummers = 256;
inline constexpr int kEach = norm::kPartials / kSummers;

// Load and store elements, of which `left` are there; zeros follow. whole: by words of 16 bytes, if all are
// there. Of a row that is fast all are.
template <bool kFast, class T, int kCount>
__device__ inline Elements<T, kCount> load(const T* from, unsigned left, bool whole) {
  if (kFast || (whole && left >= kCount)) return Elements<T, kCount>::load(from);
  return Elements<T, kCount>::load(from, left);
}
template <bool kFast, class T, int kCount>
__device__ inline void store(T* to, const Elements<T, kCount>& elements, unsigned left, bool whole) {
  if (kFast || (whole && left >= kCount)) elements.store(to);
  else elements.store(to, left);
}

// Says where a block reads its share of a row: from the share alone, or from the row. whole: as Work::whole.
// A fast row is whole, and its share lies in shared memory.
struct Values {
  template <bool kFast, class T, int kCount>
  __device__ Elements<T, kCount> load(const Share& share, unsigned i) const {
    const T* const from = reinterpret_cast<const T*>(at) + (kFast || alone ? i : share.in_row(i));
    return gpu::load<kFast, T, kCount>(from, share.count - i, whole);
  }
  const byte* at;
  bool alone, whole;
};

// Exchanges numbers between the blocks that share a row, in rounds, which take two places in turn. A block
// that tells of a round has heard all of the one before. So nobody reads any more what was told two rounds
// before.
class Rounds {
 public:
  // Makes the counters. All threads of the block call it, before its cluster meets.
  __device__ static void begin(unsigned blocks) {
    if (blocks > 1 && threadIdx.x < 2) cuda::begin_landing(&told().landed[threadIdx.x]);
  }
  __device__ Rounds(unsigned blocks, unsigned first) : blocks_(blocks), round_(first) {}

  // Tells a block the numbers at a place, for one thread.
  __device__ void tell(unsigned block, unsigned place, const float (&numbers)[kEach]) const {
    float (&at)[kEach] = told().numbers[round_ % 2][place];
    if (blocks_ > 1) cuda::land(&told().landed[round_ % 2], at, numbers, block);
    else Elements<float, kEach>::narrow(numbers).store(at);
  }
  // Waits until all blocks have told all. All threads of the block call it.
  __device__ void hear(unsigned places) const {
    if (blocks_ > 1)
      cuda::await_landed(&told().landed[round_ % 2], places * sizeof(told().numbers[0][0]),
                         round_ / 2 % 2 != 0);
    else __syncthreads();
  }
  // Returns what has been told, until the next round but one.
  __device__ const float (&heard(unsigned place) const)[kEach] { return told().numbers[round_ % 2][place]; }
  // The result that one thread finds, for the block.
  __device__ float& result() const { return told().results[round_ % 2]; }
  __device__ void end() { ++round_; }

 private:
  struct Told {
    alignas(16) float numbers[2][kSummers][kEach];
    float results[2];
    std::uint64_t landed[2];
  };
  __device__ static Told& told() {
    __shared__ Told told;
    return told;
  }
  unsigned blocks_, round_;
};

// Returns the sum of a row's partial sums that were told, for the first warp: a tree of halves, of the
// threads' sums, then of the elements of one thread.
__device__ inline float sum_told(const Rounds& rounds) {
  const unsigned thread = threadIdx.x;
  float of_warp[kSummers / kWarp][kEach], sums[kEach];
#pragma unroll
  for (int warp = 0; warp < kSummers / kWarp; ++warp)
    Elements<float, kEach>::load(rounds.heard(thread + warp * kWarp)).widen(of_warp[warp]);
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const auto at = [&](unsigned warp) { return of_warp[warp][e]; };
    sums[e] = ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
  }
#pragma unroll
  for (int kept = kEach / 2; kept > 0; kept /= 2) {  // a lane keeps the sums of one half of its elements
    const unsigned distance = kept * kWarp / kEach;
    const bool upper = (thread & distance) != 0;
#pragma unroll
    for (int e = 0; e < kept; ++e) {
      const float own = upper ? sums[e + kept] : sums[e], other = upper ? sums[e] : sums[e + kept];
      sums[e] = own + __shfl_xor_sync(kAll, other, distance);
    }
  }
  float sum = sums[0];
#pragma unroll
  for (const unsigned distance : {4u, 2u, 1u, 16u, 8u}) sum = sum + __shfl_xor_sync(kAll, sum, distance);
  return sum;
}
static_assert(kSummers == 8 * kWarp && kEach == 4, "sum_told adds so");

// Returns result(sum), of the sum of the partial sums that all blocks tell. All threads of the blocks that
// share the row call it, and get it.
template <class Result>
__device__ inline float total_told(Rounds& rounds, const Result& result) {
  rounds.hear(kSummers);
  if (threadIdx.x < kWarp) {
    const float sum = sum_told(rounds);
    if (threadIdx.x == 0) rounds.result() = result(sum);
  }
  __syncthreads();
  const float total = rounds.result();
  rounds.end();
  return total;
}

// Returns result(sum), of the sum over a row of its elements, or of the squares of their distances from the
// mean. All threads of the blocks that share the row call it, and get it.
template <bool kFast, class T, class Result>
__device__ inline float total_of(Rounds& rounds, const Share& share, const Values& values, bool squared,
                                 float mean, const Result& result) {
  constexpr int kAhead = 4;  // loads before the first of their terms is added
  // Each partial sum is found by as many threads as there are blocks, each of which tells one of them.
  const unsigned thread = threadIdx.x, stretch = 1u << share.bits, tellers = stretch / kEach;
  if (thread < kSummers) {
    float sums[kEach] = {};
    for (unsigned begin = thread % tellers * kEach; begin < share.count; begin += kAhead * stretch) {
      Elements<T, kEach> loaded[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (const unsigned i = begin + k * stretch; i < share.count)
          loaded[k] = values.load<kFast, T, kEach>(share, i);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const unsigned i = begin + k * stretch;
        if (i >= share.count) break;
        float some[kEach];
        loaded[k].widen(some);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float centred = some[e] - mean, term = squared ? centred * centred : some[e];
          if (kFast || i + e < share.count) sums[e] = sums[e] + term;
        }
      }
    }
    rounds.tell(thread / tellers, share.block * tellers + thread % tellers, sums);
  }
  return total_told(rounds, result);
}

// Returns the largest of the numbers of all threads of all blocks that share a row, to each of them. warps:
// of the block.
__device__ inline std::uint32_t largest_of_row(Rounds& rounds, const Share& share, std::uint32_t mine,
                                               unsigned warps) {
  __shared__ std::uint32_t found[kWarp];
  const unsigned blocks = static_cast<unsigned>(norm::kPartials) >> share.bits;
  mine = __reduce_max_sync(kAll, mine);
  if (threadIdx.x % kWarp == 0) found[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const std::uint32_t one = threadIdx.x < warps ? found[threadIdx.x] : 0;
    const float largest[kEach] = {numeric::as_float(__reduce_max_sync(kAll, one))};
    if (threadIdx.x < blocks) rounds.tell(threadIdx.x, share.block, largest);
  }
  rounds.hear(blocks);
  if (threadIdx.x < kWarp) {
    const std::uint32_t one = threadIdx.x < blocks ? numeric::as_bits(rounds.heard(threadIdx.x)[0]) : 0;
    const std::uint32_t largest = __reduce_max_sync(kAll, one);
    if (threadIdx.x == 0) rounds.result() = numeric::as_float(largest);
  }
  __syncthreads();
  const std::uint32_t largest = numeric::as_bits(rounds.result());
  rounds.end();
  return largest;
}

}  // namespace unisono::fused::gpu
