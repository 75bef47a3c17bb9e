// Routes that every block reads: each finds out alone where all rows go, so that blocks need not meet.
#pragma once

#include "moe/cuda/counts.cuh"
#include "moe/cuda/lines.cuh"
#include "moe/cuda/routes.cuh"

namespace unisono::moe::gpu {

inline constexpr std::uint32_t kMasked = ~0u;  // of a pair without an expert

// The knowledge of a block, in shared memory: of this rank's tokens, then of what comes.
struct Few {
  // A rank's message: numbers of 16 bits. Its first lines tell whether the rank's tokens have weights, and
  // how many go to each rank; the others, the pairs of each expert. It has as many words as its lines.
  __host__ __device__ static std::size_t words(const Space& space) { return space.told_lines * kWordsOfLine; }
  // most: tokens for which there is room.
  __host__ __device__ static std::size_t bytes(const Dims& dims, const Space& space, std::size_t most) {
    const auto ranks = static_cast<std::size_t>(dims.ranks);
    const std::size_t pairs = most * static_cast<std::size_t>(dims.top_k);
    return (ranks + 1) * words(space) * sizeof(std::uint64_t) +
           ((kWarps + 5) * columns_of(dims, 1) + 1 + static_cast<std::size_t>(dims.experts) + 2 * pairs +
            4 * ranks + most) *
               sizeof(std::uint32_t);
  }

  __device__ Few(const Work& work, std::uint64_t* memory, std::size_t room)
      : ranks(static_cast<unsigned>(work.dims.ranks)),
        stride(static_cast<unsigned>(words(work.space))),
        first_expert(static_cast<unsigned>(work.space.rank_lines * kWordsOfLine * kNumbersOfWord)),
        told(memory),
        message(told + ranks * stride),
        warps(reinterpret_cast<std::uint32_t*>(message + stride)),
        counts(work, warps + kWarps * static_cast<unsigned>(columns_of(work.dims, 1)), false, 1),
        starts(counts.begin + work.dims.experts + 1),
        pairs(starts + work.dims.experts),
        homes(reinterpret_cast<std::int32_t*>(pairs + pairs_of(work, room))),
        weighted(reinterpret_cast<std::uint32_t*>(homes + pairs_of(work, room))),
        sources(weighted + ranks, work.dims.ranks),
        own(sources.first_rows + ranks) {}
  // Returns where a message has a column's number.
  __device__ unsigned place_of(unsigned column) const {
    const unsigned experts = counts.columns - ranks;
    return column < experts ? first_expert + column : 1 + column - experts;
  }
  __device__ std::uint16_t& number(unsigned place) const {
    return reinterpret_cast<std::uint16_t*>(message)[place];
  }
  // Returns a number that a rank has told.
  __device__ std::uint32_t told_by(unsigned rank, unsigned place) const {
    return reinterpret_cast<const std::uint16_t*>(told + rank * stride)[place];
  }
  __device__ std::uint32_t tokens_told(unsigned from, unsigned to) const { return told_by(from, 1 + to); }

  unsigned ranks;
  unsigned stride;         // words of a message
  unsigned first_expert;   // its place in a message
  std::uint64_t* told;     // [ranks, words]
  std::uint64_t* message;  // [words]: this rank's
  std::uint32_t* warps;    // [kWarps, columns]: of each warp; then of the warps before it
  Counts counts;
  std::uint32_t* starts;    // [ranks, local experts]: the first pair of each source and expert here
  std::uint32_t* pairs;     // [room, top_k]: expert << 16 | number among this rank's for the expert
  std::int32_t* homes;      // [room, top_k]: as Space::homes, also those for which there is no room
  std::uint32_t* weighted;  // [ranks]
  Sources sources;
  std::uint32_t* own;  // [room]: those of this rank that have a copy here, by position

