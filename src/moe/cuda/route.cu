// Reads the tokens' experts: where each token and each pair of a token and an expert goes. One pass counts, a
// second one places. Between them the blocks meet, and the ranks tell each other their counts.
#include <cuda_runtime.h>

#include "moe/cuda/counts.cuh"
#include "moe/cuda/launch.hpp"

namespace unisono::moe::gpu {
namespace {

constexpr int kBatch = 4;  // rounds of a warp whose experts are loaded at once

// The tokens of a warp, in rounds of as many whole tokens as a warp has lanes for.
template <class Index>
struct Tokens {
  __device__ Tokens(const Work& work, const Index* indices)
      : work(work), indices(indices), k(work.dims.top_k), of_round(32 / k) {
    const unsigned most = gridDim.x * kWarps;
    const unsigned share = (work.tokens + most - 1) / most;
    rounds = (share + of_round - 1) / of_round;
    first = (blockIdx.x * kWarps + warp_of_block()) * rounds * of_round;
    in_round = lane() / k;
    place = static_cast<int>(lane() % k);
    chunk_tokens = (work.tokens + work.space.chunks - 1) / work.space.chunks;
  }
  __device__ unsigned token(unsigned round) const { return first + round * of_round + in_round; }
  __device__ bool has(unsigned round) const {
    return round < rounds && in_round < of_round && token(round) < work.tokens;
  }
  __device__ int load(unsigned round) const {
    if (!has(round)) return kNone;
    const auto expert = static_cast<std::int64_t>(indices[std::size_t{token(round)} * k + place]);
    if (expert >= -1 && expert < work.dims.experts) return static_cast<int>(expert);
    report(work, Problem::index, token(round), static_cast<std::uint32_t>(expert),
           static_cast<std::uint32_t>(work.dims.experts));
    return kNone;
  }
  __device__ void load(unsigned round, int (&experts)[kBatch]) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) experts[i] = load(round + i);
  }
  // Returns whether this is the first of its token's experts at that rank.
  __device__ bool leads(int expert, int rank) const {
    const int key = expert < 0 ? kNone : rank;
    bool first = expert >= 0;
    for (int back = 1; back < k; ++back) {
      const int other = __shfl_up_sync(kAllLanes, key, static_cast<unsigned>(back));
      if (back <= place && other == key) first = false;
    }
    return first;
  }
  __device__ int rank_of(int expert) const {
    return expert < 0 || work.dims.ranks == 1 ? 0 : work.dims.rank_of(expert);
  }
  // Returns the column of a token at a rank.
  __device__ unsigned column(int rank, unsigned token) const {
    return static_cast<unsigned>(work.dims.experts + rank * work.space.chunks) + token / chunk_tokens;
  }

  const Work& work;
  const Index* indices;
  int k;
  unsigned of_round, rounds, first, in_round, chunk_tokens;
  int place;
};

template <class Index>
__device__ void count(const Tokens<Index>& tokens, std::uint32_t* columns, unsigned round, int expert) {
  const int rank = tokens.rank_of(expert);
  const bool leads = tokens.leads(expert, rank);
  if (expert >= 0) atomicAdd(columns + expert, 1u);
  if (leads) atomicAdd(columns + tokens.column(rank, tokens.token(round)), 1u);
}

// Returns the lanes that take part and have this lane's key, of numbers below `limit`.
__device__ unsigned alike(bool takes, unsigned key, unsigned limit) {
  unsigned lanes = __ballot_sync(kAllLanes, takes);
  for (unsigned bit = 1; bit < limit; bit *= 2) {
    const unsigned have = __ballot_sync(kAllLanes, (key & bit) != 0);
    lanes &= key & bit ? have : ~have;
  }
  return lanes;
}

// Returns a lane's place in its column, among the columns from `first` to `end`, and counts it. The lanes of
// a column follow each other.
__device__ std::uint32_t take_place(std::uint32_t* counts, const std::uint32_t* base, bool takes,
                                    unsigned column, unsigned first, unsigned end) {
  const unsigned lanes = alike(takes, takes ? column - first : 0, end - first);
  const unsigned before = lanes & ((1u << lane()) - 1);
  const std::uint32_t place = takes ? base[column] + counts[column] + __popc(before) : 0;
  __syncwarp();
  if (takes && before == 0) counts[column] += __popc(lanes);
  __syncwarp();
  return place;
}

