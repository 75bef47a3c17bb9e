// Dispatch of some tokens to expert_major rows, in one kernel: too many for lines, and few enough that every
// block reads all routes. A block finds out where the rows of its own tokens go, by what all ranks tell, and
// writes them straight to their final places.
#include <cuda_runtime.h>

#include "moe/cuda/at_once.hpp"
#include "moe/cuda/fill.cuh"
#include "moe/cuda/land.cuh"
#include "moe/cuda/low_latency_route.cuh"
#include "moe/cuda/routes.cuh"
#include "moe/cuda/token.cuh"

namespace unisono::moe::gpu {
namespace {

// The items of a block, one after another: a segment of a token is one.
struct Items {
  __device__ explicit Items(const Segments& share) : share(share) {
    const unsigned all = share.items, warps = warps_of_grid();
    const unsigned of_block = (all <= warps ? 1 : (all + warps - 1) / warps) * kWarps;
    first = min(blockIdx.x * of_block, all);
    end = min(first + of_block, all);
    first_token = share.row_of(first);
    tokens_of_block = share.row_of(end + share.each - 1) - first_token;
  }
  const Segments& share;
  unsigned first, end, first_token, tokens_of_block;
};

// The pairs of a block's tokens, in shared memory, each [kMostOfBlock, top_k].
struct Pairs {
  static constexpr std::size_t kMostOfBlock = kTokensOfBlock + 2;  // of which two are other blocks' too
  static std::size_t bytes(const Dims& dims) { return 4 * kMostOfBlock * dims.top_k * sizeof(std::int32_t); }
  __device__ Pairs(const Dims& dims, std::int32_t* memory)
      : experts(memory),
        ranks(experts + kMostOfBlock * dims.top_k),
        numbers(ranks + kMostOfBlock * dims.top_k),
        homes(numbers + kMostOfBlock * dims.top_k) {}
  std::int32_t* experts;
  std::int32_t* ranks;    // the expert's rank, if it is the first of its token there
  std::int32_t* numbers;  // among this rank's pairs of the expert
  std::int32_t* homes;    // as Space::homes, also those for which there is no room
};

// Counts all pairs, and in `before` those of earlier blocks' tokens; notes those of this block. Returns
// whether all are of experts, alike to the block.
template <class Index>
__device__ bool count(const Work& work, const Shares& shares, const Dispatch& dispatch, const Index* topk_idx,
                      const Items& items, const Counts& counts, std::uint32_t* before, const Pairs& pairs) {
  Tokens<Index, false> tokens(work, shares, topk_idx, 0, work.tokens);
  const bool fails = threadIdx.x == kThreads - 1 && device::load_relaxed(&work.status->failed) != 0;
  for (unsigned c = threadIdx.x; c < counts.columns; c += kThreads) counts.own[c] = before[c] = 0;
  __syncthreads();
  const unsigned k = tokens.round.k;
  for (unsigned tile = 0; tile < work.tokens; tile += kTile)
    tokens.each(tile, [&](unsigned token, bool has, int expert) {
      const unsigned rank = tokens.rank_of(expert);
      const bool leads = tokens.leads(expert, rank);
      if (!has) return;
      const auto add = [&](unsigned column) {
        atomicAdd(counts.own + column, 1u);
        if (token < items.first_token) atomicAdd(before + column, 1u);
      };
      if (expert >= 0) add(static_cast<unsigned>(expert));
      if (leads) add(column_of(work, static_cast<int>(rank)));
      if (token - items.first_token >= items.tokens_of_block) return;
      const unsigned i = (token - items.first_token) * k + tokens.round.place;
      pairs.experts[i] = expert;
      pairs.ranks[i] = leads ? static_cast<std::int32_t>(rank) : kNone;
    });
  return all_right(work, dispatch, !tokens.wrong && !fails);
}

// Sets the numbers and homes of the block's pairs. A warp counts the pairs of the rounds before its own one
// by one: they are few.
__device__ void place(const Work& work, const Shares& shares, const Items& items, const std::uint32_t* before,
                      const Pairs& pairs) {
  const Round round(work, shares);
  for (unsigned from = warp_of_block() * round.tokens; from < items.tokens_of_block;
       from += kWarps * round.tokens) {
    const bool has = round.has(from, items.tokens_of_block);
    const unsigned i = (from + round.in_round) * round.k + round.place;
    const std::int32_t expert = has ? pairs.experts[i] : kNone, rank = has ? pairs.ranks[i] : kNone;
    const unsigned same = Alike<4>(expert >= 0, static_cast<unsigned>(expert), shares.expert_bits).same;
    const CopiesOfRound copies(round, rank >= 0, static_cast<unsigned>(rank), shares.rank_bits);
    if (!has) continue;
    std::uint32_t number = gpu::before(same) + (expert < 0 ? 0 : before[expert]);
    std::uint32_t position = gpu::before(copies.there) + (rank < 0 ? 0 : before[column_of(work, rank)]);
#pragma unroll 1
    for (unsigned other = 0; other < from * round.k; ++other) {
      number += pairs.experts[other] == expert ? 1 : 0;
      position += pairs.ranks[other] == rank ? 1 : 0;
    }
    pairs.numbers[i] = static_cast<std::int32_t>(number);
    if (copies.leads) pairs.homes[i - round.place + copies.earlier] = Home::pack(rank, position);
    if (round.place >= copies.all) pairs.homes[i] = kNone;
  }
}

// Returns a token of the block. A warp calls it.
__device__ Token token_of(const Work& work, const Shares& shares, const Counts& counts, const Rooms& rooms,
                          const Pairs& pairs, unsigned in_block) {
  const Dims& d = work.dims;
  const bool has = lane() < static_cast<unsigned>(d.top_k);
  const std::size_t at = std::size_t{in_block} * d.top_k + lane();
  Token token;
  token.expert = has ? pairs.experts[at] : kNone;
  token.rank = token.expert < 0 ? kNone : static_cast<int>(shares.rank_of(token.expert));
  token.place = kNone;
  if (token.expert >= 0) {
    const std::uint32_t place = counts.base[token.expert] + static_cast<std::uint32_t>(pairs.numbers[at]) -
                                counts.begin[token.rank * d.local_experts];
    if (place < d.capacity) token.place = static_cast<std::int32_t>(place);
  }
  token.home = has ? pairs.homes[at] : kNone;
  token.homes = __popc(__ballot_sync(kAllLanes, token.home != kNone));
  token.first_there = rooms.first;
  return token;
}

// Keeps a token in the slot.
__device__ void keep(const Work& work, const Token& token, unsigned number) {
  const auto k = static_cast<unsigned>(work.dims.top_k);
  if (lane() >= k) return;
  const std::size_t at = std::size_t{number} * k + lane();
  table<std::int32_t>(work, work.space.experts)[at] = token.expert;
  table<std::int32_t>(work, work.space.places)[at] = token.place;
  table<std::int32_t>(work, work.space.homes)[at] = token.home;
}

template <class T, MoeScales kScales>
__global__ void __launch_bounds__(kThreads)
    by_expert_kernel(const __grid_constant__ Work work, const __grid_constant__ Dispatch dispatch,
                     const __grid_constant__ Shares shares, const __grid_constant__ Segments share) {
  extern __shared__ std::uint64_t memory[];
  __shared__ Targets all_targets[kWarps];
  __shared__ Rooms rooms;
  const Few few(work, memory, 0);  // no pairs, which are those of the block alone and lie behind
  const Pairs pairs(work.dims, reinterpret_cast<std::int32_t*>(few.own));
  std::uint32_t* const before = few.warps;  // no warp counts by itself
  const Items items(share);
  const Phase phase_to_come(counters(work).phases, true);
  const auto counted = [&](const auto* topk_idx) {
    return count(work, shares, dispatch, topk_idx, items, few.counts, before, pairs);
  };
  if (!(dispatch.wide_index ? counted(static_cast<const std::int64_t*>(dispatch.topk_idx))
                            : counted(static_cast<const std::int32_t*>(dispatch.topk_idx))))
    return;
  for (unsigned c = threadIdx.x; c < few.counts.columns; c += kThreads)
    few.number(few.place_of(c)) = static_cast<std::uint16_t>(few.counts.own[c]);
  if (threadIdx.x == 0) few.number(0) = dispatch.weights ? 1 : 0;
  const std::uint64_t phase = phase_to_come.number();
  const Lines lines = lines_to_tell(work, dispatch);
  tell_few(work, few, phase, lines, blockIdx.x, gridDim.x);
  place(work, shares, items, before, pairs);
  if (!hear_few(work, dispatch, few, phase, lines.end)) return;
  if (!lay_out_few(work, few, rooms)) return;
  Targets& targets = all_targets[warp_of_block()];
  for (unsigned item = items.first + warp_of_block(); item < items.end; item += kWarps) {
    const unsigned number = items.share.row_of(item), segment = items.share.segment_of(item);
    const Token token = token_of(work, shares, few.counts, rooms, pairs, number - items.first_token);
    const int count = find_targets(work, dispatch, token, targets);
    if (segment == 0) {
      keep(work, token, number);
      tell_routes(work, dispatch, token, number);
    }
    send_rows<T, kScales>(work, dispatch, targets, count, number, segment, items.share);
    __syncwarp();
  }
  __syncthreads();  // all warps have set what the tables of experts say
  fill_tables(work, dispatch, few.sources.rows);
  clear_gaps(work, dispatch);
  tell_sent(work, dispatch);
  if (dispatch.lands) land_rows(work, dispatch, targets, few.sources.rows);
}

const void* kernel_of(const Dims& dims) {
  return by_form(dims, []<class T, MoeScales kScales>(Form<T, kScales>) {
    return reinterpret_cast<const void*>(by_expert_kernel<T, kScales>);
  });
}

}  // namespace

AtOnce at_once_by_expert(const Dims& dims, const Space& space) {
  return {kernel_of(dims), Few::bytes(dims, space, 0) + Pairs::bytes(dims)};
}

}  // namespace unisono::moe::gpu