 private:
  __device__ static unsigned pairs_of(const Work& work, std::size_t tokens) {
    return static_cast<unsigned>(tokens) * static_cast<unsigned>(work.dims.top_k);
  }
};

// The lines of a message, from first to end.
struct Lines {
  unsigned first, end;
};

// Returns those that a dispatch needs: of a routing that is kept, that which tells of weights.
__device__ inline Lines lines_to_tell(const Work& work, const Dispatch& dispatch) {
  return {0, dispatch.routed ? 1 : static_cast<unsigned>(work.space.told_lines)};
}

// Returns the column of a rank's tokens.
__device__ inline unsigned column_of(const Work& work, int rank) {
  return static_cast<unsigned>(work.dims.experts + rank);
}

// An entry of topk_idx, on its way: a conversion would wait for it.
struct Entry {
  __device__ void load(const Dispatch& dispatch, unsigned pair) {
    if (dispatch.wide_index) wide = static_cast<const std::int64_t*>(dispatch.topk_idx)[pair];
    else narrow = static_cast<const std::int32_t*>(dispatch.topk_idx)[pair];
  }
  // Returns the entry, which may be no expert.
  __device__ std::int64_t of(const Dispatch& dispatch) const { return dispatch.wide_index ? wide : narrow; }
  std::int64_t wide = kNone;
  std::int32_t narrow = kNone;
};

// The tokens of a warp, in rounds.
struct Rounds {
  __device__ Rounds(const Work& work, const Shares& shares)
      : round(work, shares), of_warp(round.tokens), tokens(work.tokens) {
    while (kWarps * of_warp < tokens) of_warp += round.tokens;
    first = min(warp_of_block() * of_warp, tokens);
    end = min(first + of_warp, tokens);
  }
  // Returns the warps that have tokens.
  __device__ unsigned warps() const {
    unsigned all = 0;
    for (unsigned from = 0; from < tokens; from += of_warp) ++all;
    return all;
  }
  // Returns this lane's pair in the round that begins with token `from`.
  __device__ unsigned pair(unsigned from) const { return (from + round.in_round) * round.k + round.place; }
  // Loads its expert.
  __device__ Entry load(const Dispatch& dispatch, unsigned from) const {
    Entry entry;
    if (round.has(from, end)) entry.load(dispatch, pair(from));
    return entry;
  }
  // Calls `take` with each round's first token, whether this lane has an expert there, and which one, or 0.
  // loaded: that of the first round. Returns whether all entries are experts, for this thread.
  template <class Take>
  __device__ bool each(const Work& work, const Dispatch& dispatch, Entry loaded, const Take& take) const {
    bool right = true;
#pragma unroll 1
    for (unsigned from = first; from < end; from += round.tokens) {
      const std::int64_t read = loaded.of(dispatch);
      loaded = load(dispatch, from + round.tokens);
      right = right && read >= -1 && read < work.dims.experts;
      const bool has = read >= 0 && read < work.dims.experts;
      take(from, has, has ? static_cast<unsigned>(read) : 0u);
    }
    return right;
  }
  Round round;
  unsigned of_warp, tokens, first, end;
};

// Counts the pairs and copies by warps, and numbers those of this warp: in few.pairs and few.homes. loaded:
// this lane's expert of the first round. Returns whether all are experts, for this thread.
__device__ inline bool count_pairs(const Work& work, const Shares& shares, const Dispatch& dispatch,
                                   const Few& few, const Rounds& rounds, Entry loaded) {
  std::uint32_t* const columns = few.warps + warp_of_block() * few.counts.columns;
  if (rounds.first < rounds.end)
    for (unsigned c = lane(); c < few.counts.columns; c += 32) columns[c] = 0;
  __syncwarp();
  return rounds.each(work, dispatch, loaded, [&](unsigned from, bool has, unsigned expert) {
    const unsigned rank = shares.rank_of(static_cast<int>(expert));
    const unsigned same = Alike<4>(has, expert, shares.expert_bits).same;
    const CopiesOfRound copies(rounds.round, has, rank, shares.rank_bits);
    std::uint32_t* const of_rank = columns + column_of(work, static_cast<int>(rank));
    const std::uint32_t number = columns[expert] + before(same), position = *of_rank + before(copies.there);
    __syncwarp();
    if (has && before(same) == 0) columns[expert] = number + __popc(same);
    if (copies.leads && before(copies.there) == 0) *of_rank = position + __popc(copies.there);
    __syncwarp();
    const unsigned pair = rounds.pair(from), place = rounds.round.place;
    if (!rounds.round.has(from, rounds.end)) return;
    few.pairs[pair] = has ? expert << 16 | number : kMasked;
    if (copies.leads) few.homes[pair - place + copies.earlier] = Home::pack(static_cast<int>(rank), position);
    if (place >= copies.all) few.homes[pair] = kNone;
  });
}

// Leaves in each warp's counts those of the warps before it, and in the message those of all.
__device__ inline void sum_few(const Few& few, unsigned warps) {
  for (unsigned c = threadIdx.x; c < few.counts.columns; c += kThreads) {
    std::uint32_t sum = 0;
#pragma unroll 4
    for (unsigned w = 0; w < warps; ++w) {
      std::uint32_t& of_warp = few.warps[w * few.counts.columns + c];
      const std::uint32_t its = of_warp;
      of_warp = sum;
      sum += its;
    }
    few.number(few.place_of(c)) = static_cast<std::uint16_t>(sum);
  }
}

// Numbers the pairs and copies of this warp among those of all.
__device__ inline void place_pairs(const Work& work, const Few& few, const Rounds& rounds) {
  const std::uint32_t* const columns = few.warps + warp_of_block() * few.counts.columns;
  for (unsigned from = rounds.first; from < rounds.end; from += rounds.round.tokens) {
    if (!rounds.round.has(from, rounds.end)) continue;
    const unsigned pair = rounds.pair(from);
    if (const std::uint32_t its = few.pairs[pair]; its != kMasked) few.pairs[pair] = its + columns[its >> 16];
    const std::int32_t packed = few.homes[pair];
    if (packed == kNone) continue;
    const Home home(packed);
    const std::uint32_t position =
        columns[column_of(work, home.rank)] + static_cast<std::uint32_t>(home.position);
    few.homes[pair] = Home::pack(home.rank, position);
    if (home.rank == work.dims.rank) few.own[position] = from + rounds.round.in_round;
  }
}

// Returns to all threads of a block whether the call goes on: whether no thread has found what is not right,
// as a pair of no expert.
__device__ inline bool all_right(const Work& work, const Dispatch& dispatch, bool right) {
  if (__syncthreads_and(right) != 0) return true;
  if (failed(work)) return false;
  if (dispatch.wide_index) refuse(work, static_cast<const std::int64_t*>(dispatch.topk_idx), 0, work.tokens);
  else refuse(work, static_cast<const std::int32_t*>(dispatch.topk_idx), 0, work.tokens);
  return false;
}

// Counts this rank's routes. All threads of a block call it, and have the same answer: whether the call goes
// on. They meet before they read the message.
__device__ inline bool count_routes(const Work& work, const Shares& shares, const Dispatch& dispatch,
                                    const Few& few, const Rounds& rounds, Entry loaded) {
  const bool fails = threadIdx.x == kThreads - 1 && device::load_relaxed(&work.status->failed) != 0;
  const bool right = count_pairs(work, shares, dispatch, few, rounds, loaded);
  if (!all_right(work, dispatch, right && !fails)) return false;
  sum_few(few, rounds.warps());
  return true;
}

// Tells ranks, also this one, what this rank has counted, and that it has begun the phase: every stride-th
// rank, from the first-th after this one on.
__device__ inline void tell_few(const Work& work, const Few& few, std::uint64_t phase, Lines lines,
                                unsigned first, unsigned stride) {
  const auto ranks = static_cast<unsigned>(work.dims.ranks), rank = static_cast<unsigned>(work.dims.rank);
  const unsigned steps = (lines.end - lines.first + kLinesOfWarp - 1) / kLinesOfWarp;
  for (unsigned i = first, step = warp_of_block(); steps > 0; step += kWarps) {
    for (; step >= steps; step -= steps) i += stride;
    if (i >= ranks) break;
    const unsigned peer = rank + 1 + i < ranks ? rank + 1 + i : rank + 1 + i - ranks;
    byte* const there = at<byte>(work, static_cast<int>(peer), work.space.told_of(phase)) +
                        rank * static_cast<unsigned>(work.space.told_lines * kLine);
    const unsigned line = lines.first + line_of(step), w = word_of(line);
    __syncwarp();
    if (line < lines.end)
      cuda::store_packet(packet_of(there, line), {few.message[w], ends_line() ? phase : few.message[w + 1]});
  }
}

// Waits for the first lines of what all ranks tell. The last warp then knows where each source's rows go
// here, as the block does once it has met. All threads of a block call it, and have the same answer.
__device__ inline bool hear_few(const Work& work, const Dispatch& dispatch, const Few& few,
                                std::uint64_t phase, unsigned lines) {
  const auto ranks = static_cast<unsigned>(work.dims.ranks);
  const unsigned steps = (lines + kLinesOfWarp - 1) / kLinesOfWarp;
  bool heard = true;
  for (unsigned source = 0, step = warp_of_block(); heard; step += kWarps) {
    for (; step >= steps; step -= steps) ++source;
    if (source >= ranks) break;
    const unsigned line = line_of(step);
    byte* const told = mine<byte>(work, work.space.told_of(phase)) +
                       source * static_cast<unsigned>(work.space.told_lines * kLine);
    Packet* const places[1] = {line < lines ? packet_of(told, line) : nullptr};
    Packet packets[1];
    heard = take_lines(work, places, phase, Told::begun, static_cast<int>(source), packets);
    if (!places[0] || !heard) continue;
    std::uint64_t* const words = few.told + source * few.stride + word_of(line);
    words[0] = packets[0].low;
    if (!ends_line()) words[1] = packets[0].high;
  }
  if (__syncthreads_and(heard) == 0) return false;
  if (!in_last_warp()) return true;
  for (unsigned s = lane(); s < ranks; s += 32) {
    few.weighted[s] = few.told_by(s, 0);
    if (blockIdx.x == 0) table<std::uint32_t>(work, work.space.weighted)[s] = few.weighted[s];
    if (!dispatch.routed) few.sources.tokens[s] = few.tokens_told(s, static_cast<unsigned>(work.dims.rank));
  }
  if (dispatch.routed) return true;
  __syncwarp();
  place_sources(work.dims, few.sources);
  return true;
}

// Sums what the ranks have told. A thread has the same experts in scan_experts.
__device__ inline void sum_told(const Work& work, const Few& few) {
  const Dims& d = work.dims;
  for (unsigned c = threadIdx.x; c < few.counts.columns; c += kThreads) {
    std::uint32_t sum = 0, earlier = 0;
    const unsigned place = few.place_of(c);
#pragma unroll 2
    for (int s = 0; s < d.ranks; ++s) {
      const std::uint32_t its = few.told_by(static_cast<unsigned>(s), place);
      earlier += s < d.rank ? its : 0;
      sum += its;
    }
    few.counts.all[c] = sum;
    few.counts.earlier[c] = earlier;
    few.counts.base[c] = 0;
  }
}

// Sets where each source's pairs go here. Requires: experts have been scanned.
__device__ inline void find_starts(const Work& work, const Few& few) {
  const Dims& d = work.dims;
  const auto first = static_cast<unsigned>(d.first_expert()), local = static_cast<unsigned>(d.local_experts);
  for (unsigned e = threadIdx.x; e < local; e += kThreads) {
    std::uint32_t next = few.counts.begin[first + e] - few.counts.begin[first];
#pragma unroll 2
    for (unsigned s = 0; s < static_cast<unsigned>(d.ranks); ++s) {
      few.starts[s * local + e] = next;
      next += few.told_by(s, few.place_of(first + e));
    }
  }
}

// Finds out where all that comes belongs, and sets the tables of it. All threads of a block call it, and have
// the same answer: whether all ranks have room.
__device__ inline bool lay_out_few(const Work& work, const Few& few, Rooms& rooms) {
  const Dims& d = work.dims;
  sum_told(work, few);
  scan_experts(work, few.counts);
  const bool full = find_rooms(work, few.counts, rooms);
  if (!has_room(work, full, rooms)) return false;
  if (blockIdx.x == gridDim.x - 1) describe(work, few.counts, rooms, few.sources);
  else if (d.expert_major()) describe_experts(work, few.counts);  // the same of all blocks, which read it
  return true;
}

// Returns whether there is room for a copy of a token.
__device__ inline bool fits(const Dims& d, const Rooms& rooms, std::int32_t packed) {
  if (packed == kNone || d.layout != MoeLayout::flat) return packed != kNone;
  const Home home(packed);
  return rooms.first[home.rank] + static_cast<std::uint32_t>(home.position) < d.capacity;
}

// Keeps the homes of all tokens in the slot.
__device__ inline void keep_homes(const Work& work, const Few& few, const Rooms& rooms) {
  const auto k = static_cast<unsigned>(work.dims.top_k);
  auto* const kept = table<std::int32_t>(work, work.space.homes);
  if (!work.dims.drop) {  // there is room for all
    for (unsigned i = threadIdx.x; i < work.tokens * k; i += kThreads) kept[i] = few.homes[i];
    return;
  }
  for (unsigned token = threadIdx.x; token < work.tokens; token += kThreads) {
    unsigned next = token * k, end = next + k;
    for (unsigned i = next; i < end && few.homes[i] != kNone; ++i)
      if (fits(work.dims, rooms, few.homes[i])) kept[next++] = few.homes[i];
    while (next < end) kept[next++] = kNone;
  }
}

// Sets the same of a routing that is kept.
__device__ inline void load_few(const Work& work, const Few& few) {
  const Dims& d = work.dims;
  for (int s = static_cast<int>(threadIdx.x); s < d.ranks; s += kThreads) {
    few.sources.rows[s] = static_cast<std::uint32_t>(table<std::int32_t>(work, work.space.source_rows)[s]);
    few.sources.first_rows[s] =
        static_cast<std::uint32_t>(table<std::int32_t>(work, work.space.first_rows)[s]);
  }
  for (std::size_t i = threadIdx.x; i < std::size_t{work.tokens} * d.top_k; i += kThreads) {
    const std::int32_t packed = table<std::int32_t>(work, work.space.homes)[i];
    const Home home(packed);
    few.homes[i] = packed;
    few.pairs[i] = kMasked;
    if (packed != kNone && home.rank == d.rank)
      few.own[home.position] = static_cast<std::uint32_t>(i) / static_cast<unsigned>(d.top_k);
  }
}

}  // namespace unisono::moe::gpu
