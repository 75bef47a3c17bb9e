// What a program sees of the machine. A lane is one worker of one rank: a CPU thread, a CUDA thread block, an
// endpoint.
//
// The verbs of a lane (HostThread in host/, CudaBlock in cuda/device/, FabricEndpoint in fabric/; a program
// is a template over them):
//
// move(dsts, n_dsts, srcs, n_srcs, bytes)
//   Reads every source once, combines them in the order given with the wide accumulator, writes every
//   destination: copy, multicast, reduce or both.
// settle()
//   What the worker has moved may be read by its next moves. Only lanes of several threads have it.
// signal(peer, slot), wait(peer, slot)
//   Counting: the k-th wait returns after the k-th signal; what the peer wrote before its signal is readable
//   after the wait. A wait has a deadline.
// announce(slot)
//   A signal to every peer that stands for what earlier calls have written only.
// signal_note(peer, slot, note), wait_note(peer, slot)
//   A signal that brings a few bytes, on GPUs an address, and the wait that has them.
// put_packets(peer, src, bytes), take_packets(peer, dst, bytes)
//   Of the host lane: data and flag in one store; no signal needed. In two steps, as operands of a move:
//   packets_to(peer, bytes), commit_packets(peer, bytes); packets_from(peer, bytes).
// requantise(dsts, n_dsts, srcs, n_srcs, plain, count)
//   A move of `count` elements in their wire form (wire.hpp); the operands of `plain` hold elements, of
//   element_bytes(), and take part as they look on it.
//
// Where it is: rank() of size(), worker() of workers(). piece_bytes() is the most that a worker takes up at
// once; that and a chunk are 2·kAlign or more. kPulls says whether it had rather read from peers than write,
// kMulticasts whether a move to several peers costs less than one to each, kLinked whether what enters and
// leaves a rank bounds it, so that a root that has it all leaves the work to the others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"

namespace unisono {

// What a signal means. Counters of different slots are independent of each other.
enum class Slot : int { meet, chunk, chunk_credit, packet_credit, reply };
inline constexpr int kSlots = 5;
// In errors; packets have no signal, so that a wait for one is named after its credit's slot.
inline constexpr const char* kSlotNames[kSlots] = {"meet", "chunk", "chunk_credit", "packet", "reply"};

// `stream`: nobody reads it soon, so it need not stay in the cache.
struct Dst {
  byte* at;
  bool stream = false;
};

// The operands of a quantised move that hold elements, not their wire form; -1: none.
struct Plain {
  int src = -1, dst = -1;
};

// A call as a program sees it. Sizes are bytes and multiples of the element's size.
struct Args {
  const byte* in = nullptr;
  byte* out = nullptr;
  std::size_t bytes = 0;  // all_reduce, reduce, broadcast: the whole buffer; else: all blocks together
  std::size_t block = 0;  // bytes of a rank's block; the last one is shorter when `bytes` does not divide
  int root = 0;
  bool stream = false;                  // the outputs are large: write around the cache
  const byte* const* inputs = nullptr;  // of every rank, for programs that reach into peers' buffers
  byte* const* outputs = nullptr;
  // What goes to a peer, which is only read, or comes from it; null: nothing does.
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

// Block `index` of a buffer of `bytes` cut into blocks of `block`: empty past the end.
UNISONO_PORTABLE constexpr Range block_of(std::size_t bytes, std::size_t block, int index) {
  const std::size_t begin = smaller(block * static_cast<std::size_t>(index), bytes);
  return {begin, smaller(block, bytes - begin)};
}

// What of block `index` lies in a round of its blocks: the last block may be shorter than the others.
UNISONO_PORTABLE constexpr Range piece_of(const Args& a, Range round, int index) {
  const Range b = block_of(a.bytes, a.block, index);
  if (round.begin >= b.bytes) return {b.begin, 0};
  return {b.begin + round.begin, smaller(round.bytes, b.bytes - round.begin)};
}

// The bytes of one of `ranks` equal shards.
UNISONO_PORTABLE constexpr std::size_t shard_bytes(std::size_t bytes, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  return round_up((bytes + n - 1) / n, kAlign);
}

// The rounds of `step` bytes that fall to this worker: for (Rounds r(lane, bytes, step); r.more(); r.next())
// … r.range()
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

// Gives each round's pieces before it takes the last one's, so that they travel while it works. Every other
// worker gives after it has taken: while those of one kind fill the links, those of the other combine.
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

// The peers of a rank in the order in which it turns to them: at any moment each rank is turned to by one
// other.
template <class Lane>
UNISONO_PORTABLE int peer_at(const Lane& lane, int step) {
  const int at = lane.rank() + step;
  return at < lane.size() ? at : at - lane.size();
}

// Returns when every rank has called it; what any rank wrote in earlier calls may be read, and overwritten,
// after. Where ranks tell each other of a direct call before it, they have met; where not, `meanwhile` is
// done while they meet: work that touches nothing of a peer's.
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

// Meets all ranks, then moves what is between this rank and each other, bytes(p) of rank p, one peer after
// the other in peer_at's order; its own part goes between, a piece here and there, so that the links never
// idle for it, and the first piece while the ranks meet.
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
  for (int i = 1; i <= n; ++i) {  // what is left of its own at last
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

// The shard of `rank` where the root has none: what leaves or enters the root is then all that bounds it.
UNISONO_PORTABLE constexpr Range share_without(std::size_t bytes, int ranks, int root, int rank) {
  return rank == root ? Range{} : block_of(bytes, shard_bytes(bytes, ranks - 1), rank - (rank > root));
}

// What a rank does of a rooted collective's `bytes`.
template <class Lane>
UNISONO_PORTABLE Range share_of(const Lane& lane, std::size_t bytes, int root) {
  const int n = lane.size(), me = lane.rank();
  if (!Lane::kLinked || n == 1) return block_of(bytes, shard_bytes(bytes, n), me);
  return share_without(bytes, n, root, me);
}

// Returns when every rank has called it; what any rank wrote before is readable after.
template <class Lane>
UNISONO_PROGRAM void meet(Lane& lane) {
  for (int i = 1; i < lane.size(); ++i) lane.signal(peer_at(lane, i), Slot::meet);
  for (int i = 1; i < lane.size(); ++i) lane.wait(peer_at(lane, i), Slot::meet);
}

}  // namespace unisono
