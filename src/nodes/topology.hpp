// Which ranks share a node, and the bootstrap among the ranks of one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "unisono/bootstrap.hpp"

namespace unisono::nodes {

// Returns whether the ranks, in ascending order, follow each other without a gap.
bool consecutive(const std::vector<int>& ranks);

struct Topology {
  Topology() = default;
  // names[r]: what identifies the node of rank r.
  Topology(int rank, const std::vector<std::string>& names);

  int rank = 0;
  std::vector<std::vector<int>> nodes;  // their ranks, in rank order; nodes in the order of their first rank
  std::vector<int> node_of;             // each rank
  int node = 0;                         // of this rank
  int local_rank = 0;                   // this rank's number on its node
  std::vector<int> others;              // the other nodes, from the next one on: not all turn to node 0 first
  std::vector<int> peers;               // every other rank
  bool in_order = true;                 // each node has consecutive ranks: nodes are in rank order
  bool together = true;                 // this node has
  bool even = true;                     // all nodes have as many ranks
  bool crowded = false;  // this machine, with all nodes that it plays, has more ranks than cores

  int size() const { return static_cast<int>(node_of.size()); }
  int count() const { return static_cast<int>(nodes.size()); }
  const std::vector<int>& on(int other) const { return nodes[static_cast<std::size_t>(other)]; }
  const std::vector<int>& local() const { return on(node); }
  int here() const { return static_cast<int>(local().size()); }
  int home_of(int of) const { return node_of[static_cast<std::size_t>(of)]; }
  bool uniform() const { return in_order && even; }
  bool apart() const { return count() == size(); }  // every node has one rank
  // Returns the rank of a node that this one exchanges with: that of its own local rank, if there is one.
  int counterpart(int other) const {
    const auto& ranks = on(other);
    return ranks[static_cast<std::size_t>(local_rank) % ranks.size()];
  }
  // Returns the number of a rank on this node; -1: it is on another.
  int local_number(int of) const;
  // Returns a rank's name in errors: "rank 3 (node 1)".
  std::string who(int of) const;
};

// Gathers what identifies each rank's node: boot, PID namespace, and network namespace or `node`. Collective.
// node: a name of this rank's node; empty: UNISONO_NODE, else what the kernel says. check: see
// Communicator::Options; the ranks must agree.
// Throws UsageError if a rank runs another version of Unisono, or if its `check` differs.
Topology meet(Bootstrap& bootstrap, const std::string& node, bool check);

// The bootstrap among the ranks of this node, over that of all ranks: each node gathers as often as the
// others.
class NodeBootstrap final : public Bootstrap {
 public:
  NodeBootstrap(Bootstrap& whole, const Topology& place) : whole_(whole), place_(place) {}
  int rank() const override { return place_.local_rank; }
  int size() const override { return place_.here(); }
  std::vector<std::string> all_gather(const std::string& data) override;

 private:
  Bootstrap& whole_;
  const Topology& place_;
};

}  // namespace unisono::nodes
