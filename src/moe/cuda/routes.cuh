// The routes of tokens, as the warps of a block read them.
#pragma once

#include "moe/cuda/device.cuh"

namespace unisono::moe::gpu {

inline constexpr unsigned kTile = 256;  // tokens that a block takes at once
inline constexpr unsigned kBatch = 4;   // rounds of a warp whose experts are loaded at once

// Tells of a token's index that names no expert.
template <class Index>
__device__ __noinline__ inline void refuse(const Work& work, const Index* indices, unsigned first,
                                           unsigned end) {
  const auto k = static_cast<unsigned>(work.dims.top_k);
  for (std::size_t i = std::size_t{first} * k + threadIdx.x; i < std::size_t{end} * k; i += kThreads)
    if (indices[i] < -1 || indices[i] >= work.dims.experts)
      report(work, Problem::index, i / k, static_cast<std::uint32_t>(indices[i]),
             static_cast<std::uint32_t>(work.dims.experts));
}

// How tokens are shared. Divisions are made by the host: n / d is n * ceil(2^s / d) >> s for small n and d.
struct Shares {
  explicit Shares(const Dims& d, unsigned of_block = 0)
      : of_block(of_block),
        of_round(32 / static_cast<unsigned>(d.top_k)),
        by_k((1u << 16) / static_cast<unsigned>(d.top_k) + 1),
        by_experts((1u << 31) / static_cast<unsigned>(d.local_experts) + 1) {}
  unsigned of_block, of_round;  // tokens
  unsigned by_k, by_experts;    // what replaces a division by top_k (s = 16) and local_experts (s = 31)
};

// Tokens that a block reads, in tiles. A warp takes rounds of as many whole tokens as it has lanes for.
template <class Index, bool kAlone>
struct Tokens {
  __device__ Tokens(const Work& work, const Shares& shares, const Index* indices, unsigned first,
                    unsigned end)
      : work(work),
        shares(shares),
        indices(indices),
        k(static_cast<unsigned>(work.dims.top_k)),
        first(min(first, work.tokens)),
        end(min(end, work.tokens)) {
    in_round = lane() * shares.by_k >> 16;
    place = lane() - in_round * k;
    its = (k == 32 ? kAllLanes : (1u << k) - 1) << (in_round * k);
    load(this->first + warp_of_block() * shares.of_round, min(this->first + kTile, this->end));
  }
  __device__ const Index* at(unsigned token) const { return indices + std::size_t{token} * k; }
  __device__ bool has(unsigned token, unsigned after) const {
    return in_round < shares.of_round && token < after;
  }
  // Loads the experts of a batch of rounds.
  __device__ void load(unsigned from, unsigned after) {
    loaded = from;
#pragma unroll
    for (unsigned i = 0; i < kBatch; ++i) {
      const unsigned token = from + i * kWarps * shares.of_round + in_round;
      experts[i] = has(token, after) ? at(token)[place] : Index{kNone};
    }
  }
  // Calls `take` with each of the warp's tokens in a tile, and each lane's expert. Lanes without go along.
  template <class Take>
  __device__ void each(unsigned tile, const Take& take) {
    const unsigned after = min(tile + kTile, end), step = kWarps * shares.of_round;
#pragma unroll 1
    for (unsigned from = tile + warp_of_block() * shares.of_round; from < after; from += kBatch * step) {
      if (from != loaded) load(from, after);
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) {
        if (from + i * step >= after) break;
        const unsigned token = from + i * step + in_round;
        const bool right = experts[i] >= -1 && experts[i] < work.dims.experts;
        take(token, has(token, after), right ? static_cast<int>(experts[i]) : kNone);
        wrong = wrong || !right;
      }
    }
  }
  // Returns whether this is the first of its token's experts at that rank.
  __device__ bool leads(int expert, unsigned rank) const {
    if constexpr (kAlone) {
      const unsigned earlier = __ballot_sync(kAllLanes, expert >= 0) & its & ((1u << lane()) - 1);
      return expert >= 0 && earlier == 0;
    }
    const unsigned key = expert < 0 ? device::kMostRanks : rank;
    bool first_there = expert >= 0;
    for (unsigned back = 1; back < k; ++back) {
      const unsigned other = __shfl_up_sync(kAllLanes, key, back);
      if (back <= place && other == key) first_there = false;
    }
    return first_there;
  }
  __device__ unsigned rank_of(int expert) const {
    return kAlone || expert < 0 ? 0 : __umulhi(2 * static_cast<unsigned>(expert), shares.by_experts);
  }

  const Work& work;
  const Shares& shares;
  const Index* indices;
  Index experts[kBatch];
  unsigned k, first, end, in_round, place, its, loaded;
  bool wrong = false;
};

}  // namespace unisono::moe::gpu