template <class Index>
__device__ void place(const Tokens<Index>& tokens, const Counts& counts, const Rooms& rooms, unsigned round,
                      int expert) {
  const Work& work = tokens.work;
  const Dims& d = work.dims;
  const int rank = tokens.rank_of(expert);
  std::uint32_t* const warp = counts.warps + warp_of_block() * counts.columns;
  const unsigned token = tokens.token(round);
  const auto experts = static_cast<unsigned>(d.experts);
  const bool leads = tokens.leads(expert, rank);
  const std::uint32_t pair =
      take_place(warp, counts.base, expert >= 0, static_cast<unsigned>(expert), 0, experts);
  const std::uint32_t position = take_place(warp, counts.base, leads, leads ? tokens.column(rank, token) : 0,
                                            experts, static_cast<unsigned>(counts.columns));
  const bool kept = leads && (d.layout != MoeLayout::flat || rooms.first[rank] + position < d.capacity);
  const int home = kept ? rank : device::kMostRanks;
  int before = 0;
  if (d.ranks > 1)
    for (int i = 0; i < tokens.k; ++i)
      before += __shfl_sync(kAllLanes, home, static_cast<int>(tokens.in_round) * tokens.k + i) < home;
  const unsigned homes = __ballot_sync(kAllLanes, kept);
  if (!tokens.has(round)) return;
  const unsigned its = tokens.k == 32 ? kAllLanes : ((1u << tokens.k) - 1) << tokens.in_round * tokens.k;
  const std::size_t row = std::size_t{token} * tokens.k;
  const bool exists = expert >= 0 && (!d.expert_major() || pair < d.capacity);
  table<std::int32_t>(work, work.space.experts)[row + tokens.place] = expert;
  table<std::int32_t>(work, work.space.places)[row + tokens.place] =
      exists ? static_cast<std::int32_t>(pair) : kNone;
  std::int32_t* const kept_at = table<std::int32_t>(work, work.space.homes) + row;
  if (kept) kept_at[before] = Home::pack(rank, position);
  if (tokens.place >= __popc(homes & its)) kept_at[tokens.place] = kNone;
}

template <class Index>
__global__ void __launch_bounds__(kThreads)
    route_kernel(const __grid_constant__ Work work, const Index* topk_idx) {
  extern __shared__ std::uint32_t memory[];
  __shared__ Rooms rooms;
  const Counts counts(work, memory);
  const Tokens<Index> tokens(work, topk_idx);
  int experts[kBatch];
  tokens.load(0, experts);
  const std::uint32_t met = counters(work).met_before, dispatches = counters(work).dispatches + 1;
  for (std::size_t c = threadIdx.x; c < kWarps * counts.columns; c += kThreads) counts.warps[c] = 0;
  if (failed(work)) return;
  for (unsigned round = 0; round < tokens.rounds; round += kBatch) {
    if (round > 0) tokens.load(round, experts);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (round + i < tokens.rounds)
        count(tokens, counts.warps + warp_of_block() * counts.columns, round + i, experts[i]);
  }
  __syncthreads();
  sum_warps(work, counts);
  if (!meet_blocks(work, met)) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) {  // all blocks have read these
    counters(work).met_before = met + (gridDim.x > 1 ? gridDim.x : 0);
    counters(work).dispatches = dispatches;
  }
  sum_blocks(work, counts);
  tell_counts(work, counts);
  if (!hear_all(work, Told::begun, dispatches)) return;
  sum_ranks(work, counts);
  __syncthreads();
  scan_experts(work, counts);
  __syncthreads();
  find_rooms(work, counts, rooms);
  find_bases(work, counts);
  __syncthreads();
  if (!has_room(work, rooms)) return;
  for (unsigned round = 0; round < tokens.rounds; round += kBatch) {
    if (tokens.rounds > kBatch) tokens.load(round, experts);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (round + i < tokens.rounds) place(tokens, counts, rooms, round + i, experts[i]);
  }
  if (blockIdx.x == gridDim.x - 1) describe(work, counts, rooms);
}

const void* route_of(DType index) {
  return index == DType::i64 ? reinterpret_cast<const void*>(route_kernel<std::int64_t>)
                             : reinterpret_cast<const void*>(route_kernel<std::int32_t>);
}

}  // namespace

std::size_t route_shared_bytes(const Space& space) {
  return ((kWarps + 5) * space.columns + 1) * sizeof(std::uint32_t);
}

cudaError_t load_route(const Space& space) {
  for (const DType index : {DType::i32, DType::i64})
    if (const cudaError_t error =
            cudaFuncSetAttribute(route_of(index), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(route_shared_bytes(space)));
        error != cudaSuccess)
      return error;
  return cudaSuccess;
}

cudaError_t route(const Work& work, const void* topk_idx, DType index, int blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<Work*>(&work), const_cast<void**>(&topk_idx)};
  return cudaLaunchKernel(route_of(index), dim3(static_cast<unsigned>(blocks)), dim3(kThreads), parameters,
                          route_shared_bytes(work.space), stream);
}

}  // namespace unisono::moe::gpu
