// reduce_scatter: rank r gets the combination, in rank order, of everyone's block r.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// In place (the output is my block of the input) is safe: what peers need of it has gone before it is
// overwritten.
template <class Channel>
UNISONO_PROGRAM void reduce_scatter_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  for (Rounds r(lane, a.block, channel.capacity()); r.more(); r.next()) {
    const std::size_t begin = r.range().begin, step = r.range().bytes;
    // the last block may be shorter than the others: what of this round lies within block p
    auto piece = [&](int p) {
      const Range b = block_of(a.bytes, a.block, p);
      return begin < b.bytes ? Range{b.begin + begin, smaller(step, b.bytes - begin)} : Range{b.begin, 0};
    };
    for (int i = 1; i < n; ++i) {
      const int p = peer_at(lane, i);
      if (const Range s = piece(p); s.bytes > 0) channel.put(p, a.in + s.begin, s.bytes);
    }
    const Range mine = piece(me);
    if (mine.bytes == 0) continue;
    auto srcs = lane.sources();
    for (int p = 0; p < n; ++p) srcs[p] = p == me ? a.in + mine.begin : channel.arrived(p, mine.bytes);
    const Dst to{a.out + begin, a.stream};
    lane.move(&to, 1, srcs, n, mine.bytes);
    for (int i = 1; i < n; ++i) channel.release(peer_at(lane, i));
  }
}

// On buffers that everyone reaches: I read my block of every input. In place is safe.
template <class Lane>
UNISONO_PROGRAM void reduce_scatter_direct(Lane& lane, const Args& a) {
  const int n = lane.size();
  meet(lane);
  const Range mine = block_of(a.bytes, a.block, lane.rank());
  for (Rounds r(lane, mine.bytes, lane.tile_bytes()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    auto srcs = lane.sources();
    for (int p = 0; p < n; ++p) srcs[p] = a.inputs[p] + mine.begin + begin;
    const Dst to{a.out + begin, a.stream};
    lane.move(&to, 1, srcs, n, bytes);
  }
  meet(lane);
}

}  // namespace unisono
