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

// To an output that everyone reaches: each rank writes its own block.
template <class Lane>
UNISONO_PROGRAM void gather_direct(Lane& lane, const Args& a) {
  meet_first(lane);
  byte* mine = a.outputs[a.root] + a.block * static_cast<std::size_t>(lane.rank());
  for (Rounds r(lane, mine == a.in ? 0 : a.block, lane.tile_bytes()); r.more(); r.next()) {
    const byte* from = a.in + r.range().begin;
    const Dst to{mine + r.range().begin, a.stream};
    lane.move(&to, 1, &from, 1, r.range().bytes);
  }
  meet(lane);
}

}  // namespace unisono
