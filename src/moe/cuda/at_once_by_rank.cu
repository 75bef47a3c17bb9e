// Dispatch of some tokens to flat or rank_major rows, in one kernel: too many for lines, and few enough that
// every block reads all routes. Where rows go follows from the ranks of all experts alone: most blocks find
// out no more, and write their tokens' rows straight to their final places. The last block meanwhile counts
// the pairs of each expert, and sets the tables.
#include "moe/cuda/at_once.hpp"
#include "moe/cuda/fill.cuh"
#include "moe/cuda/land.cuh"
#include "moe/cuda/low_latency_route.cuh"
#include "moe/cuda/routes.cuh"
#include "moe/cuda/token.cuh"

namespace unisono::moe::gpu {
namespace {

// Which tokens go to each rank: a bit for each, in shared memory.
struct Goes {
  static constexpr unsigned kWords = kTokensAtOnce / 32 + 1;  // of a rank; the last one stays empty
  static std::size_t bytes(const Dims& dims) {
    return static_cast<std::size_t>(dims.ranks) * kWords * sizeof(std::uint32_t);
  }
  // All threads of a block call it, and meet before a token is added.
  __device__ void clear(unsigned ranks) const {
    for (unsigned i = threadIdx.x; i < ranks * kWords; i += kThreads) words[i] = 0;
  }
  __device__ void add(unsigned rank, unsigned token) const {
    atomicOr(words + rank * kWords + token / 32, 1u << token % 32);
  }
  __device__ bool has(unsigned rank, unsigned token) const {
    return (words[rank * kWords + token / 32] >> token % 32 & 1) != 0;
  }
  // Returns how many tokens before `end` go to a rank.
  __device__ unsigned before(unsigned rank, unsigned end) const {
    const std::uint32_t* const of = words + rank * kWords;
    auto all = static_cast<unsigned>(__popc(of[end / 32] & ((1u << end % 32) - 1)));
#pragma unroll 4
    for (unsigned w = 0; w < end / 32; ++w) all += static_cast<unsigned>(__popc(of[w]));
    return all;
  }
  std::uint32_t* words;  // [ranks, kWords]
};

// Finds out which tokens go to each rank. loaded: this lane's expert of the first round. Returns whether all
// pairs are of experts, alike to the block.
__device__ bool find_ranks(const Work& work, const Shares& shares, const Dispatch& dispatch, const Goes& goes,
                           const Rounds& rounds, Entry loaded) {
  const bool fails = threadIdx.x == kThreads - 1 && device::load_relaxed(&work.status->failed) != 0;
  goes.clear(static_cast<unsigned>(work.dims.ranks));
  __syncthreads();
  const bool right = rounds.each(work, dispatch, loaded, [&](unsigned from, bool has, unsigned expert) {
    const unsigned rank = shares.rank_of(static_cast<int>(expert));
    const unsigned same = Alike<1>(has, rank, shares.rank_bits).same;
    if (has && before(same & rounds.round.its) == 0) goes.add(rank, from + rounds.round.in_round);
  });
  return all_right(work, dispatch, right && !fails);
}

// Lists the rows to which a token goes, by rank, and where those of x lie. Returns how many there are. A warp
// calls it.
__device__ int find_copies(const Work& work, const Payload& x, const Few& few, const Goes& goes,
                           unsigned token, Targets& targets) {
  const Dims& d = work.dims;
  const auto ranks = static_cast<unsigned>(d.ranks), self = static_cast<unsigned>(d.rank);
  const bool packed = d.layout == MoeLayout::flat;
  unsigned count = 0;
  for (unsigned first = 0; first < ranks; first += 32) {
    const unsigned rank = first + lane();
    bool sends = rank < ranks && goes.has(rank, token);
    std::uint32_t row = self * static_cast<unsigned>(d.max_tokens);
    if (sends) {
      if (packed) row = 0;
#pragma unroll 4
      for (unsigned s = 0; packed && s < self; ++s) row += few.tokens_told(s, rank);
      row += goes.before(rank, token);
      sends = !packed || row < d.capacity;
    }
    const unsigned all = __ballot_sync(kAllLanes, sends);
    if (sends) {
      const Target target{static_cast<int>(rank), static_cast<std::int32_t>(row)};
      targets.of[count + before(all)] = target;
      targets.at[count + before(all)] = at<byte>(work, target.rank, x.to) + std::size_t{row} * x.bytes;
    }
    count += static_cast<unsigned>(__popc(all));
  }
  __syncwarp();
  return static_cast<int>(count);
}

// The items of a warp that sends this rank's tokens: segments of rows. What does not depend on where a row
// goes is loaded ahead.
template <class T, MoeScales kScales>
struct Sending {
  __device__ Sending(const Work& work, const Dispatch& dispatch, const Segments& share)
      : work(work),
        dispatch(dispatch),
        share(share),
        senders(senders_by_rank(gridDim.x)),
        item(blockIdx.x < senders ? spread_warp(blockIdx.x, senders) : share.items) {
    load();
  }
  // Loads the item's experts, and the first words of its row if that goes as it is.
  __device__ void load() {
    if (item >= share.items) return;
    number = share.row_of(item), segment = share.segment_of(item);
    const auto k = static_cast<unsigned>(work.dims.top_k);
    const Payload& x = dispatch.payloads.of[0];
    copies = kScales == MoeScales::none && x.word == sizeof(uint4);
    if (copies) row = {x.from + std::size_t{number} * x.bytes, x.bytes, segment, share};
    entry = {};
    if (segment > 0 || lane() >= k) return;
    entry.load(dispatch, number * k + lane());
    if (dispatch.weights) weight = dispatch.weights[number * k + lane()];
  }
  // Sends the items, and tells the receivers the tokens' experts.
  __device__ void run(const Shares& shares, const Few& few, const Goes& goes, Targets& targets) {
    for (; item < share.items; item += senders * kWarps, load()) {
      const int count = find_copies(work, dispatch.payloads.of[0], few, goes, number, targets);
      if (copies) {
        row.store(targets.at, count);
        copy_payloads(work, dispatch, targets, count, 1, number, segment, share);
      } else {
        send_rows<T, kScales>(work, dispatch, targets, count, number, segment, share);
      }
      if (segment == 0) {
        const auto expert = static_cast<int>(entry.of(dispatch));
        const int rank = expert < 0 ? kNone : static_cast<int>(shares.rank_of(expert));
        for (int c = 0; c < count; ++c) tell_row(work, dispatch, targets.of[c], expert, rank, weight);
      }
      __syncwarp();
    }
  }
  const Work& work;
  const Dispatch& dispatch;
  const Segments& share;
  unsigned senders, item, number = 0, segment = 0;
  RowCopy<uint4> row;
  bool copies = false;
  Entry entry;  // this lane's of the token, and its weight
  float weight = 0;
};

// Sets what the ranks' tables say of this rank's pairs, and keeps the routing in the slot. One block calls
// it, which has laid out what comes.
__device__ void set_pairs(const Work& work, const Shares& shares, const Few& few, const Rooms& rooms,
                          const Rounds& rounds) {
  const Dims& d = work.dims;
  for (unsigned from = rounds.first; from < rounds.end; from += rounds.round.tokens) {
    if (!rounds.round.has(from, rounds.end)) continue;
    const unsigned i = rounds.pair(from);
    const std::uint32_t pair = few.pairs[i];
    const int expert = pair == kMasked ? kNone : static_cast<int>(pair >> 16);
    table<std::int32_t>(work, work.space.experts)[i] = expert;
    if (expert < 0 || d.drop) continue;  // with drop the receiver sorts
    const auto rank = static_cast<int>(shares.rank_of(expert));
    const std::int32_t* home = few.homes + (i - rounds.round.place);
    while (Home(*home).rank != rank) ++home;
    const std::uint32_t place =
        few.counts.base[expert] + (pair & 0xffffu) - few.counts.begin[rank * d.local_experts];
    table<std::int32_t>(work, rank, work.space.expert_rows)[place] =
        static_cast<std::int32_t>(rooms.first[rank]) + Home(*home).position;
  }
  keep_homes(work, few, rooms);
}

// Sets the tables of what comes and of what goes, in one block. rounds, loaded: as count_routes takes them.
// Returns whether the call goes on.
__device__ bool set_tables(const Work& work, const Dispatch& dispatch, const Shares& shares, const Few& few,
                           Rooms& rooms, const Rounds& rounds, Entry loaded, const Phase& phase_to_come,
                           unsigned first_line) {
  if (!count_routes(work, shares, dispatch, few, rounds, loaded)) return false;
  const std::uint64_t phase = phase_to_come.number();
  const Lines all = lines_to_tell(work, dispatch);
  tell_few(work, few, phase, {first_line, all.end}, 0, 1);
  place_pairs(work, few, rounds);
  if (!hear_few(work, dispatch, few, phase, all.end) || !lay_out_few(work, few, rooms)) return false;
  set_pairs(work, shares, few, rooms, rounds);
  return true;
}

template <class T, MoeScales kScales>
__global__ void __launch_bounds__(kThreads)
    by_rank_kernel(const __grid_constant__ Work work, const __grid_constant__ Dispatch dispatch,
                   const __grid_constant__ Shares shares, const __grid_constant__ Segments share) {
  extern __shared__ std::uint64_t memory[];
  __shared__ Targets all_targets[kWarps];
  __shared__ Rooms rooms;
  const unsigned senders = senders_by_rank(gridDim.x);
  const bool sends = blockIdx.x < senders, sets = blockIdx.x == gridDim.x - 1;
  const auto rank_lines = static_cast<unsigned>(work.space.rank_lines);
  const Rounds rounds(work, shares);
  const Entry loaded = rounds.load(dispatch, rounds.first);
  const Phase phase_to_come(counters(work).phases, true);
  const Few few(work, memory, work.space.at_once_tokens);
  if (threadIdx.x == 0) few.number(0) = dispatch.weights ? 1 : 0;
  if (sets &&
      !set_tables(work, dispatch, shares, few, rooms, rounds, loaded, phase_to_come, sends ? 0 : rank_lines))
    return;
  if (sends) {
    const Goes goes{few.own + work.space.at_once_tokens};
    if (!find_ranks(work, shares, dispatch, goes, rounds, loaded)) return;
    std::uint64_t phase = 0;
    if (!sets) {
      for (unsigned r = threadIdx.x; blockIdx.x < few.ranks && r < few.ranks; r += kThreads)
        few.number(1 + r) = static_cast<std::uint16_t>(goes.before(r, work.tokens));
      phase = phase_to_come.number();
      tell_few(work, few, phase, {0, rank_lines}, blockIdx.x, senders);
    }
    Sending<T, kScales> sending(work, dispatch, share);
    if (!sets && !hear_few(work, dispatch, few, phase, rank_lines)) return;
    sending.run(shares, few, goes, all_targets[warp_of_block()]);
  }
  if (work.dims.layout == MoeLayout::rank_major) {
    __syncthreads();  // the last warp has found the sources
    fill_rest(work, few.sources.rows);
  }
  tell_sent(work, dispatch);
  if (dispatch.lands) await_rows(work);
}

const void* kernel_of(const Dims& dims) {
  return by_form(dims, []<class T, MoeScales kScales>(Form<T, kScales>) {
    return reinterpret_cast<const void*>(by_rank_kernel<T, kScales>);
  });
}

}  // namespace

AtOnce at_once_by_rank(const Dims& dims, const Space& space) {
  return {kernel_of(dims), Few::bytes(dims, space, space.at_once_tokens) + Goes::bytes(dims)};
}

}  // namespace unisono::moe::gpu
