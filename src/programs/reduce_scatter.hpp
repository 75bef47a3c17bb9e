// reduce_scatter: rank r gets the combination, in rank order, of everyone's block r.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends each peer its block. In place is safe: the output is then the rank's block of the input, which is
// overwritten after the peers' data has gone.
template <class Channel>
UNISONO_PROGRAM void reduce_scatter_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  one_ahead(
      lane, Rounds(lane, a.block, channel.capacity()),
      [&](Range round) {
        for (int i = 1; i < n; ++i) {
          const int p = peer_at(lane, i);
          if (const Range s = piece_of(a, round, p); s.bytes > 0) channel.put(p, a.in + s.begin, s.bytes);
        }
      },
      [&](Range round) {
        const Range mine = piece_of(a, round, me);
        if (mine.bytes == 0) return;
        auto srcs = lane.sources();
        for (int p = 0; p < n; ++p) srcs[p] = p == me ? a.in + mine.begin : channel.arrived(p, mine.bytes);
        const Dst to{a.out + round.begin, a.stream};
        lane.move(&to, 1, srcs, n, mine.bytes);
        for (int i = 1; i < n; ++i) channel.release(peer_at(lane, i));
      });
}

// Works on buffers that every rank reaches: a rank reads its block of every input. In place is safe.
template <class Lane>
UNISONO_PROGRAM void reduce_scatter_direct(Lane& lane, const Args& a) {
  const int n = lane.size();
  meet_first(lane);
  const Range mine = block_of(a.bytes, a.block, lane.rank());
  for (Rounds r(lane, mine.bytes, lane.tile_bytes()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    auto srcs = lane.sources();
    for (int p = 0; p < n; ++p) srcs[p] = a.inputs[p] + mine.begin + begin;
    const Dst to{a.out + begin, a.stream};
    lane.move(&to, 1, srcs, n, bytes);
    settle(lane);  // loads carry more if the threads of a worker keep together, in large pieces
  }
  meet(lane);
}

}  // namespace unisono
