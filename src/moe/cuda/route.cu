// Reads the tokens' experts: where each token and each pair of a token and an expert goes. One pass counts, a
// second one places. Between them the blocks meet, and the ranks tell each other their counts.
#include <cuda_runtime.h>

#include "moe/cuda/device.cuh"
#include "moe/cuda/launch.hpp"

namespace unisono::moe::gpu {
namespace {

constexpr int kBatch = 4;  // rounds of a warp whose experts are loaded at once

// What a block keeps of each column (Space::columns): an expert, or a rank and a chunk of tokens.
struct Counts {
  __device__ Counts(const Work& work, std::uint32_t* memory)
      : columns(work.space.columns),
        warps(memory),
        own(warps + kWarps * columns),
        all(own + columns),
        earlier(all + columns),
        base(earlier + columns),
        begin(base + columns) {}
  std::size_t columns;
  std::uint32_t* warps;    // [kWarps, columns]: of each warp; then of the warps before it
  std::uint32_t* own;      // of this rank
  std::uint32_t* all;      // of all ranks
  std::uint32_t* earlier;  // of the ranks before this one
  std::uint32_t* base;     // of the blocks before this one; then where this block's first one goes
  std::uint32_t* begin;    // [experts + 1]: of all experts' pairs, one after another
};

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
    const unsigned key = expert < 0 ? 0x80000000u | lane() : in_round << 16 | static_cast<unsigned>(rank);
    const unsigned alike = __match_any_sync(kAllLanes, key);
    return expert >= 0 && (alike & ((1u << lane()) - 1)) == 0;
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
  const int rank = expert < 0 ? 0 : tokens.work.dims.rank_of(expert);
  const bool leads = tokens.leads(expert, rank);
  if (expert >= 0) atomicAdd(columns + expert, 1u);
  if (leads) atomicAdd(columns + tokens.column(rank, tokens.token(round)), 1u);
}

// Adds up the warps of this block, and tells the other blocks.
__device__ void sum_warps(const Work& work, const Counts& counts) {
  auto* const totals = mine<std::uint32_t>(work, work.space.totals) + blockIdx.x * counts.columns;
  for (std::size_t c = threadIdx.x; c < counts.columns; c += blockDim.x) {
    std::uint32_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      std::uint32_t& of_warp = counts.warps[w * counts.columns + c];
      const std::uint32_t its = of_warp;
      of_warp = sum;
      sum += its;
    }
    totals[c] = sum;
  }
}

// Returns when all blocks have called it.
__device__ bool meet_blocks(const Work& work, std::uint32_t before) {
  bool met = true;
  __syncthreads();
  if (threadIdx.x == 0 && gridDim.x > 1) {
    std::uint32_t* const word = &counters(work).met;
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
    std::uint32_t seen = 0;
    std::uint64_t began = 0;
    for (std::uint32_t polls = 1;; ++polls) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
      if (seen - before >= gridDim.x) break;
      if (polls % device::kLook == 0 && !device::patient(device::detail::Wait{work.area, -1, work.dims.rank},
                                                         began, before + gridDim.x, seen)) {
        met = false;
        break;
      }
    }
  }
  return __syncthreads_and(met) != 0;
}

__device__ void sum_blocks(const Work& work, const Counts& counts) {
  const auto* const totals = mine<std::uint32_t>(work, work.space.totals);
  for (std::size_t c = threadIdx.x; c < counts.columns; c += blockDim.x) {
    std::uint32_t sum = 0, before = 0;
#pragma unroll 8
    for (unsigned b = 0; b < gridDim.x; ++b) {
      const std::uint32_t of_block = __ldcg(totals + b * counts.columns + c);
      before += b < blockIdx.x ? of_block : 0;
      sum += of_block;
    }
    counts.own[c] = sum;
    counts.base[c] = before;
  }
}

// Tells the ranks what this one has counted. Each block tells some of them.
__device__ void tell_counts(const Work& work, const Counts& counts) {
  __syncthreads();
  const Dims& d = work.dims;
  for (int peer = static_cast<int>(blockIdx.x); peer < d.ranks; peer += static_cast<int>(gridDim.x)) {
    auto* const there = table<std::uint32_t>(work, peer, work.space.matrix) + d.rank * counts.columns;
    for (std::size_t c = threadIdx.x; c < counts.columns; c += blockDim.x) there[c] = counts.own[c];
    __syncthreads();
    if (threadIdx.x == 0 && peer != d.rank) tell(work, Told::begun, peer);
  }
}

