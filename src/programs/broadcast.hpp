// broadcast: everyone gets the root's input.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends the whole input from the root to each rank: (n-1)·N bytes leave the root, in one step.
template <class Channel>
UNISONO_PROGRAM void broadcast_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  for (Rounds r(lane, a.bytes, channel.capacity()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    const Dst to{a.out + begin, a.stream};
    if (lane.rank() != a.root) {
      channel.take(a.root, to, bytes);
      continue;
    }
    const byte* from = a.in + begin;
    put_all(channel, from, bytes);
    if (to.at != from) lane.move(&to, 1, &from, 1, bytes);
  }
}

// Sends each rank a shard, which the rank passes on to the others (van de Geijn's scatter and all-gather, by
// rounds). The root's own shard goes straight to everyone: 2·N·(n-1)/n bytes leave the root, in two steps.
template <class Channel>
UNISONO_PROGRAM void broadcast_scatter_all_gather(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  for (Rounds r(lane, a.bytes, channel.capacity() * static_cast<std::size_t>(n)); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    const std::size_t shard = shard_bytes(bytes, n);
    byte* to = a.out + begin;
    const Range mine = block_of(bytes, shard, me), roots = block_of(bytes, shard, a.root);
    if (me == a.root) {
      const byte* from = a.in + begin;
      for (int i = 1; i < n; ++i) {
        const int p = peer_at(lane, i);
        const Range s = block_of(bytes, shard, p);
        channel.put(p, from + s.begin, s.bytes);
        channel.put(p, from + roots.begin, roots.bytes);
      }
      const Dst whole{to, a.stream};
      if (to != from) lane.move(&whole, 1, &from, 1, bytes);
      continue;
    }
    channel.take(a.root, {to + mine.begin}, mine.bytes);
    settle(lane);
    for (int i = 1; i < n; ++i)
      if (const int p = peer_at(lane, i); p != a.root) channel.put(p, to + mine.begin, mine.bytes);
    channel.take(a.root, {to + roots.begin, a.stream}, roots.bytes);
    for (int i = 1; i < n; ++i) {
      const int p = peer_at(lane, n - i);
      const Range s = block_of(bytes, shard, p);
      if (p != a.root) channel.take(p, {to + s.begin, a.stream}, s.bytes);
    }
  }
}

// Passes every piece on from each rank to the next, in a pipelined chain: a rank sends to one other and
// receives from one other.
template <class Channel>
UNISONO_PROGRAM void broadcast_chain(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  const int next = peer_at(lane, 1), last = peer_at(lane, n - 1);
  const bool begins = me == a.root, ends = next == a.root;
  for (Rounds r(lane, a.bytes, channel.capacity()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    const byte* from = begins ? a.in + begin : channel.arrived(last, bytes);
    auto dsts = lane.destinations();
    int targets = 0;
    if (!ends) dsts[targets++] = channel.reserve(next, bytes);
    if (a.out + begin != from) dsts[targets++] = {a.out + begin, a.stream};
    lane.move(dsts, targets, &from, 1, bytes);
    if (!ends) channel.commit(next, bytes);
    if (!begins) channel.release(last);
  }
}

// Has each rank read the root's input by itself, while the root copies its own. A root in place has nothing
// to copy: it writes the end of each output.
template <class Lane>
UNISONO_PROGRAM void broadcast_far(Lane& lane, const Args& a) {
  const int n = lane.size(), me = lane.rank();
  const byte* from = a.inputs[a.root];
  const bool in_place = a.outputs[a.root] == from;
  const std::size_t read =
      in_place ? smaller(round_up(a.bytes - a.bytes / static_cast<std::size_t>(n), kAlign), a.bytes)
               : a.bytes;
  auto move = [&](int p, Range range) {
    const Dst to{a.outputs[p] + range.begin, a.stream};
    const byte* source = from + range.begin;
    lane.move(&to, 1, &source, 1, range.bytes);
  };
  if (me != a.root) move(me, {0, read});
  else if (!in_place) move(me, {0, a.bytes});
  else
    for (int i = 1; i < n; ++i) move(peer_at(lane, i), {read, a.bytes - read});
  meet(lane);
}

// Works on buffers that every rank reaches: each rank reads its shard of the root's input once and writes it
// to every output. On a linked lane the root has no shard: the others' reads take up all that it can send.
template <class Lane>
UNISONO_PROGRAM void broadcast_direct(Lane& lane, const Args& a) {
  if (copies_far(lane)) return broadcast_far(lane, a);
  const int n = lane.size();
  meet_first(lane);
  const Range mine = share_of(lane, a.bytes, a.root);
  for (Rounds r(lane, mine.bytes, lane.tile_bytes()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    const byte* from = a.inputs[a.root] + mine.begin + begin;
    auto dsts = lane.destinations();
    int targets = 0;
    for (int i = 0; i < n; ++i) {
      byte* to = a.outputs[peer_at(lane, i)] + mine.begin + begin;
      if (to != from) dsts[targets++] = {to, a.stream};
    }
    lane.move(dsts, targets, &from, 1, bytes);
  }
  meet(lane);
}

}  // namespace unisono
