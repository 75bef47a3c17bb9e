// Words of eight bytes, one of each rank, combined in rank order: what an exchange has in registers.
#pragma once

#include <bit>

#include "cuda/device/framing.cuh"
#include "cuda/device/move.cuh"

namespace unisono::cuda {

// Eight bytes of each rank.
template <int kRanks>
struct OfRanks {
  std::uint64_t words[kRanks];
};

// Returns the words, combined in rank order.
template <class T, Op op, int kRanks>
__device__ inline std::uint64_t combine_words(const OfRanks<kRanks> of, int ranks) {
  using P = Pack<T, kPacketBytes / sizeof(T)>;
  P packs[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) packs[r] = std::bit_cast<P>(of.words[r]);
  return std::bit_cast<std::uint64_t>(combine_packs<T, op>(packs, kRanks == 2 ? kRanks : ranks));
}

// Returns word w of every rank: this rank's own, and those that have come from its peers.
template <class Framing, int kMost>
__device__ inline OfRanks<kMost + 1> words_of(const typename Framing::Data& own, const Packet (&got)[kMost],
                                              int rank, int w) {
  OfRanks<kMost + 1> of;
#pragma unroll
  for (int r = 0; r <= kMost; ++r) {
    const std::uint64_t before = Framing::data(got[r < kMost ? r : r - 1]).at[w];
    const std::uint64_t after = Framing::data(got[r > 0 ? r - 1 : r]).at[w];
    of.words[r] = r == rank ? own.at[w] : r < rank ? before : after;
  }
  return of;
}

}  // namespace unisono::cuda