__device__ void sum_ranks(const Work& work, const Counts& counts) {
  const auto* const matrix = table<std::uint32_t>(work, work.space.matrix);
  for (std::size_t c = threadIdx.x; c < counts.columns; c += blockDim.x) {
    std::uint32_t sum = 0, before = 0;
#pragma unroll 8
    for (int s = 0; s < work.dims.ranks; ++s) {
      const std::uint32_t its = s == work.dims.rank ? counts.own[c] : __ldcg(matrix + s * counts.columns + c);
      before += s < work.dims.rank ? its : 0;
      sum += its;
    }
    counts.all[c] = sum;
    counts.earlier[c] = before;
  }
}

// Sets counts.begin, of which each rank's part is laid out from the part's first entry on.
__device__ void scan_experts(const Work& work, const Counts& counts) {
  __shared__ std::uint32_t of_warps[kWarps];
  const auto experts = static_cast<unsigned>(work.dims.experts);
  const auto alignment = work.dims.expert_major() ? static_cast<std::uint32_t>(work.dims.alignment) : 1u;
  std::uint32_t carried = 0;
  for (unsigned first = 0; first < experts; first += blockDim.x) {
    const unsigned e = first + threadIdx.x;
    const std::uint32_t rows = e < experts ? (counts.all[e] + alignment - 1) / alignment * alignment : 0;
    std::uint32_t sum = rows;
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
      const std::uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane() >= step) sum += other;
    }
    if (lane() == 31) of_warps[warp_of_block()] = sum;
    __syncthreads();
    std::uint32_t before = carried;
#pragma unroll
    for (unsigned w = 0; w < kWarps; ++w) {
      before += w < warp_of_block() ? of_warps[w] : 0;
      carried += of_warps[w];
    }
    if (e < experts) counts.begin[e] = before + sum - rows;
    __syncthreads();
  }
  if (threadIdx.x == 0) counts.begin[experts] = carried;
}

// Where the tokens of this rank go at each rank, and what that rank needs for all tokens.
struct Rooms {
  std::uint32_t first[device::kMostRanks], needed[device::kMostRanks];
};

__device__ void find_rooms(const Work& work, const Counts& counts, Rooms& rooms) {
  const Dims& d = work.dims;
  for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += static_cast<int>(blockDim.x)) {
    const unsigned first = static_cast<unsigned>(d.experts + r * work.space.chunks);
    std::uint32_t all = 0, earlier = 0;
    for (unsigned c = first; c < first + static_cast<unsigned>(work.space.chunks); ++c) {
      all += counts.all[c];
      earlier += counts.earlier[c];
    }
    const bool packed = d.layout == MoeLayout::flat;
    rooms.first[r] = packed ? earlier : static_cast<std::uint32_t>(d.rank * d.max_tokens);
    rooms.needed[r] = packed ? all
                      : d.expert_major()
                          ? counts.begin[(r + 1) * d.local_experts] - counts.begin[r * d.local_experts]
                          : 0;
  }
}

// Returns whether every rank has room. Otherwise the communicator fails.
__device__ bool has_room(const Work& work, const Rooms& rooms) {
  if (work.dims.drop || work.dims.layout == MoeLayout::rank_major) return true;
  int most = 0;
  for (int r = 1; r < work.dims.ranks; ++r)
    if (rooms.needed[r] > rooms.needed[most]) most = r;
  if (rooms.needed[most] <= work.dims.capacity) return true;
  if (threadIdx.x == 0)
    report(work, Problem::capacity, static_cast<std::uint64_t>(most), rooms.needed[most],
           static_cast<std::uint32_t>(work.dims.capacity));
  return false;
}

// Sets, of each column, where this block's first one goes: a pair's row or place at its rank, or a token's
// position among this rank's.
__device__ void find_bases(const Work& work, const Counts& counts) {
  const auto experts = static_cast<std::size_t>(work.dims.experts);
  const auto chunks = static_cast<std::size_t>(work.space.chunks);
  for (std::size_t c = threadIdx.x; c < counts.columns; c += blockDim.x) {
    std::uint32_t base = counts.base[c];
    if (c < experts) {
      const int first = work.dims.rank_of(static_cast<int>(c)) * work.dims.local_experts;
      base += counts.begin[c] - counts.begin[first] + counts.earlier[c];
    } else {
      for (std::size_t before = c - (c - experts) % chunks; before < c; ++before) base += counts.own[before];
    }
    counts.base[c] = base;
  }
}

// Returns how many lanes before this one have its key, and advances the warp's count of that key.
__device__ std::uint32_t take_place(std::uint32_t* counts, const std::uint32_t* base, bool takes,
                                    unsigned column) {
  const unsigned alike = __match_any_sync(kAllLanes, takes ? column : 0x80000000u | lane());
  const unsigned before = alike & ((1u << lane()) - 1);
  const std::uint32_t place = takes ? base[column] + counts[column] + __popc(before) : 0;
  __syncwarp();
  if (takes && before == 0) counts[column] += __popc(alike);
  __syncwarp();
  return place;
}

