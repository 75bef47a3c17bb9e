// Routes that every block reads: each finds out alone where all rows go, so that blocks need not meet.
#pragma once

#include "moe/cuda/counts.cuh"
#include "moe/cuda/lines.cuh"

namespace unisono::moe::gpu {

inline constexpr std::uint32_t kMasked = ~0u;  // of a pair without an expert

// What a block knows, in shared memory: of this rank's tokens, then of what comes.
struct Few {
  // A rank's message: numbers of 16 bits, first whether its tokens have weights, then its columns. It has as
  // many as fill its lines.
  __device__ static std::size_t numbers(const Space& space) { return space.told_lines * kWordsOfLine * 4; }
  // most: tokens for which there is room.
  __host__ __device__ static std::size_t bytes(const Dims& dims, const Space& space, std::size_t most) {
    const auto ranks = static_cast<std::size_t>(dims.ranks);
    const std::size_t pairs = most * static_cast<std::size_t>(dims.top_k);
    return ranks * space.told_lines * kWordsOfLine * 8 +
           ((kWarps + 5) * space.columns + 1 + static_cast<std::size_t>(dims.experts) + 2 * pairs +
            4 * ranks + most) *
               sizeof(std::uint32_t);
  }

  __device__ Few(const Work& work, std::uint64_t* memory, std::size_t most)
      : told(memory),
        warps(reinterpret_cast<std::uint32_t*>(memory +
                                               work.dims.ranks * work.space.told_lines * kWordsOfLine)),
        counts(work, warps + kWarps * work.space.columns, false),
        starts(counts.begin + work.dims.experts + 1),
        pairs(starts + work.dims.experts),
        homes(reinterpret_cast<std::int32_t*>(pairs + most * work.dims.top_k)),
        tokens(reinterpret_cast<std::uint32_t*>(homes + most * work.dims.top_k)),
        rows(tokens + work.dims.ranks),
        first_rows(rows + work.dims.ranks),
        weighted(first_rows + work.dims.ranks),
        own(weighted + work.dims.ranks) {}

