// Sums across nodes, in rank order: every algorithm gives the bits of a communicator on one node.
//
// one_shot   everyone gets every input and combines all of them; of a reduce, the root alone. One step
// between
//            nodes.
// two_shot   rank r gets everyone's r-th shard and combines it; the sums go to everyone, of a reduce to the
// root
//            (R. Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004). A reduce_scatter
//            is the first half.
// chain      partial sums travel from node to node (chain.hpp).
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "core/plan.hpp"
#include "nodes/moves.hpp"
#include "nodes/steps.hpp"

namespace unisono::nodes {

// What is combined.
struct Sum {
  DType dtype;
  Op op;
  Wire wire;
  int ranks;

  std::size_t item() const { return size_of(dtype); }  // bytes of an element
  // Whether a partial result needs no more than the dtype itself.
  bool exact() const;
  // Bytes of an element of a partial result.
  std::size_t wide() const;
};

// Sizes at which the ways change; tests make them small.
struct Limits {
  std::size_t one_shot = 256 << 10;  // of all inputs together: up to here they go to everyone as they are
  std::size_t chain = 8 << 20;       // of an input: from here on along the chain, if that saves traffic
  std::size_t shard = 512 << 10;     // least bytes of a block for each rank
  std::size_t block = 4 << 20;       // most bytes of a block of few ranks: each costs the transport its start
  std::size_t chain_block =
      2 << 20;  // bytes of an input that go through a step of the chain: they stay cached
};

// Returns the algorithm for an input of `bytes`. wide: how many times as large its partial sums are.
Algorithm choose(Collective collective, const Topology& place, const Limits& limits, std::size_t bytes,
                 double wide, int root);

class Sums {
 public:
  Sums(Moves& moves, const Limits& limits) : moves_(moves), limits_(limits) {}

  // x, out: `count` elements; out may be x.
  void all_reduce(const byte* x, byte* out, std::size_t count, const Sum& what, Algorithm algorithm);
  // The root's `out`; elsewhere it is null.
  void reduce(const byte* x, byte* out, std::size_t count, const Sum& what, int root, Algorithm algorithm);
  // x: a block of `count` elements of each rank. out: this rank's.
  void reduce_scatter(const byte* x, byte* out, std::size_t count, const Sum& what, Algorithm algorithm);
  // Two shots in the wire form.
  void quantised(const byte* x, byte* out, std::size_t count, const Sum& what);

 private:
  using Rows = std::vector<const byte*>;  // a piece of each rank, in rank order
  // What becomes of one block. slot: two neighbours have different ones.
  using Step = std::function<Steps(int slot, const byte* x, byte* out, std::size_t count)>;

  void staggered(const Step& step, const byte* x, byte* out, std::size_t count, const Sum& what);
  Steps one_shot(Sum what, int slot, const byte* x, byte* out, std::size_t count);
  Steps two_shot(Sum what, int slot, const byte* x, byte* out, std::size_t count);
  Steps at_root(Sum what, int root, int slot, const byte* x, byte* out, std::size_t count);
  Steps to_root(Sum what, int root, int slot, const byte* x, byte* out, std::size_t count);
  Steps quantised_block(Sum what, int slot, const byte* x, byte* out, std::size_t count);

  // Everyone's `bytes` of x; at the root alone; this rank's shard, of `bytes`, of everyone's x.
  Moves::Begun everyones(const byte* x, std::size_t bytes, int slot, Rows& rows);
  Moves::Begun everyones_at(const byte* x, std::size_t bytes, int slot, int root, Rows& rows);
  Moves::Begun everyones_shards(const byte* x, std::size_t bytes, int slot, Rows& rows);
  byte* rows_of(int slot, std::size_t bytes, Rows& rows);
  void combine(byte* out, const Rows& rows, std::size_t count, const Sum& what);
  // x, or a copy that is long enough for as many equal shards.
  const byte* padded(const byte* x, std::size_t count, std::size_t shard, const Sum& what);

  Moves& moves_;
  const Limits& limits_;
};

}  // namespace unisono::nodes
