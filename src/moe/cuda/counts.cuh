// Counts of the kernel of routes, and what follows from them: the sums of blocks and ranks, and where rows
// go.
#pragma once

#include "moe/cuda/device.cuh"

namespace unisono::moe::gpu {

// The numbers that a block keeps of each column: an expert, or a rank and a chunk of tokens.
struct Counts {
  __device__ Counts(const Work& work, std::uint32_t* memory, bool alone, int chunks)
      : chunks(static_cast<unsigned>(chunks)),
        columns(static_cast<unsigned>(columns_of(work.dims, chunks))),
        own(memory),
        all(alone ? own : own + columns),
        earlier(own + 2 * columns),
        base(earlier + columns),
        begin(base + columns) {}
  unsigned chunks, columns;
  std::uint32_t* own;      // of this block; then of this rank
  std::uint32_t* all;      // of all ranks
  std::uint32_t* earlier;  // of the ranks before this one, if there are any
  std::uint32_t* base;  // of the blocks before this one; then of an expert where this block's first pair goes
  std::uint32_t* begin;  // [experts + 1]: of all experts' pairs, one after another
};

// Tells the other blocks what this one has counted, and adds up what all blocks but the last, which has no
// tokens, have told. A word of `totals` has a count and the number of this dispatch, which no word had
// before. A thread has the same columns in all that follows.
__device__ inline bool sum_blocks(const Work& work, const Counts& counts, std::uint32_t dispatch) {
  auto* const totals = mine<std::uint64_t>(work, work.space.totals);
  const unsigned blocks = gridDim.x - 1;
  const std::uint64_t tag = std::uint64_t{dispatch} << 32;
  if (blockIdx.x < blocks)
    for (unsigned c = threadIdx.x; c < counts.columns; c += kThreads)
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(totals + blockIdx.x * counts.columns + c),
                   "l"(tag | counts.own[c])
                   : "memory");
  for (unsigned c = threadIdx.x; c < counts.columns; c += kThreads) {
    std::uint64_t began = 0;
    std::uint32_t sum = blocks == 0 ? counts.own[c] : 0, before = 0;
    for (std::uint32_t polls = 1; blocks > 0; ++polls) {
      std::uint64_t words[kRouteBlocks];
#pragma unroll
      for (unsigned b = 0; b < kRouteBlocks; ++b) {
        words[b] = tag;
        if (b < blocks)
          asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                       : "=l"(words[b])
                       : "l"(totals + b * counts.columns + c)
                       : "memory");
      }
      bool told = true;
      sum = before = 0;
#pragma unroll
      for (unsigned b = 0; b < kRouteBlocks; ++b) {
        told = told && (words[b] >> 32) == dispatch;
        before += b < blockIdx.x ? static_cast<std::uint32_t>(words[b]) : 0;
        sum += static_cast<std::uint32_t>(words[b]);
      }
      if (told) break;
      if (polls % device::kLook == 0 &&
          !device::patient(device::detail::Wait{work.area, -1, work.dims.rank}, began, blocks, 0))
        return false;
    }
    counts.own[c] = sum;
    counts.base[c] = before;
  }
  return true;
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

// Returns the sum of the lanes' values up to this lane.
__device__ inline std::uint32_t sum_to(std::uint32_t value) {
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (lane() >= step) value += other;
  }
  return value;
}

// Sets counts.begin, of which each rank's part is laid out from the part's first entry on, and adds it to the
// bases of experts.
template <bool kAlone = false>
__device__ inline void scan_experts(const Work& work, const Counts& counts) {
  __shared__ std::uint32_t of_warps[kWarps];
  const auto experts = static_cast<unsigned>(work.dims.experts);
  const auto alignment = work.dims.expert_major() ? static_cast<std::uint32_t>(work.dims.alignment) : 1u;
  std::uint32_t carried = 0;
  for (unsigned first = 0; first < experts; first += blockDim.x) {
    const unsigned e = first + threadIdx.x;
    std::uint32_t rows = e < experts ? counts.all[e] : 0;
    if (alignment > 1) rows = (rows + alignment - 1) / alignment * alignment;
    const std::uint32_t sum = sum_to(rows);
    if (lane() == 31) of_warps[warp_of_block()] = sum;
    __syncthreads();
    const std::uint32_t of_warp = lane() < kWarps ? of_warps[lane()] : 0;
    const std::uint32_t before =
        carried + __reduce_add_sync(kAllLanes, lane() < warp_of_block() ? of_warp : 0);
    carried += __reduce_add_sync(kAllLanes, of_warp);
    if (e < experts) {
      counts.begin[e] = before + sum - rows;
      counts.base[e] += before + sum - rows + (kAlone ? 0 : counts.earlier[e]);
    }
    if (e + 1 == experts) counts.begin[experts] = before + sum;
    __syncthreads();
  }
}

// The first row of this rank's tokens at each rank, and what that rank needs for all tokens.
struct Rooms {
  std::uint32_t first[device::kMostRanks];   // this rank's first one
  std::uint32_t base[device::kMostRanks];    // the block's first one, among this rank's
  std::uint32_t needed[device::kMostRanks];  // by the tokens of all ranks, or their pairs
};