  std::uint64_t* told;   // [ranks, numbers]
  std::uint32_t* warps;  // [kWarps, columns]: of each warp; then of the warps before it
  Counts counts;
  std::uint32_t* starts;      // [ranks, local experts]: the first pair of each source and expert here
  std::uint32_t* pairs;       // [most, top_k]: expert << 16 | number among this rank's for the expert
  std::int32_t* homes;        // [most, top_k]: as Space::homes, also those for which there is no room
  std::uint32_t* tokens;      // [ranks]: that each source has for this rank
  std::uint32_t* rows;        // [ranks]: for which there is room
  std::uint32_t* first_rows;  // [ranks]
  std::uint32_t* weighted;    // [ranks]
  std::uint32_t* own;         // [most]: those of this rank that have a copy here, by position
};

// Returns the column of a rank's tokens. They are one chunk.
__device__ inline unsigned column_of(const Work& work, int rank) {
  return static_cast<unsigned>(work.dims.experts + rank * work.space.chunks);
}

// The tokens of a warp, in rounds of as many whole tokens as a warp has lanes for.
struct Rounds {
  __device__ explicit Rounds(const Work& work) : tokens(work.tokens), k(work.dims.top_k) {
    const unsigned of_round = 32 / k, all = (tokens + of_round - 1) / of_round;
    each = max(1u, (all + kWarps - 1) / kWarps);
    warps = (all + each - 1) / each;
    first = min(warp_of_block() * each, all);
    end = min(first + each, all);
    in_round = lane() / k;
    takes = in_round < of_round;
  }
  __device__ unsigned token(unsigned round) const { return round * (32 / k) + in_round; }
  __device__ bool has(unsigned round) const { return takes && token(round) < tokens; }
  __device__ std::size_t pair(unsigned round) const { return std::size_t{token(round)} * k + lane() % k; }
  // Returns this lane's expert of a round, which may be no expert.
  __device__ std::int64_t load(const Dispatch& dispatch, unsigned round) const {
    if (round >= end || !has(round)) return kNone;
    return dispatch.wide_index ? static_cast<const std::int64_t*>(dispatch.topk_idx)[pair(round)]
                               : static_cast<const std::int32_t*>(dispatch.topk_idx)[pair(round)];
  }
  unsigned tokens, k, each, warps, first, end, in_round;
  bool takes;
};

// Returns the lanes that have this lane's number, if it has one.
__device__ inline unsigned lanes_with(bool has, unsigned number) {
  return __match_any_sync(kAllLanes, has ? number : 0x80000000u | lane());
}
__device__ inline unsigned before(unsigned lanes) { return __popc(lanes & ((1u << lane()) - 1)); }
// Returns whether this is the first of its token's experts at that rank.
__device__ inline bool leads(const Rounds& rounds, bool has, int rank) {
  const unsigned lanes = lanes_with(has, rounds.in_round << 8 | static_cast<unsigned>(rank));
  return has && before(lanes) == 0;
}

// Reads the experts into few.pairs, and counts by warps. first: what the first round has loaded. Returns
// whether all are experts, for this thread.
__device__ inline bool count_pairs(const Work& work, const Dispatch& dispatch, const Few& few,
                                   const Rounds& rounds, std::int64_t first) {
  const Dims& d = work.dims;
  std::uint32_t* const columns = few.warps + warp_of_block() * few.counts.columns;
  std::int64_t next = first;
  bool right = true;
  for (unsigned round = rounds.first; round < rounds.end; ++round) {
    const std::int64_t read = next;
    next = rounds.load(dispatch, round + 1);
    int expert = static_cast<int>(read);
    if (read < -1 || read >= d.experts) {
      report(work, Problem::index, rounds.token(round), static_cast<std::uint32_t>(read),
             static_cast<std::uint32_t>(d.experts));
      right = false;
      expert = kNone;
    }
    const int rank = expert < 0 ? 0 : d.rank_of(expert);
    if (rounds.has(round)) few.pairs[rounds.pair(round)] = static_cast<std::uint32_t>(expert);
    if (expert >= 0) atomicAdd(columns + expert, 1u);
    if (leads(rounds, expert >= 0, rank)) atomicAdd(columns + column_of(work, rank), 1u);
  }
  return right;
}

// Leaves in each warp's counts those of the warps before it.
__device__ inline void sum_few(const Few& few, unsigned warps) {
  for (std::size_t c = threadIdx.x; c < few.counts.columns; c += kThreads) {
    std::uint32_t sum = 0;
#pragma unroll 1
    for (unsigned w = 0; w < warps; ++w) {
      std::uint32_t& of_warp = few.warps[w * few.counts.columns + c];
      const std::uint32_t its = of_warp;
      of_warp = sum;
      sum += its;
    }
    few.counts.own[c] = sum;
  }
}

// Returns a lane's place in its column, and counts it.
__device__ inline std::uint32_t take_few(std::uint32_t* columns, bool has, unsigned column) {
  const unsigned lanes = lanes_with(has, column);
  const std::uint32_t place = has ? columns[column] + before(lanes) : 0;
  __syncwarp();
  if (has && before(lanes) == 0) columns[column] += __popc(lanes);
  __syncwarp();
  return place;
}

// Sets few.pairs and few.homes.
__device__ inline void place_pairs(const Work& work, const Few& few, const Rounds& rounds) {
  const Dims& d = work.dims;
  std::uint32_t* const columns = few.warps + warp_of_block() * few.counts.columns;
  for (unsigned round = rounds.first; round < rounds.end; ++round) {
    const bool has = rounds.has(round);
    const int expert = has ? static_cast<int>(few.pairs[rounds.pair(round)]) : kNone;
    const int rank = expert < 0 ? 0 : d.rank_of(expert);
    const bool first = leads(rounds, expert >= 0, rank);
    const std::uint32_t number = take_few(columns, expert >= 0, static_cast<unsigned>(expert));
    const std::uint32_t position = take_few(columns, first, column_of(work, rank));
    const int home = first ? rank : device::kMostRanks;
    int earlier = 0, all = 0;
#pragma unroll 1
    for (unsigned i = 0; i < rounds.k; ++i) {
      const int other = __shfl_sync(kAllLanes, home, static_cast<int>((rounds.in_round * rounds.k + i) % 32));
      earlier += other < home ? 1 : 0;
      all += other < device::kMostRanks ? 1 : 0;
    }
    if (!has) continue;
    few.pairs[rounds.pair(round)] = expert < 0 ? kMasked : static_cast<std::uint32_t>(expert) << 16 | number;
    const std::size_t row = std::size_t{rounds.token(round)} * rounds.k;
    const unsigned place = lane() % rounds.k;
    if (first) few.homes[row + static_cast<unsigned>(earlier)] = Home::pack(rank, position);
    if (first && rank == d.rank) few.own[position] = rounds.token(round);
    if (place >= static_cast<unsigned>(all)) few.homes[row + place] = kNone;
  }
}

// Counts this rank's routes. All threads of a block call it, and have the same answer: whether all experts
// are. Requires: the warps' counts are zero.
__device__ inline bool count_routes(const Work& work, const Dispatch& dispatch, const Few& few,
                                    const Rounds& rounds, std::int64_t first) {
  const bool right = count_pairs(work, dispatch, few, rounds, first);
  if (__syncthreads_and(right) == 0) return false;
  sum_few(few, rounds.warps);
  __syncthreads();
  return true;
}

// Tells every rank, also this one, what this rank has counted, and that it has begun the phase.
__device__ inline void tell_few(const Work& work, const Dispatch& dispatch, const Few& few,
                                std::uint64_t phase) {
  const Dims& d = work.dims;
  const unsigned lines = dispatch.routed ? 1 : static_cast<unsigned>(work.space.told_lines);
  const auto number = [&](unsigned i) -> std::uint64_t {
    if (i == 0) return dispatch.weights ? 1 : 0;
    return !dispatch.routed && i <= few.counts.columns ? few.counts.own[i - 1] : 0;
  };
  const auto word = [&](unsigned w) {
    return number(4 * w) | number(4 * w + 1) << 16 | number(4 * w + 2) << 32 | number(4 * w + 3) << 48;
  };
  for (unsigned i = blockIdx.x; i < static_cast<unsigned>(d.ranks); i += gridDim.x) {
    const int peer =
        static_cast<int>((static_cast<unsigned>(d.rank) + 1 + i) % static_cast<unsigned>(d.ranks));
    byte* const there =
        at<byte>(work, peer, work.space.told_of(phase)) + d.rank * work.space.told_lines * kLine;
    for (unsigned step = warp_of_block(); step * kLinesOfWarp < lines; step += kWarps) {
      const unsigned line = line_of(step), w = word_of(line);
      const Packet packet{word(w), ends_line() ? phase : word(w + 1)};
      __syncwarp();
      if (line < lines) cuda::store_packet(packet_of(there, line), packet);
    }
  }
}

// Waits for what all ranks tell. All threads of a block call it, and have the same answer.
__device__ inline bool hear_few(const Work& work, const Dispatch& dispatch, const Few& few,
                                std::uint64_t phase) {
  const auto ranks = static_cast<unsigned>(work.dims.ranks);
  const unsigned lines = dispatch.routed ? 1 : static_cast<unsigned>(work.space.told_lines);
  bool heard = true;
  for (unsigned step = warp_of_block(); step * kLinesOfWarp < ranks * lines && heard; step += kWarps) {
    const unsigned i = line_of(step);
    const bool has = i < ranks * lines;
    const unsigned source = has ? i / lines : 0, line = i % lines;
    byte* const lines_of_source =
        mine<byte>(work, work.space.told_of(phase)) + source * work.space.told_lines * kLine;
    Packet* const places[1] = {has ? packet_of(lines_of_source, line) : nullptr};
    Packet packets[1];
    heard = take_lines(work, places, phase, Told::begun, static_cast<int>(source), packets);
    if (!has || !heard) continue;
    std::uint64_t* const words = few.told + source * work.space.told_lines * kWordsOfLine + word_of(line);
    words[0] = packets[0].low;
    if (!ends_line()) words[1] = packets[0].high;
  }
  if (__syncthreads_and(heard) == 0) return false;
  for (unsigned s = threadIdx.x; s < ranks; s += kThreads) {
    few.weighted[s] = static_cast<std::uint32_t>(few.told[s * work.space.told_lines * kWordsOfLine] & 1);
    if (blockIdx.x == 0) table<std::uint32_t>(work, work.space.weighted)[s] = few.weighted[s];
  }
  return true;
}

// Sums what the ranks have told.
__device__ inline void sum_told(const Work& work, const Few& few) {
  const Dims& d = work.dims;
  const auto* const numbers = reinterpret_cast<const std::uint16_t*>(few.told);
  const std::size_t stride = Few::numbers(work.space);
  for (std::size_t c = threadIdx.x; c < few.counts.columns; c += kThreads) {
    std::uint32_t sum = 0, earlier = 0;
#pragma unroll 1
    for (int s = 0; s < d.ranks; ++s) {
      const std::uint32_t its = numbers[s * stride + 1 + c];
      earlier += s < d.rank ? its : 0;
      sum += its;
    }
    few.counts.all[c] = sum;
    few.counts.earlier[c] = earlier;
    few.counts.base[c] = 0;
  }
}

// Sets where each source's rows go here. All threads of a block call it.
__device__ inline void find_first_rows(const Work& work, const Few& few) {
  const Dims& d = work.dims;
  const auto* const numbers = reinterpret_cast<const std::uint16_t*>(few.told);
  for (int s = static_cast<int>(threadIdx.x); s < d.ranks; s += kThreads)
    few.tokens[s] = numbers[s * Few::numbers(work.space) + 1 + column_of(work, d.rank)];
  __syncthreads();
  const auto capacity = static_cast<std::uint32_t>(d.capacity);
  const bool packed = d.layout == MoeLayout::flat;
  for (int s = static_cast<int>(threadIdx.x); s < d.ranks; s += kThreads) {
    std::uint32_t begin = packed ? 0 : static_cast<std::uint32_t>(s * d.max_tokens);
    if (packed)
#pragma unroll 1
      for (int i = 0; i < s; ++i) begin += few.tokens[i];
    few.first_rows[s] = begin;
    few.rows[s] = packed ? min(few.tokens[s], capacity - min(begin, capacity)) : few.tokens[s];
    if (d.layout == MoeLayout::rank_major)  // the same of all blocks, which read it
      table<std::int32_t>(work, work.space.source_rows)[s] = static_cast<std::int32_t>(few.rows[s]);
  }
  __syncthreads();
}

// Sets where each source's pairs go here. Requires: experts have been scanned.
__device__ inline void find_starts(const Work& work, const Few& few) {
  const Dims& d = work.dims;
  const auto* const numbers = reinterpret_cast<const std::uint16_t*>(few.told);
  const std::size_t stride = Few::numbers(work.space);
  const int first = d.first_expert();
  for (int e = static_cast<int>(threadIdx.x); e < d.local_experts; e += kThreads) {
    std::uint32_t next = few.counts.begin[first + e] - few.counts.begin[first];
#pragma unroll 1
    for (int s = 0; s < d.ranks; ++s) {
      few.starts[s * d.local_experts + e] = next;
      next += numbers[s * stride + 1 + static_cast<std::size_t>(first + e)];
    }
  }
}

// Finds out where all that comes belongs, and sets the tables of it. All threads of a block call it, after
// find_first_rows, and have the same answer: whether all ranks have room.
__device__ inline bool lay_out_few(const Work& work, const Few& few, Rooms& rooms) {
  const Dims& d = work.dims;
  sum_told(work, few);
  __syncthreads();
  scan_experts(work, few.counts);
  __syncthreads();
  find_rooms(work, few.counts, rooms);
  find_starts(work, few);
  __syncthreads();
  if (!has_room(work, few.counts, rooms)) return false;
  if (blockIdx.x != gridDim.x - 1) {
    if (d.expert_major()) describe_experts(work, few.counts);  // the same of all blocks, which read it
    return true;
  }
  __shared__ std::uint32_t dropped;
  if (threadIdx.x == 0) dropped = 0;
  __syncthreads();
  if (const std::uint32_t some = describe_experts(work, few.counts); some > 0) atomicAdd(&dropped, some);
  __syncthreads();
  if (threadIdx.x == 0) describe_sources(work, few.tokens, dropped);
  for (int r = static_cast<int>(threadIdx.x); r < d.ranks; r += kThreads)
    table<std::int32_t>(work, work.space.first_there)[r] = static_cast<std::int32_t>(rooms.first[r]);
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
  for (unsigned token = threadIdx.x; token < work.tokens; token += kThreads) {
    auto* const kept = table<std::int32_t>(work, work.space.homes) + std::size_t{token} * k;
    unsigned next = 0;
#pragma unroll 1
    for (unsigned i = 0; i < k; ++i) {
      const std::int32_t packed = few.homes[std::size_t{token} * k + i];
      if (packed == kNone) break;
      if (fits(work.dims, rooms, packed)) kept[next++] = packed;
    }
    while (next < k) kept[next++] = kNone;
  }
}

// Sets the same of a routing that is kept.
__device__ inline void load_few(const Work& work, const Few& few) {
  const Dims& d = work.dims;
  for (int s = static_cast<int>(threadIdx.x); s < d.ranks; s += kThreads) {
    few.rows[s] = static_cast<std::uint32_t>(table<std::int32_t>(work, work.space.source_rows)[s]);
    few.first_rows[s] = static_cast<std::uint32_t>(table<std::int32_t>(work, work.space.first_rows)[s]);
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
