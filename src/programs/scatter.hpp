// scatter: rank r gets block r of the root's input.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends each block from the root. In place is safe: the root's output is then its block of its input.
template <class Channel>
UNISONO_PROGRAM void scatter_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size();
  for (Rounds r(lane, a.block, channel.capacity()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    const Dst to{a.out + begin, a.stream};
    if (lane.rank() != a.root) {
      channel.take(a.root, to, bytes);
      continue;
    }
    auto at = [&](int p) { return a.in + block_of(a.bytes, a.block, p).begin + begin; };
    for (int i = 1; i < n; ++i) channel.put(peer_at(lane, i), at(peer_at(lane, i)), bytes);
    if (const byte* own = at(a.root); own != to.at) lane.move(&to, 1, &own, 1, bytes);
  }
}

// Works on an input that every rank reaches: each rank reads its own block.
template <class Lane>
UNISONO_PROGRAM void scatter_direct(Lane& lane, const Args& a) {
  meet_first(lane);
  const byte* mine = a.inputs[a.root] + a.block * static_cast<std::size_t>(lane.rank());
  for (Rounds r(lane, mine == a.out ? 0 : a.block, lane.tile_bytes()); r.more(); r.next()) {
    const byte* from = mine + r.range().begin;
    const Dst to{a.out + r.range().begin, a.stream};
    lane.move(&to, 1, &from, 1, r.range().bytes);
  }
  meet(lane);
}

}  // namespace unisono
