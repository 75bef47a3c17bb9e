// all_gather: everyone gets everyone's block, in rank order.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// In place (the input is my block of the output) is safe.
template <class Channel>
UNISONO_PROGRAM void all_gather_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  one_ahead(
      lane, Rounds(lane, a.block, channel.capacity()),
      [&](Range round) {
        const Range mine = piece_of(a, round, me);
        if (mine.bytes == 0) return;
        const byte* from = a.in + round.begin;
        put_all(channel, from, mine.bytes);
        const Dst to{a.out + mine.begin, a.stream};
        if (to.at != from) lane.move(&to, 1, &from, 1, mine.bytes);
      },
      [&](Range round) {
        for (int i = 1; i < n; ++i) {
          const int p = peer_at(lane, n - i);
          const Range s = piece_of(a, round, p);
          if (s.bytes > 0) channel.take(p, {a.out + s.begin, a.stream}, s.bytes);
        }
      });
}

// On buffers that everyone reaches. Where loads are as good as stores I read everyone's block; elsewhere I
// read mine once and write it to every output.
template <class Lane>
UNISONO_PROGRAM void all_gather_direct(Lane& lane, const Args& a) {
  const int n = lane.size(), me = lane.rank();
  meet_first(lane);
  for (int i = 0; i < (Lane::kPulls ? n : 1); ++i) {
    const int p = peer_at(lane, i);
    const Range block = block_of(a.bytes, a.block, p);
    for (Rounds r(lane, block.bytes, lane.tile_bytes()); r.more(); r.next()) {
      const std::size_t begin = r.range().begin;
      const byte* from = (p == me ? a.in : a.inputs[p]) + begin;
      auto dsts = lane.destinations();
      int targets = 0;
      for (int j = 0; j < (Lane::kPulls ? 1 : n); ++j) {
        byte* to = (Lane::kPulls ? a.out : a.outputs[peer_at(lane, j)]) + block.begin + begin;
        if (to != from) dsts[targets++] = {to, a.stream};
      }
      lane.move(dsts, targets, &from, 1, r.range().bytes);
    }
  }
  meet(lane);
}

}  // namespace unisono
