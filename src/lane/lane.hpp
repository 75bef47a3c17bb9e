// The machine as programs see it. A lane is one worker of one rank: a CPU thread, a thread block, an
// endpoint.
//
// The verbs of lanes (HostThread in host/, CudaBlock in cuda/device/, FabricEndpoint in fabric/). Programs
// are templates over a lane.
//
// move(dsts, n_dsts, srcs, n_srcs, bytes)
//   Reads every source once, combines the sources in order with the wide accumulator, and writes every
//   destination: a copy, a multicast, a reduction or both.
// settle()
//   Makes what the worker has moved readable by its next moves. Only lanes of several threads have it.
// signal(peer, slot), wait(peer, slot)
//   Count: the k-th wait returns after the k-th signal. The peer's writes before its signal are readable
//   after the wait. A wait has a deadline.
// announce(slot)
//   Signals every peer, but only for what earlier calls have written.
// signal_note(peer, slot, note), wait_note(peer, slot)
//   Signals with a few bytes, on GPUs an address; waits for the signal and returns them.
// put_packets(peer, src, bytes), take_packets(peer, dst, bytes)
//   Host lane: move data and flag in one store, without a signal. In two steps, as operands of a move:
//   packets_to(peer, bytes), commit_packets(peer, bytes); packets_from(peer, bytes).
// requantise(dsts, n_dsts, srcs, n_srcs, plain, count)
//   Moves `count` elements in their wire form (wire.hpp). The operands of `plain` hold elements of
//   element_bytes() instead, and count with the values that they have in wire form.
//
// Place: rank() of size(), worker() of workers(). piece_bytes() is the most that a worker takes up at once.
// piece_bytes() and chunk_bytes() are 2·kAlign or more. kPulls: reading from peers is better than writing to
// them. kMulticasts: a move to several peers costs less than a move to each. kLinked: the bytes that enter
// and leave a rank bound a call, so that a root with all the data leaves the work to the others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"

namespace unisono {

// The meaning of a signal. Counters of different slots are independent of each other.
enum class Slot : int { meet, chunk, chunk_credit, packet_credit, reply };
inline constexpr int kSlots = 5;
// The names in errors. Packets have no signal: a wait for one has the slot of its credit.
inline constexpr const char* kSlotNames[kSlots] = {"meet", "chunk", "chunk_credit", "packet", "reply"};

// A destination. stream: nobody reads it soon, so that it need not stay in the cache.
struct Dst {
  byte* at;
  bool stream = false;
};

// The indices of the operands of requantise that hold elements, not their wire form; -1: none.
struct Plain {
  int src = -1, dst = -1;
};

// A call as a program sees it. Sizes are bytes and multiples of the element's size.
struct Args {
  const byte* in = nullptr;
  byte* out = nullptr;
  std::size_t bytes = 0;  // all_reduce, reduce, broadcast: the whole buffer; else: all blocks together
  std::size_t block = 0;  // bytes of a rank's block; the last one is shorter if `bytes` does not divide
  int root = 0;
  bool stream = false;                  // the outputs are large: write around the cache
  const byte* const* inputs = nullptr;  // of every rank, for programs that reach into peers' buffers
  byte* const* outputs = nullptr;
  // The data for a peer, which is only read, or the place for its data; null: there is none.
  struct Part {
    byte* at = nullptr;
    std::size_t bytes = 0;
  };
  const Part* sends = nullptr;  // of every peer, for all_to_all_v and batch_send_recv
  const Part* receives = nullptr;
};

struct Range {
  std::size_t begin = 0, bytes = 0;
};

// Returns block `index` of a buffer of `bytes` bytes in blocks of `block` bytes: empty past the end.
UNISONO_PORTABLE constexpr Range block_of(std::size_t bytes, std::size_t block, int index) {
  const std::size_t begin = smaller(block * static_cast<std::size_t>(index), bytes);
  return {begin, smaller(block, bytes - begin)};
}

// Returns the part of block `index` in a round of the blocks. The last block may be shorter than the others.
UNISONO_PORTABLE constexpr Range piece_of(const Args& a, Range round, int index) {
  const Range b = block_of(a.bytes, a.block, index);
  if (round.begin >= b.bytes) return {b.begin, 0};
  return {b.begin + round.begin, smaller(round.bytes, b.bytes - round.begin)};
}

// Returns the bytes of one of `ranks` equal shards, a multiple of kAlign.
UNISONO_PORTABLE constexpr std::size_t shard_bytes(std::size_t bytes, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  return round_up((bytes + n - 1) / n, kAlign);
}

// This worker's rounds of `step` bytes: for (Rounds r(lane, bytes, step); r.more(); r.next()) … r.range()
struct Rounds {
  template <class Lane>
  UNISONO_PORTABLE Rounds(const Lane& lane, std::size_t bytes, std::size_t step)
      : bytes_(bytes),
        step_(step),
        begin_(static_cast<std::size_t>(lane.worker()) * step),
        stride_(static_cast<std::size_t>(lane.workers()) * step) {}
  UNISONO_PORTABLE bool more() const { return begin_ < bytes_; }
  UNISONO_PORTABLE void next() { begin_ += stride_; }
  UNISONO_PORTABLE Range range() const { return {begin_, smaller(step_, bytes_ - begin_)}; }

