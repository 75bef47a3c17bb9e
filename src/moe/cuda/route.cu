// Reads the tokens' experts: where each token and each pair of a token and an expert goes. One pass marks
// each expert's tokens, a second one places. Between them the blocks and the ranks tell each other their
// counts.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "cuda/api.hpp"
#include "moe/cuda/counts.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/routes.cuh"

namespace unisono::moe::gpu {
namespace {

constexpr unsigned kWords = kTile / 32;  // of 32 tokens each, in a tile

// Which tokens of a tile have an expert, or go to a rank: a row of bits for each expert, then for each rank.
struct Marks {
  __device__ Marks(const Work& work, std::uint32_t* memory)
      : rows(static_cast<unsigned>(work.dims.experts + work.dims.ranks)),
        bits(memory),
        before(bits + kWords * rows),
        seen(before + kWords * rows) {}
  __device__ void clear() const {
    auto* const all = reinterpret_cast<uint4*>(bits);
    for (unsigned i = threadIdx.x; i < 2 * kWords / 4 * rows; i += kThreads) all[i] = {0, 0, 0, 0};
  }
  __device__ unsigned at(unsigned row, unsigned in_tile) const { return in_tile / 32 * rows + row; }
  // Returns whether a token of the same word names this expert more than once.
  __device__ bool twice(unsigned expert, unsigned in_tile) const {
    const unsigned i = at(expert, in_tile);
    const std::uint32_t after = in_tile / 32 + 1 < kWords ? before[i + rows] : seen[expert];
    return after - before[i] != static_cast<std::uint32_t>(__popc(bits[i]));
  }

