// Sums across nodes, in rank order: every algorithm gives the bits of a communicator on one node.
//
// - one_shot: everyone, of a reduce the root alone, gets every input and combines all of them. One step
// between
//   nodes.
// - two_shot: rank r gets everyone's r-th shard and combines it. The sums go to everyone, of a reduce to the
// root
//   (R. Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004). A reduce_scatter is the
//   first half.
// - chain: partial sums travel from node to node (chain.hpp).
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "core/plan.hpp"
#include "nodes/moves.hpp"
#include "nodes/steps.hpp"

namespace unisono::nodes {

// The elements of a sum: their type and operation.
struct Sum {
  DType dtype;
  Op op;
  Wire wire;
  int ranks;

  std::size_t item() const { return size_of(dtype); }  // bytes of an element
  // Returns whether a partial result needs no more than the dtype itself.
  bool exact() const;
  // Returns the bytes of an element of a partial result.
  std::size_t wide() const;
};

// Sizes, in bytes, at which the algorithms and the blocks change. Tests make them small.
struct Limits {
  std::size_t one_shot = 256 << 10;   // of all inputs together: up to here one_shot
  std::size_t chain = 8 << 20;        // of an input: from here on the chain, if that saves traffic
  std::size_t shard = 512 << 10;      // the least of a block, for each rank
  std::size_t block = 4 << 20;        // the most of a block of few ranks: each costs the transport its start
  std::size_t chain_block = 2 << 20;  // of an input, in a step of the chain: they stay cached
};

// Returns the algorithm for an input of `bytes` bytes. wide: the partial sums' size over the input's.
Algorithm choose(Collective collective, const Topology& place, const Limits& limits, std::size_t bytes,
                 double wide, int root);

class Sums {
 public:
  Sums(Moves& moves, const Limits& limits) : moves_(moves), limits_(limits) {}

  // Gives everyone the sums. x, out: `count` elements; out may be x.
  void all_reduce(const byte* x, byte* out, std::size_t count, const Sum& what, Algorithm algorithm);
  // Gives the root the sums. out: null on the other ranks.
  void reduce(const byte* x, byte* out, std::size_t count, const Sum& what, int root, Algorithm algorithm);
  // Gives each rank the sums of one block. x: a block of `count` elements for each rank. out: this rank's.
  void reduce_scatter(const byte* x, byte* out, std::size_t count, const Sum& what, Algorithm algorithm);
  // Gives everyone the sums, by two shots in the wire form.
  void quantised(const byte* x, byte* out, std::size_t count, const Sum& what);

 private:
  using Rows = std::vector<const byte*>;  // a piece of each rank, in rank order
  // Works on one block. slot: neighbouring blocks have different ones, each with scratch of its own.
  using Step = std::function<Steps(int slot, const byte* x, byte* out, std::size_t count)>;

  void staggered(const Step& step, const byte* x, byte* out, std::size_t count, const Sum& what);
  Steps one_shot(Sum what, int slot, const byte* x, byte* out, std::size_t count);
  Steps two_shot(Sum what, int slot, const byte* x, byte* out, std::size_t count);
  Steps at_root(Sum what, int root, int slot, const byte* x, byte* out, std::size_t count);
  Steps to_root(Sum what, int root, int slot, const byte* x, byte* out, std::size_t count);
  Steps quantised_block(Sum what, int slot, const byte* x, byte* out, std::size_t count);

  // Begin to fetch, and put into `rows`: everyone's `bytes` bytes of x, on every rank or at the root alone;
  // this rank's shard, of `bytes` bytes, of everyone's x.
  Moves::Begun everyones(const byte* x, std::size_t bytes, int slot, Rows& rows);
  Moves::Begun everyones_at(const byte* x, std::size_t bytes, int slot, int root, Rows& rows);
  Moves::Begun everyones_shards(const byte* x, std::size_t bytes, int slot, Rows& rows);
  byte* rows_of(int slot, std::size_t bytes, Rows& rows);
  void combine(byte* out, const Rows& rows, std::size_t count, const Sum& what);
  // Returns x, or a copy that is long enough for equal shards of all ranks.
  const byte* padded(const byte* x, std::size_t count, std::size_t shard, const Sum& what);

  Moves& moves_;
  const Limits& limits_;
};

}  // namespace unisono::nodes
