// The routes of tokens, as the warps of a block read them.
#pragma once

#include <bit>

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

// The numbers by which tokens are shared. The host divides: n / d is n * ceil(2^s / d) >> s for small n and
// d.
struct Shares {
  explicit Shares(const Dims& d, unsigned of_block = 0)
      : of_block(of_block),
        of_round(32 / static_cast<unsigned>(d.top_k)),
        by_k((1u << 16) / static_cast<unsigned>(d.top_k) + 1),
        by_experts((1u << 31) / static_cast<unsigned>(d.local_experts) + 1),
        expert_bits(std::bit_width(static_cast<unsigned>(d.experts - 1) | 1)),
        rank_bits(std::bit_width(static_cast<unsigned>(d.ranks - 1) | 1)) {}
  __device__ unsigned rank_of(int expert) const {
    return __umulhi(2 * static_cast<unsigned>(expert), by_experts);
  }
  unsigned of_block, of_round;  // tokens
  unsigned by_k, by_experts;    // what replaces a division by top_k (s = 16) and local_experts (s = 31)
  int expert_bits, rank_bits;   // of the largest number of each, at least one
};

// The lanes that have the same number as this lane, and those that have a lower one. Ballots find them,
// kAtOnce bits of the number without a branch: __match_any_sync takes longer the more numbers there are.
template <int kAtOnce>
struct Alike {
  __device__ Alike(bool has, unsigned number, int bits) : same(__ballot_sync(kAllLanes, has)) {
    number <<= 32 - bits;  // the highest bit first
#pragma unroll 1
    for (int left = bits; left > 0; left -= kAtOnce) {
#pragma unroll
      for (int bit = 0; bit < kAtOnce; ++bit) {
        const unsigned with = __ballot_sync(kAllLanes, static_cast<int>(number) < 0);
        const auto set = static_cast<unsigned>(static_cast<int>(number) >> 31);  // in all bits
        lower |= same & set & ~with;
        same &= ~(set ^ with);
        number <<= 1;
      }
    }
  }
  unsigned same, lower = 0;
};

// A round: as many whole tokens as a warp has lanes for. Each lane has an expert of a token.
struct Round {
  __device__ Round(const Work& work, const Shares& shares)
      : k(static_cast<unsigned>(work.dims.top_k)),
        tokens(shares.of_round),
        in_round(lane() * shares.by_k >> 16),
        place(lane() - in_round * k),
        its((k == 32 ? kAllLanes : (1u << k) - 1) << (in_round * k)) {}
  // Returns whether this lane has a token before `end`, if the round begins with token `first`.
  __device__ bool has(unsigned first, unsigned end) const {
    return in_round < tokens && first + in_round < end;
  }
  unsigned k, tokens, in_round, place, its;  // its: the lanes of this lane's token
};

// The copies of a round's tokens: one at each rank that has an expert of the token.
struct CopiesOfRound {
  __device__ CopiesOfRound(const Round& round, bool has, unsigned rank, int rank_bits) {
    const Alike<1> alike(has, rank, rank_bits);
    leads = has && before(alike.same & round.its) == 0;
    const unsigned leading = __ballot_sync(kAllLanes, leads);
    there = alike.same & leading;
    all = static_cast<unsigned>(__popc(leading & round.its));
    earlier = static_cast<unsigned>(__popc(alike.lower & leading & round.its));
  }
  bool leads;             // this lane is the first of its token with that rank, and has the copy
  unsigned there;         // the lanes that have copies for that rank
  unsigned all, earlier;  // copies of the token, and those of them at lower ranks
};

// Tokens that a block reads, in tiles. A warp takes rounds of as many whole tokens as it has lanes for.
template <class Index, bool kAlone>
struct Tokens {
  __device__ Tokens(const Work& work, const Shares& shares, const Index* indices, unsigned first,
                    unsigned end)
      : work(work),
        shares(shares),
        indices(indices),
        round(work, shares),
        first(min(first, work.tokens)),
        end(min(end, work.tokens)) {
    load(this->first + warp_of_block() * shares.of_round, min(this->first + kTile, this->end));
  }
  __device__ const Index* at(unsigned token) const { return indices + std::size_t{token} * round.k; }
  // Loads the experts of a batch of rounds.
  __device__ void load(unsigned from, unsigned after) {
    loaded = from;
#pragma unroll
    for (unsigned i = 0; i < kBatch; ++i) {
      const unsigned begin = from + i * kWarps * round.tokens;
      experts[i] = round.has(begin, after) ? at(begin + round.in_round)[round.place] : Index{kNone};
    }
  }
  // Calls `take` with each of the warp's tokens in a tile, and each lane's expert. Lanes without go along.
  template <class Take>
  __device__ void each(unsigned tile, const Take& take) {
    const unsigned after = min(tile + kTile, end), step = kWarps * round.tokens;
#pragma unroll 1
    for (unsigned from = tile + warp_of_block() * round.tokens; from < after; from += kBatch * step) {
      if (from != loaded) load(from, after);
#pragma unroll
      for (unsigned i = 0; i < kBatch; ++i) {
        if (from + i * step >= after) break;
        const unsigned begin = from + i * step;
        const bool right = experts[i] >= -1 && experts[i] < work.dims.experts;
        take(begin + round.in_round, round.has(begin, after), right ? static_cast<int>(experts[i]) : kNone);
        wrong = wrong || !right;
      }
    }
  }
  // Returns whether this is the first of its token's experts at that rank.
  __device__ bool leads(int expert, unsigned rank) const {
    const bool has = expert >= 0;
    const unsigned there =
        kAlone ? __ballot_sync(kAllLanes, has) : Alike<1>(has, rank, shares.rank_bits).same;
    return has && before(there & round.its) == 0;
  }
  __device__ unsigned rank_of(int expert) const { return kAlone || expert < 0 ? 0 : shares.rank_of(expert); }

  const Work& work;
  const Shares& shares;
  const Index* indices;
  Index experts[kBatch];
  Round round;
  unsigned first, end, loaded;
  bool wrong = false;
};

}  // namespace unisono::moe::gpu
