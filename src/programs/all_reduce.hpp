// all_reduce: everyone gets the combination, in rank order, of everyone's input.
#pragma once

#include "lane/channel.hpp"
#include "programs/all_gather.hpp"
#include "programs/reduce_scatter.hpp"

namespace unisono {

// Sends each input to everyone, and combines all: (n-1)·N bytes leave each rank, in one step. In place is
// safe.
template <class Channel>
UNISONO_PROGRAM void all_reduce_one_shot(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size();
  const auto give = [&](Range round) { put_all(channel, a.in + round.begin, round.bytes); };
  const auto take = [&](Range round) {
    const auto [begin, bytes] = round;
    auto srcs = lane.sources();
    for (int p = 0; p < n; ++p) srcs[p] = p == lane.rank() ? a.in + begin : channel.arrived(p, bytes);
    const Dst to{a.out + begin, a.stream};
    lane.move(&to, 1, srcs, n, bytes);
    for (int i = 1; i < n; ++i) channel.release(peer_at(lane, i));
  };
  some_ahead(channel, Rounds(lane, a.bytes, channel.capacity()), give, take);
}

// Sends each peer its shard of a round.
template <class Channel>
UNISONO_PROGRAM void put_shards(Channel& channel, const Args& a, Range round) {
  auto& lane = channel.lane;
  const std::size_t shard = shard_bytes(round.bytes, lane.size());
  for (int i = 1; i < lane.size(); ++i) {
    const Range s = block_of(round.bytes, shard, peer_at(lane, i));
    channel.put(peer_at(lane, i), a.in + round.begin + s.begin, s.bytes);
  }
}

// Combines this rank's shard of every input and sends the sum to everyone (Rabenseifner's reduce-scatter and
// all-gather, fused so that the sum is written once to all): 2·N·(n-1)/n bytes leave each rank, in two steps.
// In place is safe.
template <class Channel>
UNISONO_PROGRAM void all_reduce_two_shot(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  Rounds r(lane, a.bytes, channel.capacity() * static_cast<std::size_t>(n));
  Rounds next = r;
  if (next.more()) put_shards(channel, a, next.range());
  for (; r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    const std::size_t shard = shard_bytes(bytes, n);
    const Range mine = block_of(bytes, shard, me);
    auto srcs = lane.sources();
    auto dsts = lane.destinations();
    for (int p = 0; p < n; ++p)
      srcs[p] = p == me ? a.in + begin + mine.begin : channel.arrived(p, mine.bytes);
    dsts[0] = {a.out + begin + mine.begin, a.stream};
    for (int i = 1; i < n; ++i) dsts[i] = channel.reserve(peer_at(lane, i), mine.bytes);
    lane.move(dsts, n, srcs, n, mine.bytes);
    for (int i = 1; i < n; ++i) {
      channel.release(peer_at(lane, i));
      channel.commit(peer_at(lane, i), mine.bytes);
    }
    next.next();
    if (next.more()) put_shards(channel, a, next.range());  // the shards travel while the sums come in
    for (int i = 1; i < n; ++i) {
      const int p = peer_at(lane, n - i);
      const Range s = block_of(bytes, shard, p);
      channel.take(p, {a.out + begin + s.begin, a.stream}, s.bytes);
    }
  }
}

// Does the same, but stores the sums straight into the outputs, which every rank reaches: only stores cross
// between ranks. In place is safe: a shard has gone before its sum arrives.
template <class Channel>
UNISONO_PROGRAM void all_reduce_two_shot_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  one_ahead(
      lane, Rounds(lane, a.bytes, channel.capacity() * static_cast<std::size_t>(n)),
      [&](Range round) { put_shards(channel, a, round); },
      [&](Range round) {
        const Range mine = block_of(round.bytes, shard_bytes(round.bytes, n), me);
        const std::size_t begin = round.begin + mine.begin;
        auto srcs = lane.sources();
        auto dsts = lane.destinations();
        for (int p = 0; p < n; ++p) srcs[p] = p == me ? a.in + begin : channel.arrived(p, mine.bytes);
        for (int i = 0; i < n; ++i) dsts[i] = {a.outputs[peer_at(lane, i)] + begin, a.stream};
        lane.move(dsts, n, srcs, n, mine.bytes);
        for (int i = 1; i < n; ++i) channel.release(peer_at(lane, i));
      });
  meet(lane);
}

// Does the same on buffers that every rank reaches: n loads, one sum, n stores, no copy. In place is safe.
template <class Lane>
UNISONO_PROGRAM void all_reduce_two_shot_direct(Lane& lane, const Args& a) {
  const int n = lane.size();
  meet_first(lane);
  const Range mine = block_of(a.bytes, shard_bytes(a.bytes, n), lane.rank());
  for (Rounds r(lane, mine.bytes, lane.tile_bytes()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    auto srcs = lane.sources();
    auto dsts = lane.destinations();
    for (int p = 0; p < n; ++p) {
      srcs[p] = a.inputs[p] + mine.begin + begin;
      dsts[p] = {a.outputs[p] + mine.begin + begin, a.stream};
    }
    lane.move(dsts, n, srcs, n, bytes);
  }
  meet(lane);
}

// Does the SMs' part of an all_reduce by copy engines: combines inputs that lie with this rank.
template <class Lane>
UNISONO_PROGRAM void all_reduce_combine(Lane& lane, const Args& a) {
  for (Rounds r(lane, a.bytes, lane.tile_bytes()); r.more(); r.next()) {
    auto srcs = lane.sources();
    for (int p = 0; p < lane.size(); ++p) srcs[p] = a.inputs[p] + r.range().begin;
    const Dst to{a.out + r.range().begin, a.stream};
    lane.move(&to, 1, srcs, lane.size(), r.range().bytes);
  }
}

// Composes a reduce_scatter into the output and an all_gather in place, as every library does.
template <class Channel>
UNISONO_PROGRAM void all_reduce_reduce_scatter_all_gather(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  Args shards = a;
  shards.block = shard_bytes(a.bytes, lane.size());
  byte* mine = a.out + block_of(a.bytes, shards.block, lane.rank()).begin;
  shards.out = mine;
  reduce_scatter_push(channel, shards);
  settle(lane);
  shards.in = mine;
  shards.out = a.out;
  all_gather_push(channel, shards);
}

}  // namespace unisono
