// Exchanges of one or two steps, whose data and flags travel together: the CUDA lane's own form of the
// `…_packets` and `…_ll128` algorithms. Every instruction before the first store counts. The reference for
// their results is the host lane, which runs the portable programs.
#pragma once

#include "cuda/layout.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

inline constexpr int kMostPeers = kFewRanks - 1;

// Peers of a rank are numbered from 0 in rank order, without the rank itself.
UNISONO_PORTABLE constexpr int peer_of(int other, int rank) { return other < rank ? other : other - 1; }
UNISONO_PORTABLE constexpr int rank_of(int peer, int rank) { return peer < rank ? peer : peer + 1; }

// A set of peers: bit p of `after` or `before` is peer p, whose rank is above or below this one's.
struct Peers {
  unsigned after = 0, before = 0;
  void add(int peer, int rank) { (peer >= rank ? after : before) |= 1u << peer; }
  UNISONO_PORTABLE bool has(int peer) const { return (after | before) >> peer & 1u; }
};

// The messages of a rank with each peer. Blocks take pieces in turn.
// Requires: both ends of a pair have the same grid and piece. Entries of absent peers are zero.
// In an exchange of one step, a pair with 0 bytes on both ends has no message.
struct Exchange {
  Packet* rings[kMostPeers] = {};          // in each peer's memory, for this rank to write
  std::uint32_t* tokens[kMostPeers] = {};  // likewise
  const Packet* arrived = nullptr;         // in this rank's memory, for it to read
  Counts* begun = nullptr;                 // likewise
  Counts* counts = nullptr;
  const byte* from[kMostPeers] = {};
  byte* into[kMostPeers] = {};
  std::uint32_t send[kMostPeers] = {}, receive[kMostPeers] = {};
  std::uint32_t back[kMostPeers] = {};  // bytes received in the second step
  Peers gives, passes;                  // peers that get data in the first step, in the second
  const byte* own = nullptr;            // this rank's own part, or null
  byte* result = nullptr;               // the place of that part, or of its combination, or null
  std::uint32_t own_bytes = 0;
  std::uint32_t bytes = 0, piece_bytes = 0;  // of the longest message, or of a shard
  int ranks = 0, rank = 0, root = 0;         // root: of a relay
  DType dtype = DType::f32;                  // if it combines
  Op op = Op::sum;
  Context context;
};

enum class Step {
  move,      // data from a peer goes to `into`
  combine,   // data from peers is combined in rank order, with this rank's own part
  two_shot,  // `from` and `into` are by shards: the own one is combined and passed on, the others come back
  relay,     // the same, but the shard comes from the root alone
};

using ExchangeKernel = void (*)(Exchange);
// Returns the kernel of an exchange. lines: 120 bytes of data in 128, else 8 in 16. whole: this rank's
// pointers and sizes are multiples of 8 bytes.
ExchangeKernel exchange_kernel(Step step, bool lines, bool whole, int ranks, DType dtype, Op op);
// Returns the kernel of an all_reduce that quantises, in two steps over lines, or null if the dtype has none.
ExchangeKernel wire_kernel(DType dtype, Wire wire, int ranks);
// The bytes of elements that a thread of it has, on average over a pair of lines.
constexpr std::size_t wire_unit(std::size_t item) { return 14 * item; }

}  // namespace unisono::cuda