template <class Index>
__device__ void place(const Tokens<Index>& tokens, const Counts& counts, const Rooms& rooms, unsigned round,
                      int expert) {
  const Work& work = tokens.work;
  const Dims& d = work.dims;
  const int rank = expert < 0 ? 0 : d.rank_of(expert);
  std::uint32_t* const warp = counts.warps + warp_of_block() * counts.columns;
  const unsigned token = tokens.token(round);
  const bool leads = tokens.leads(expert, rank);
  const std::uint32_t pair = take_place(warp, counts.base, expert >= 0, static_cast<unsigned>(expert));
  const std::uint32_t position = take_place(warp, counts.base, leads, leads ? tokens.column(rank, token) : 0);
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

// Sets what the receiver is told of its experts. Returns a thread's share of the pairs that are left out.
__device__ std::uint32_t describe_experts(const Work& work, const Counts& counts) {
  const Dims& d = work.dims;
  const auto capacity = static_cast<std::uint32_t>(d.capacity);
  auto* const of_experts = table<std::int32_t>(work, work.space.counts);
  auto* const offsets = table<std::int32_t>(work, work.space.offsets);
  const int first = d.first_expert();
  std::uint32_t dropped = 0;
  for (int e = static_cast<int>(threadIdx.x); e <= d.local_experts; e += kThreads) {
    const std::uint32_t begin = counts.begin[first + e] - counts.begin[first];
    const std::uint32_t kept = d.expert_major() ? min(begin, capacity) : begin;
    offsets[e] = static_cast<std::int32_t>(kept);
    if (e == d.local_experts) {
      if (d.expert_major()) *table<std::int32_t>(work, work.space.rows) = static_cast<std::int32_t>(kept);
      continue;
    }
    const std::uint32_t pairs = counts.all[first + e];
    const std::uint32_t kept_pairs = d.expert_major() ? min(pairs, capacity - kept) : pairs;
    of_experts[e] = static_cast<std::int32_t>(kept_pairs);
    dropped += pairs - kept_pairs;
  }
  return dropped;
}

// Sets what the receiver is told of each source.
__device__ void describe_sources(const Work& work, const std::uint32_t* tokens, std::uint32_t dropped_pairs) {
  const Dims& d = work.dims;
  const auto capacity = static_cast<std::uint32_t>(d.capacity);
  const bool packed = d.layout == MoeLayout::flat;
  auto* const source_rows = table<std::int32_t>(work, work.space.source_rows);
  auto* const first_rows = table<std::int32_t>(work, work.space.first_rows);
  std::uint32_t next = 0, rows = 0, dropped = dropped_pairs;
  for (int s = 0; s < d.ranks; ++s) {
    const std::uint32_t begin = packed ? next : static_cast<std::uint32_t>(s * d.max_tokens);
    const std::uint32_t kept = packed ? min(tokens[s], capacity - min(begin, capacity)) : tokens[s];
    source_rows[s] = static_cast<std::int32_t>(kept);
    first_rows[s] = static_cast<std::int32_t>(begin);
    next += tokens[s];
    dropped += tokens[s] - kept;
    if (kept > 0) rows = begin + kept;
  }
  if (!d.expert_major()) *table<std::int32_t>(work, work.space.rows) = static_cast<std::int32_t>(rows);
  *table<std::int32_t>(work, work.space.dropped) = static_cast<std::int32_t>(dropped);
}

// Sets all that the receiver is told. One block calls it.
__device__ void describe(const Work& work, const Counts& counts, const Rooms& rooms) {
  __shared__ std::uint32_t tokens[device::kMostRanks], dropped;
  const Dims& d = work.dims;
  const std::size_t first = static_cast<std::size_t>(d.experts + d.rank * work.space.chunks);
  const auto* const matrix = table<std::uint32_t>(work, work.space.matrix);
  if (threadIdx.x == 0) dropped = 0;
  for (int s = static_cast<int>(threadIdx.x); s < d.ranks; s += kThreads) {
    std::uint32_t all = 0;
    for (std::size_t c = first; c < first + static_cast<std::size_t>(work.space.chunks); ++c)
      all += s == d.rank ? counts.own[c] : __ldcg(matrix + s * counts.columns + c);
    tokens[s] = all;
    table<std::int32_t>(work, work.space.first_there)[s] = static_cast<std::int32_t>(rooms.first[s]);
  }
  __syncthreads();
  if (const std::uint32_t some = describe_experts(work, counts); some > 0) atomicAdd(&dropped, some);
  __syncthreads();
  if (threadIdx.x == 0) describe_sources(work, tokens, dropped);
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