 private:
  std::size_t bytes_, step_, begin_, stride_;
};

template <class Lane>
UNISONO_PROGRAM void settle(Lane& lane) {
  if constexpr (requires { lane.settle(); }) lane.settle();
}

// Gives the pieces of each round before it takes those of the round before, so that pieces travel during the
// work. Every other worker takes first: while half of the workers fill the links, the others combine.
template <class Lane, class Give, class Take>
UNISONO_PROGRAM void one_ahead(const Lane& lane, Rounds rounds, const Give& give, const Take& take) {
  const bool takes_first = lane.worker() % 2 == 1;
  Rounds ahead = rounds;
  if (ahead.more()) give(ahead.range());
  for (; rounds.more(); rounds.next()) {
    ahead.next();
    if (ahead.more() && !takes_first) give(ahead.range());
    take(rounds.range());
    if (ahead.more() && takes_first) give(ahead.range());
  }
}

// Returns a rank's peer in a step from 1 to size(). No two ranks have the same; the last is the rank itself.
template <class Lane>
UNISONO_PORTABLE int peer_at(const Lane& lane, int step) {
  const int at = lane.rank() + step;
  return at < lane.size() ? at : at - lane.size();
}

// Returns when every rank has called it: the data of earlier calls may then be read and overwritten. Calls
// `meanwhile`, which must not touch a peer's memory, while the ranks meet. Does nothing on lanes without
// `announce`: their ranks have met, since they exchange tickets before a direct call.
template <class Lane, class Work>
UNISONO_PROGRAM void meet_first(Lane& lane, const Work& meanwhile) {
  if constexpr (requires { lane.announce(Slot::meet); }) {
    lane.announce(Slot::meet);
    meanwhile();
    for (int i = 1; i < lane.size(); ++i) lane.wait(peer_at(lane, i), Slot::meet);
  }
}
template <class Lane>
UNISONO_PROGRAM void meet_first(Lane& lane) {
  meet_first(lane, [] {});
}

// Meets all ranks. Then moves bytes(p) of each rank p by move(p, range), in peer_at's order. This rank's own
// pieces go between those of peers, so that the links never idle for them; the first goes while the ranks
// meet.
template <class Lane, class Bytes, class Move>
UNISONO_PROGRAM void meet_in_turn(Lane& lane, const Bytes& bytes, const Move& move) {
  const int n = lane.size(), me = lane.rank();
  Rounds own(lane, bytes(me), lane.tile_bytes());
  meet_first(lane, [&] {
    if (!own.more()) return;
    move(me, own.range());
    own.next();
  });
  int before_own = n > 2 ? 1 + lane.worker() % (n - 1) : 1;
  for (int i = 1; i <= n; ++i) {  // the rest of its own part at last
    const int p = peer_at(lane, i);
    for (Rounds r = p == me ? own : Rounds(lane, bytes(p), lane.tile_bytes()); r.more(); r.next()) {
      move(p, r.range());
      if (p == me || --before_own > 0 || !own.more()) continue;
      move(me, own.range());
      own.next();
      before_own = n - 1;
    }
  }
}

// Returns the shard of `rank` if the root has none: only what leaves or enters the root then bounds a call.
UNISONO_PORTABLE constexpr Range share_without(std::size_t bytes, int ranks, int root, int rank) {
  return rank == root ? Range{} : block_of(bytes, shard_bytes(bytes, ranks - 1), rank - (rank > root));
}

// Returns the part of a rooted collective's `bytes` that this rank works on.
template <class Lane>
UNISONO_PORTABLE Range share_of(const Lane& lane, std::size_t bytes, int root) {
  const int n = lane.size(), me = lane.rank();
  if (!Lane::kLinked || n == 1) return block_of(bytes, shard_bytes(bytes, n), me);
  return share_without(bytes, n, root, me);
}

// Returns, alike on every rank, whether an operating system's kernel copies between the ranks' buffers: no
// move then has two far operands for the price of one.
template <class Lane>
UNISONO_PORTABLE bool copies_far(const Lane& lane) {
  if constexpr (requires { lane.copies_far(); }) return lane.copies_far();
  else return false;
}

// Returns when every rank has called it. Data that any rank wrote before its call is then readable.
template <class Lane>
UNISONO_PROGRAM void meet(Lane& lane) {
  for (int i = 1; i < lane.size(); ++i) lane.signal(peer_at(lane, i), Slot::meet);
  for (int i = 1; i < lane.size(); ++i) lane.wait(peer_at(lane, i), Slot::meet);
}

}  // namespace unisono
