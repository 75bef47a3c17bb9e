// gather: the root gets everyone's block, in rank order.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// In place (the root's input is its block of its output) is safe.
template <class Channel>
UNISONO_PROGRAM void gather_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size();
  for (Rounds r(lane, a.block, channel.capacity()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    const byte* from = a.in + begin;
    if (lane.rank() != a.root) {
      channel.put(a.root, from, bytes);
      continue;
    }
    auto at = [&](int p) { return Dst{a.out + block_of(a.bytes, a.block, p).begin + begin, a.stream}; };
    if (const Dst own = at(a.root); own.at != from) lane.move(&own, 1, &from, 1, bytes);
    for (int i = 1; i < n; ++i) channel.take(peer_at(lane, i), at(peer_at(lane, i)), bytes);
  }
}

// On buffers that everyone reaches: each rank writes its own block, so that all have as much to do; between
// GPUs all but its last n-th, which the root reads.
template <class Lane>
UNISONO_PROGRAM void gather_direct(Lane& lane, const Args& a) {
  const int n = lane.size(), me = lane.rank();
  const std::size_t written = a.block - (Lane::kLinked ? smaller(shard_bytes(a.block, n), a.block) : 0);
  meet_first(lane);
  for (int i = 0; i < n; ++i) {
    const int p = peer_at(lane, i);
    if (me != a.root && p != me) continue;
    const std::size_t first = me == a.root && p != me ? written : 0, last = me == a.root ? a.block : written;
    for (Rounds r(lane, last - first, lane.tile_bytes()); r.more(); r.next()) {
      const std::size_t begin = first + r.range().begin;
      const byte* from = (p == me ? a.in : a.inputs[p]) + begin;
      const Dst to{a.outputs[a.root] + a.block * static_cast<std::size_t>(p) + begin, a.stream};
      if (to.at != from) lane.move(&to, 1, &from, 1, r.range().bytes);
    }
  }
  meet(lane);
}

}  // namespace unisono
