// Collectives that only move data, across nodes: calls within the node and one exchange between nodes; a
// large broadcast is one exchange for each of its blocks.
//
// Each byte crosses between two nodes once for each node that needs it. The ranks of a node share the work:
// local rank r exchanges with local rank r of the other nodes ("rails", as NCCL calls them).
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "core/backend.hpp"
#include "core/space.hpp"
#include "nodes/courier.hpp"

namespace unisono::nodes {

class Moves {
 public:
  // local: the communicator of this node's ranks.
  Moves(const Topology& place, Communicator::Impl& local, Courier& courier, Space& space)
      : place(place), space(space), local_(local), courier_(courier) {}

  const Topology& place;
  Space& space;

  // A collective that has begun: an exchange, and what is left to do after it.
  class Begun {
   public:
    Begun() = default;
    Begun(Courier::Exchange exchange, std::function<void()> then = {})
        : exchange_(std::move(exchange)), then_(std::move(then)) {}
    // Order: every rank of a node waits for its collectives in the order in which it has begun them.
    void wait() {
      exchange_.wait();
      if (then_) then_();
    }
    void poll() { exchange_.poll(); }

   private:
    Courier::Exchange exchange_;
    std::function<void()> then_;
  };

  Courier::Exchange exchange(const Messages& messages) { return courier_.begin(messages); }
  // Runs a collective of bytes within the node. count: as in Call.
  void inside(Collective collective, const byte* in, byte* out, std::size_t count, int root = 0);
  // Copies in pieces, between which the exchange moves on.
  void copy_beside(Courier::Exchange& under_way, byte* to, const byte* from, std::size_t bytes);

  void barrier();
  // Gives everyone everyone's `n` bytes of `x`, in rank order. In place, `x` is this rank's part of `out`.
  Begun all_gather(const byte* x, byte* out, std::size_t n);
  // Sends block p of `x`, of n bytes, to rank p. In place: x == out. slot: different for collectives that are
  // under way together.
  Begun all_to_all(const byte* x, byte* out, std::size_t n, int slot = 0);
  // Sends a part to each rank and receives one from each. in_place: what goes is copied first.
  void all_to_all_v(std::span<const Args::Part> sends, std::span<const Args::Part> receives, bool in_place);
  // Gives everyone the root's `x`: a small one goes to each node at once, a large one along a chain of nodes.
  void broadcast(const byte* x, byte* out, std::size_t bytes, int root);
  // Returns whether a broadcast of `bytes` bytes goes along the chain.
  bool chained(std::size_t bytes) const;
  // Gives the root everyone's `n` bytes, in rank order. out: null on the other ranks.
  Begun gather(const byte* x, byte* out, std::size_t n, int root);
  // Gives rank p block p of the root's `x`, of n bytes. x: null on the other ranks.
  void scatter(const byte* x, byte* out, std::size_t n, int root);
  // Sends and receives the parts of a batch, this rank's to itself too. A part with data is a message, also
  // an empty one.
  void batch(std::span<const Args::Part> sends, std::span<const Args::Part> receives);
  // Sends `sent` bytes to rank `to` and receives `received` bytes from rank `from`; rank -1: none. Requires:
  // neither is this rank.
  void send_recv(const byte* x, std::size_t sent, int to, byte* out, std::size_t received, int from);

 private:
  Call call(const byte* in, byte* out, std::size_t count, int root = 0) const;
  void share(const std::vector<int>& ranks, byte* out, std::size_t n);
  void broadcast_along_chain(byte* data, std::size_t bytes, int root, std::size_t most);
  void broadcast_at_once(const byte* x, byte* data, std::size_t bytes, int root);
  std::vector<int> remote() const;  // the ranks of other nodes

  Communicator::Impl& local_;
  Courier& courier_;
};

}  // namespace unisono::nodes
