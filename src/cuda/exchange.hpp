// One step, or two, whose data and flags travel together: the CUDA lane's own form of the `…_packets` and
// `…_ll128` algorithms, where every instruction before the first store counts. Its oracle is the host lane,
// where the portable programs run.
#pragma once

#include "cuda/layout.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

inline constexpr int kMostPeers = kMaxRanks - 1;

// The peers of a rank are numbered from 0 in the order of ranks, the rank itself left out.
UNISONO_PORTABLE constexpr int peer_of(int other, int rank) { return other < rank ? other : other - 1; }
UNISONO_PORTABLE constexpr int rank_of(int peer, int rank) { return peer < rank ? peer : peer + 1; }

// Bit p: peer p, among the ranks after this one or before it.
struct Peers {
  unsigned after = 0, before = 0;
  void add(int peer, int rank) { (peer >= rank ? after : before) |= 1u << peer; }
  UNISONO_PORTABLE bool has(int peer) const { return (after | before) >> peer & 1u; }
};

// What a rank gives each peer and does with what it gets. Blocks take turns by pieces; both ends of a pair
// have the same grid and piece. Between a pair, 0 bytes on both ends leave a message out (of one step). The
// entries of peers that are not there are zero.
struct Exchange {
  Packet* rings[kMostPeers] = {};          // in each peer's memory, those that this rank writes
  std::uint32_t* tokens[kMostPeers] = {};  // likewise
  const Packet* arrived = nullptr;         // in this rank's, those that it reads
  Counts* begun = nullptr;                 // likewise
  Counts* counts = nullptr;
  const byte* from[kMostPeers] = {};
  byte* into[kMostPeers] = {};
  std::uint32_t send[kMostPeers] = {}, receive[kMostPeers] = {};
  std::uint32_t back[kMostPeers] = {};  // of the second step
  Peers gives, passes;                  // to whom anything goes in the first step, in the second
  const byte* own = nullptr;            // this rank's own part, or null
  byte* result = nullptr;               // where it, or what it is combined to, goes, or null
  std::uint32_t own_bytes = 0;
  std::uint32_t bytes = 0, piece_bytes = 0;  // of the longest message, or of a shard
  int ranks = 0, rank = 0, root = 0;         // root: of a relay
  DType dtype = DType::f32;                  // where it combines
  Op op = Op::sum;
  Context context;
};

enum class Step {
  move,      // what comes from a peer goes where `into` says
  combine,   // it is combined in rank order, with this rank's own part
  two_shot,  // `from` and `into` are by shards: my own is combined, passed on, and theirs come back
  relay,     // the same with what comes from the root alone
};

using ExchangeKernel = void (*)(Exchange);
// `lines`: 120 bytes of data in 128, else 8 in 16. `whole`: this rank's pointers and sizes are multiples
// of 8.
ExchangeKernel exchange_kernel(Step step, bool lines, bool whole, int ranks, DType dtype, Op op);

}  // namespace unisono::cuda