  unsigned rows;
  std::uint32_t* bits;    // [kWords, rows]
  std::uint32_t* before;  // [kWords, rows]: pairs beyond a token's first; then all pairs of the words before
  std::uint32_t* seen;    // [rows]: pairs of the tiles so far
};

// Marks the tokens of a tile. Returns whether this thread has seen a token that names an expert twice.
template <class Tokens>
__device__ bool mark(Tokens& tokens, const Marks& marks, unsigned tile) {
  bool twice = false;
  const auto experts = static_cast<unsigned>(tokens.work.dims.experts);
  tokens.each(tile, [&](unsigned token, bool, int expert) {
    const unsigned in_tile = token - tile, bit = 1u << in_tile % 32;
    const unsigned rank = tokens.rank_of(expert);
    if (tokens.leads(expert, rank)) atomicOr(marks.bits + marks.at(experts + rank, in_tile), bit);
    const unsigned i = marks.at(static_cast<unsigned>(expert), in_tile);
    if (expert >= 0 && (atomicOr(marks.bits + i, bit) & bit) != 0) {
      atomicAdd(marks.before + i, 1u);
      twice = true;
    }
  });
  return twice;
}

// Adds up the words of a tile: how many pairs or tokens of a row come before each word, in this block.
// The first `counted` rows are columns too.
__device__ void add_up(const Marks& marks, std::uint32_t* own, unsigned counted, bool first) {
  for (unsigned row = threadIdx.x; row < marks.rows; row += kThreads) {
    std::uint32_t its[kWords], sum = first ? 0 : marks.seen[row];
#pragma unroll
    for (unsigned w = 0; w < kWords; ++w)
      its[w] = marks.before[w * marks.rows + row] + __popc(marks.bits[w * marks.rows + row]);
#pragma unroll
    for (unsigned w = 0; w < kWords; ++w) {
      marks.before[w * marks.rows + row] = sum;
      sum += its[w];
    }
    marks.seen[row] = sum;
    if (row < counted) own[row] = sum;
  }
}

// Adds up a tile's tokens by rank and chunk.
__device__ void add_up_chunks(const Work& work, const Marks& marks, std::uint32_t* own, unsigned tile,
                              bool first) {
  const auto experts = static_cast<unsigned>(work.dims.experts);
  const auto chunks = static_cast<unsigned>(work.space.chunks);
  const unsigned share = work.space.chunk_of(work.tokens);
  const auto bits_before = [](unsigned token, unsigned word) {
    return token <= word ? 0 : token - word >= 32 ? kAllLanes : (1u << (token - word)) - 1;
  };
  __syncthreads();  // rows of ranks have other threads than columns of ranks and chunks
  for (unsigned c = experts + threadIdx.x; c < work.space.columns; c += kThreads) {
    const unsigned row = experts + (c - experts) / chunks, from = (c - experts) % chunks * share;
    std::uint32_t sum = first ? 0 : own[c];
#pragma unroll 1
    for (unsigned w = 0; w < kWords; ++w) {
      const unsigned word = tile + 32 * w;
      sum += __popc(marks.bits[w * marks.rows + row] & bits_before(from + share, word) &
                    ~bits_before(from, word));
    }
    own[c] = sum;
  }
  __syncthreads();
}

// Returns how many of some pairs have this expert.
template <class Index>
__device__ __noinline__ std::uint32_t pairs_of(const Index* indices, unsigned count, int expert) {
  std::uint32_t pairs = 0;
#pragma unroll 8
  for (unsigned i = 0; i < count; ++i) pairs += indices[i] == expert;
  return pairs;
}

// Writes where each token and each pair of a tile goes. twice: some token names an expert more than once.
template <bool kAlone, class Tokens>
__device__ void place(Tokens& tokens, const Marks& marks, const Counts& counts, const Rooms& rooms,
                      unsigned tile, bool twice) {
  const Work& work = tokens.work;
  const Dims& d = work.dims;
  auto* const experts = table<std::int32_t>(work, work.space.experts);
  auto* const places = table<std::int32_t>(work, work.space.places);
  auto* const homes = table<std::int32_t>(work, work.space.homes);
  const auto capacity = static_cast<std::uint32_t>(d.capacity);
  const std::uint32_t room_of_pairs = d.expert_major() ? capacity : ~0u;
  const std::uint32_t room_of_tokens = d.layout == MoeLayout::flat ? capacity : ~0u;
  tokens.each(tile, [&](unsigned token, bool has, int expert) {
    const unsigned in_tile = has ? token - tile : 0, below = (1u << in_tile % 32) - 1;
    const unsigned rank = tokens.rank_of(expert);
    const auto row = static_cast<unsigned>(max(expert, 0));  // lanes without a token or an expert go along
    const unsigned i = marks.at(row, in_tile), j = marks.at(static_cast<unsigned>(d.experts) + rank, in_tile);
    std::uint32_t pair = counts.base[row] + marks.before[i];
    if (twice && expert >= 0 && marks.twice(row, in_tile))
      pair += pairs_of(tokens.at(token - in_tile % 32), in_tile % 32 * tokens.round.k + tokens.round.place,
                       expert);
    else pair += __popc(marks.bits[i] & below);
    if (!kAlone) pair -= counts.begin[rank * static_cast<unsigned>(d.local_experts)];
    const std::uint32_t position = rooms.base[rank] + marks.before[j] + __popc(marks.bits[j] & below);
    const bool kept = expert >= 0 && rooms.first[rank] + position < room_of_tokens;
    const std::size_t at = std::size_t{token} * tokens.round.k + tokens.round.place;
    if (has) {
      experts[at] = expert;
      places[at] = expert >= 0 && pair < room_of_pairs ? static_cast<std::int32_t>(pair) : kNone;
    }
    if constexpr (kAlone) {
      const bool any = (__ballot_sync(kAllLanes, kept) & tokens.round.its) != 0;
      if (has) homes[at] = any && tokens.round.place == 0 ? Home::pack(0, position) : kNone;
    } else {
      const CopiesOfRound copies(tokens.round, kept, rank, tokens.shares.rank_bits);
      if (copies.leads)
        homes[at - tokens.round.place + copies.earlier] = Home::pack(static_cast<int>(rank), position);
      if (has && tokens.round.place >= copies.all) homes[at] = kNone;
    }
  });
}

// Sets what this rank and its peers have counted, and where rows go. Returns whether all have told, and have
// room.
template <bool kAlone>
__device__ bool exchange(const Work& work, const Counts& counts, Rooms& rooms, std::uint32_t dispatch) {
  if (__syncthreads_or(!sum_blocks(work, counts, dispatch))) return false;
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0)
    counters(work).dispatches = dispatch;  // all blocks have read it
  if constexpr (!kAlone) {
    tell_counts(work, counts);
    if (!hear_all(work, Told::begun, dispatch)) return false;
    sum_ranks(work, counts);
    __syncthreads();
  }
  scan_experts<kAlone>(work, counts);
  return has_room(work, find_rooms<kAlone>(work, counts, rooms), rooms);
}

// Sets all that this rank is told of what comes. One block calls it.
__device__ void tell_receiver(const Work& work, const Counts& counts, const Rooms& rooms) {
  __shared__ std::uint32_t memory[3 * device::kMostRanks];
  const auto ranks = static_cast<unsigned>(work.dims.ranks), rank = static_cast<unsigned>(work.dims.rank);
  const Sources sources(memory, work.dims.ranks);
  if (in_last_warp()) {
    const auto chunks = static_cast<unsigned>(work.space.chunks);
    const unsigned first = static_cast<unsigned>(work.dims.experts) + rank * chunks;
    const auto* const matrix = table<std::uint32_t>(work, work.space.matrix);
    for (unsigned s = lane(); s < ranks; s += 32) {
      std::uint32_t all = 0;
#pragma unroll 1
      for (unsigned c = first; c < first + chunks; ++c)
        all += s == rank ? counts.own[c] : __ldcg(matrix + s * counts.columns + c);
      sources.tokens[s] = all;
    }
    __syncwarp();
    place_sources(work.dims, sources);
  }
  describe(work, counts, rooms, sources);
}

// The last block of several has no tokens: it tells the receiver what comes, while the others place.
template <class Index, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    route_kernel(const __grid_constant__ Work work, const __grid_constant__ Shares shares,
                 const Index* topk_idx) {
  extern __shared__ uint4 memory[];
  __shared__ Rooms rooms;
  __shared__ std::uint32_t dispatch;
  __shared__ bool twice;
  bool fails = false;
  std::uint32_t dispatches = 0;
  launch_next_kernel();
  if (threadIdx.x == 0) {
    dispatches = counters(work).dispatches + 1;
    fails = failed_for_thread(work);
    twice = false;
  }
  const unsigned before = blockIdx.x * shares.of_block;
  Tokens<Index, kAlone> tokens(work, shares, topk_idx, before, before + shares.of_block);
  const Marks marks(work, reinterpret_cast<std::uint32_t*>(memory));
  const Counts counts(work, marks.seen + marks.rows, kAlone, work.space.chunks);
  const bool chunked = work.space.chunks > 1;
  const unsigned counted = chunked ? static_cast<unsigned>(work.dims.experts) : marks.rows;
  const bool several = tokens.end - tokens.first > kTile;
#pragma unroll 1
  for (bool placing = false;; placing = true) {
#pragma unroll 1
    for (unsigned tile = tokens.first; tile < tokens.end || (tile == tokens.first && !placing);
         tile += kTile) {
      const bool first = tile == tokens.first;
      if (!placing || several) {
        if (!first || placing) __syncthreads();
        marks.clear();
        __syncthreads();
        if (mark(tokens, marks, tile)) twice = true;
        if (threadIdx.x == 0) dispatch = dispatches;
        if (__syncthreads_or(fails || tokens.wrong)) return refuse(work, topk_idx, tokens.first, tokens.end);
        add_up(marks, counts.own, placing ? 0 : counted, first);
      }
      if (!placing) {
        if (chunked) add_up_chunks(work, marks, counts.own, tile, first);
      } else {
        if (several) __syncthreads();
        place<kAlone>(tokens, marks, counts, rooms, tile, twice);
      }
    }
    if (placing) break;
    if (!exchange<kAlone>(work, counts, rooms, dispatch)) return;
  }
  if (blockIdx.x == gridDim.x - 1) tell_receiver(work, counts, rooms);
}

template <class Index>
const void* route_of(bool alone) {
  return alone ? reinterpret_cast<const void*>(route_kernel<Index, true>)
               : reinterpret_cast<const void*>(route_kernel<Index, false>);
}
const void* route_of(DType index, bool alone) {
  return index == DType::i64 ? route_of<std::int64_t>(alone) : route_of<std::int32_t>(alone);
}

}  // namespace

std::size_t route_shared_bytes(const Space& space) {  // there are no more rows than columns
  return ((2 * kWords + 6) * space.columns + 1) * sizeof(std::uint32_t);
}

std::size_t load_route() {
  int least = std::numeric_limits<int>::max();
  for (const DType index : {DType::i32, DType::i64})
    for (const bool alone : {false, true})
      least = std::min(least, cuda::load_with_shared(route_of(index, alone)).maxDynamicSharedSizeBytes);
  return static_cast<std::size_t>(least);
}

cudaError_t route(const Work& work, const void* topk_idx, DType index, int blocks, cudaStream_t stream) {
  const auto workers = static_cast<unsigned>(blocks > 1 ? blocks - 1 : 1);
  Shares shares(work.dims, (work.tokens + workers - 1) / workers);
  void* parameters[] = {const_cast<Work*>(&work), &shares, const_cast<void**>(&topk_idx)};
  return cudaLaunchKernel(route_of(index, work.dims.ranks == 1), dim3(static_cast<unsigned>(blocks)),
                          dim3(kThreads), parameters, route_shared_bytes(work.space), stream);
}

}  // namespace unisono::moe::gpu
