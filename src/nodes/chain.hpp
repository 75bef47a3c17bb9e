// Sums along a chain of nodes whose ranks are consecutive, and as many on each: in rank order.
//
// Partial sums travel from node to node in the wide type: local rank r adds its node's part of the r-th shard
// of a block to what comes from the node before and passes it on. The last node rounds. From there the sums
// go
// - of an all_reduce from node to node to the first one: each direction of a link carries them once,
// - of a reduce to the root's node, whose ranks give them to the root,
// - of a reduce_scatter to the node whose blocks they are.
// The traffic is the same whatever the number of a node's ranks.
#pragma once

#include "nodes/sums.hpp"

namespace unisono::nodes {

// Steps in which a node works on one block while another comes in and a third goes out.
//
// In step t node k adds its part to block t - 2k. The last node, K, sends in step t what it has rounded in
// the step before, block t - 2K - 1. What is computed in one step travels in the next, and is worked on in
// the one after that. A step in which nothing travels costs nothing. Both ends of a message are in one step.
class Chain {
 public:
  virtual ~Chain() = default;
  void run();

 protected:
  using Rows = std::vector<const byte*>;
  // count: blocks. elements: of the longest shard of a block.
  Chain(Moves& moves, const Sum& what, int count, std::size_t elements);

  virtual std::size_t elements(int block) const = 0;  // of a shard of that block
  virtual Rows sources(int block) = 0;  // this rank's shard of that block, of each of the node's ranks
  virtual byte* sums(int block);        // where the sums of this rank's shard go
  virtual void sums_travel(int step, Messages& messages) = 0;
  virtual void land(int step) = 0;  // what the node does with sums that have come

  bool exists(int block) const { return 0 <= block && block < count_; }
  byte* shard(byte* const* buffers, int number, int block) const { return buffers[block % number]; }
  void send_sums(Messages& messages, int rank, int block);
  void receive_sums(Messages& messages, int rank, int block);

  Moves& moves_;
  const Sum what_;
  const int count_, node_, last_, here_;
  int before_ = -1, behind_ = -1;  // this rank's counterparts on the neighbouring nodes

 private:
  void add(int block);
  byte *incoming_[2], *partial_[2], *final_[3];
};

class AllReduceChain : public Chain {
 public:
  AllReduceChain(Moves& moves, const Sum& what, std::size_t block_bytes, const byte* x, byte* out,
                 std::size_t count);

 protected:
  std::size_t elements(int block) const override;
  Rows sources(int block) override;
  void sums_travel(int step, Messages& messages) override;
  void land(int step) override;
  std::size_t begin(int block) const { return static_cast<std::size_t>(block) * block_; }  // elements
  std::size_t length(int block) const { return std::min(block_, total_ - begin(block)); }
  // Gives a block's sums to the node's ranks, or to the root alone.
  void hand_out(int block, Collective collective, int root = 0);

  const byte* x_;
  byte* out_;
  std::size_t total_, block_;  // elements
};

class ReduceChain final : public AllReduceChain {
 public:
  ReduceChain(Moves& moves, const Sum& what, std::size_t block_bytes, const byte* x, byte* out,
              std::size_t count, int root);

 private:
  void sums_travel(int step, Messages& messages) override;
  void land(int step) override;
  int home_, root_;  // the root's node, and its number there
};

// A block of this chain is a range of columns of one node's blocks. Nodes take turns, so that no node gets
// all its sums at once.
class ReduceScatterChain final : public Chain {
 public:
  ReduceScatterChain(Moves& moves, const Sum& what, std::size_t block_bytes, const byte* x, byte* out,
                     std::size_t count);

 private:
  std::size_t elements(int block) const override;
  Rows sources(int block) override;
  byte* sums(int block) override;
  void sums_travel(int step, Messages& messages) override;
  void land(int) override {}                                 // they have come to where they belong
  int goal(int block) const { return block % (last_ + 1); }  // the node whose block it is
  std::size_t begin(int block) const { return static_cast<std::size_t>(block / (last_ + 1)) * columns_; }

  const byte* x_;
  byte* out_;
  std::size_t total_, columns_;  // elements of a rank's block, and of a range
};

}  // namespace unisono::nodes