// Sets them, each by a thread, the last one first. Returns whether a rank lacks room, for this thread.
// Requires: experts have been scanned.
template <bool kAlone = false>
__device__ inline bool find_rooms(const Work& work, const Counts& counts, Rooms& rooms) {
  const Dims& d = work.dims;
  const bool packed = d.layout == MoeLayout::flat;
  const unsigned chunks = kAlone ? 1 : counts.chunks;
  const auto ranks = kAlone ? 1u : static_cast<unsigned>(d.ranks);
  const auto local = static_cast<unsigned>(d.local_experts);
  bool full = false;
#pragma unroll 1
  for (unsigned r = kThreads - 1 - threadIdx.x; r < ranks; r += kThreads) {
    const unsigned first = static_cast<unsigned>(d.experts) + r * chunks;
    std::uint32_t all = 0, earlier = 0, base = 0;
#pragma unroll 1
    for (unsigned c = first; c < first + chunks; ++c) {
      all += counts.all[c];
      if (!kAlone) earlier += counts.earlier[c];
      base += counts.base[c];
    }
    if (d.expert_major()) all = counts.begin[(r + 1) * local] - counts.begin[r * local];
    rooms.first[r] = packed ? earlier : static_cast<std::uint32_t>(d.rank * d.max_tokens);
    rooms.base[r] = base;
    rooms.needed[r] = all;
    full = full || all > d.capacity;
  }
  return full && !d.drop && d.layout != MoeLayout::rank_major;
}

// Returns whether every rank has room. Otherwise the communicator fails. full: a rank lacks room, as any of
// the block's threads knows. All threads of a block call it; they then know the rooms.
__device__ inline bool has_room(const Work& work, bool full, const Rooms& rooms) {
  if (__syncthreads_or(full) == 0) return true;
  if (threadIdx.x > 0) return false;
  int most = 0;
  for (int r = 1; r < work.dims.ranks; ++r)
    if (rooms.needed[r] > rooms.needed[most]) most = r;
  report(work, Problem::capacity, static_cast<std::uint64_t>(most), rooms.needed[most],
         static_cast<std::uint32_t>(work.dims.capacity));
  return false;
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

// The tokens and rows that come from each rank, [ranks] in shared memory.
struct Sources {
  __device__ Sources(std::uint32_t* memory, int ranks)
      : tokens(memory), rows(tokens + ranks), first_rows(rows + ranks) {}
  std::uint32_t* tokens;  // for this rank
  std::uint32_t* rows;    // for which there is room
  std::uint32_t* first_rows;
};

// Sets where the rows of the sources' tokens go. A warp calls it.
__device__ inline void place_sources(const Dims& d, const Sources& sources) {
  const auto ranks = static_cast<unsigned>(d.ranks), capacity = static_cast<unsigned>(d.capacity);
  const bool packed = d.layout == MoeLayout::flat;
  std::uint32_t next = 0;
  for (unsigned first = 0; first < ranks; first += 32) {
    const unsigned s = first + lane();
    const std::uint32_t its = s < ranks ? sources.tokens[s] : 0, sum = sum_to(its);
    const std::uint32_t begin = packed ? next + sum - its : s * static_cast<std::uint32_t>(d.max_tokens);
    next += __shfl_sync(kAllLanes, sum, 31);
    if (s >= ranks) break;
    sources.first_rows[s] = begin;
    sources.rows[s] = packed ? min(its, capacity - min(begin, capacity)) : its;
  }
  __syncwarp();
}

// Sets what the receiver is told of each source. A warp calls it.
__device__ inline void describe_sources(const Work& work, const Sources& sources,
                                        std::uint32_t dropped_pairs) {
  const Dims& d = work.dims;
  std::uint32_t end = 0, dropped = 0;
  for (unsigned s = lane(); s < static_cast<unsigned>(d.ranks); s += 32) {
    const std::uint32_t begin = sources.first_rows[s], rows = sources.rows[s];
    table<std::uint32_t>(work, work.space.source_rows)[s] = rows;
    table<std::uint32_t>(work, work.space.first_rows)[s] = begin;
    dropped += sources.tokens[s] - rows;
    if (rows > 0) end = begin + rows;
  }
  __syncwarp();
  end = __reduce_max_sync(kAllLanes, end);
  dropped = __reduce_add_sync(kAllLanes, dropped) + dropped_pairs;
  if (lane() > 0) return;
  if (!d.expert_major()) *table<std::uint32_t>(work, work.space.rows) = end;
  *table<std::uint32_t>(work, work.space.dropped) = dropped;
}

// Sets all that the receiver is told. One block calls it; its last warp knows the sources.
__device__ inline void describe(const Work& work, const Counts& counts, const Rooms& rooms,
                                const Sources& sources) {
  __shared__ std::uint32_t dropped;
  if (threadIdx.x == 0) dropped = 0;
  for (unsigned r = threadIdx.x; r < static_cast<unsigned>(work.dims.ranks); r += kThreads)
    table<std::uint32_t>(work, work.space.first_there)[r] = rooms.first[r];
  const std::uint32_t some = describe_experts(work, counts);
  if (work.dims.drop) {
    __syncthreads();
    if (some > 0) atomicAdd(&dropped, some);
    __syncthreads();
  }
  if (in_last_warp()) describe_sources(work, sources, work.dims.drop ? dropped : 0);
}

}  // namespace unisono::moe::gpu
