// One step, or two, of packets: the CUDA lane's own form of the `…_packets` algorithms, for messages where
// every instruction before the first store counts. Its oracle is the host lane, where the portable programs
// run.
#pragma once

#include "lane/cuda/layout.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

// What a rank gives each peer and does with what it gets. Peers with 0 bytes both ways are left out. Blocks
// take turns by pieces; both ends of a pair have the same grid and piece.
struct Exchange {
  int ranks = 0, rank = 0;
  std::uint32_t bytes = 0, piece_bytes = 0;  // of the longest message, or of a shard
  bool aligned = false;                      // every pointer, to words of kPacketBytes
  bool one_source = false;                   // everyone gets the same: from[rank]
  byte* rings[kMaxRanks] = {};               // in each peer's memory, those that this rank writes
  const byte* from[kMaxRanks] = {};          // [rank]: this rank's own part
  byte* into[kMaxRanks] = {};                // [rank]: of the own part, or of the combination
  std::uint32_t send[kMaxRanks] = {}, receive[kMaxRanks] = {};
  DType dtype = DType::f32;  // where it combines
  Op op = Op::sum;
  Context context;
};

enum class Step {
  move,      // what comes from a peer goes where `into` says
  combine,   // it is combined in rank order, with this rank's own part
  two_shot,  // `from` and `into` are by shards: mine is combined, given to all, and theirs come in
};

using ExchangeKernel = void (*)(Exchange);
ExchangeKernel exchange_kernel(Step step, int ranks, DType dtype, Op op);

}  // namespace unisono::cuda
