// Which ranks share memory, and which of them takes a message from another node.
#pragma once

#include <algorithm>
#include <vector>

#include "core/backend.hpp"
#include "moe/dims.hpp"

namespace unisono::moe {

// The ranks of a communicator over several nodes, or of the fabric, each of whom is a node by itself.
class Site {
 public:
  explicit Site(const Communicator::Impl& impl)
      : nodes_(impl.nodes()), node_of_(at(impl.size())), number_of_(at(impl.size())), rank_(impl.rank()) {
    if (nodes_.size() == 1) {
      nodes_.clear();
      for (int r = 0; r < impl.size(); ++r) nodes_.push_back({r});
    }
    for (std::size_t n = 0; n < nodes_.size(); ++n)
      for (std::size_t i = 0; i < nodes_[n].size(); ++i) {
        node_of_[at(nodes_[n][i])] = static_cast<int>(n);
        number_of_[at(nodes_[n][i])] = static_cast<int>(i);
      }
  }

  int nodes() const { return static_cast<int>(nodes_.size()); }
  int node_of(int rank) const { return node_of_[at(rank)]; }
  int home() const { return node_of(rank_); }
  bool is_home(int rank) const { return node_of(rank) == home(); }
  const std::vector<int>& neighbours() const { return nodes_[at(home())]; }  // with this rank
  // Returns a rank's number on its node.
  std::size_t number(int rank) const { return at(number_of_[at(rank)]); }
  // Returns the number of the rank that takes a rank's message to a node: the rank's own number, if there is
  // one. So the ranks of a node share the links.
  std::size_t counterpart(int rank, int node) const { return number(rank) % nodes_[at(node)].size(); }
  int rank_at(int node, std::size_t number) const { return nodes_[at(node)][number]; }

  // Returns the most ranks of a node, and the most whose messages one rank takes.
  std::size_t most_neighbours() const {
    std::size_t most = 0;
    for (const auto& ranks : nodes_) most = std::max(most, ranks.size());
    return most;
  }
  std::size_t most_taken() const {
    std::size_t most = 0;
    for (int n = 0; n < nodes(); ++n) {
      std::vector<std::size_t> taken(nodes_[at(n)].size());
      for (int r = 0; r < static_cast<int>(node_of_.size()); ++r)
        if (node_of(r) != n) most = std::max(most, ++taken[counterpart(r, n)]);
    }
    return most;
  }

 private:
  std::vector<std::vector<int>> nodes_;
  std::vector<int> node_of_, number_of_;
  int rank_;
};

}  // namespace unisono::moe
