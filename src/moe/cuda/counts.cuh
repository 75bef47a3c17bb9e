// Counts of the kernel of routes, and what follows from them: the sums of warps, blocks and ranks, and where
// rows go.
#pragma once

#include "moe/cuda/device.cuh"

namespace unisono::moe::gpu {

// The numbers that a block keeps of each column (Space::columns): an expert, or a rank and a chunk of tokens.
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

// Adds up the warps of this block, and tells the other blocks.
__device__ inline void sum_warps(const Work& work, const Counts& counts) {
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
__device__ inline bool meet_blocks(const Work& work, std::uint32_t before) {
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

__device__ inline void sum_blocks(const Work& work, const Counts& counts) {
  const auto* const totals = mine<std::uint32_t>(work, work.space.totals);
  for (std::size_t c = threadIdx.x; c < counts.columns; c += blockDim.x) {
    std::uint32_t sum = 0, before = 0;
#pragma unroll 16
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
__device__ inline void tell_counts(const Work& work, const Counts& counts) {
  __syncthreads();
  const Dims& d = work.dims;
  for (int peer = static_cast<int>(blockIdx.x); peer < d.ranks; peer += static_cast<int>(gridDim.x)) {
    auto* const there = table<std::uint32_t>(work, peer, work.space.matrix) + d.rank * counts.columns;
    for (std::size_t c = threadIdx.x; c < counts.columns; c += blockDim.x) there[c] = counts.own[c];
    __syncthreads();
    if (threadIdx.x == 0 && peer != d.rank) tell(work, Told::begun, peer);
  }
}

__device__ inline void sum_ranks(const Work& work, const Counts& counts) {
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
__device__ inline void scan_experts(const Work& work, const Counts& counts) {
  __shared__ std::uint32_t of_warps[kWarps];
  const auto experts = static_cast<unsigned>(work.dims.experts);
  const auto alignment = work.dims.expert_major() ? static_cast<std::uint32_t>(work.dims.alignment) : 1u;
  std::uint32_t carried = 0;
  for (unsigned first = 0; first < experts; first += blockDim.x) {
    const unsigned e = first + threadIdx.x;
    std::uint32_t rows = e < experts ? counts.all[e] : 0;
    if (alignment > 1) rows = (rows + alignment - 1) / alignment * alignment;
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

__device__ inline void find_rooms(const Work& work, const Counts& counts, Rooms& rooms) {
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
__device__ inline bool has_room(const Work& work, const Rooms& rooms) {
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
__device__ inline void find_bases(const Work& work, const Counts& counts) {
  const auto experts = static_cast<std::size_t>(work.dims.experts);
  const auto chunks = static_cast<std::size_t>(work.space.chunks);
  for (std::size_t c = threadIdx.x; c < counts.columns; c += blockDim.x) {
    std::uint32_t base = counts.base[c];
    if (c < experts) {
      const int rank = work.dims.ranks == 1 ? 0 : work.dims.rank_of(static_cast<int>(c));
      const int first = rank * work.dims.local_experts;
      base += counts.begin[c] - counts.begin[first] + counts.earlier[c];
    } else {
      for (std::size_t before = c - (c - experts) % chunks; before < c; ++before) base += counts.own[before];
    }
    counts.base[c] = base;
  }
}

// Sets what the receiver is told of its experts. Returns a thread's share of the pairs that are left out.
__device__ inline std::uint32_t describe_experts(const Work& work, const Counts& counts) {
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
__device__ inline void describe_sources(const Work& work, const std::uint32_t* tokens,
                                        std::uint32_t dropped_pairs) {
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
__device__ inline void describe(const Work& work, const Counts& counts, const Rooms& rooms) {
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

}  // namespace unisono::moe::gpu
