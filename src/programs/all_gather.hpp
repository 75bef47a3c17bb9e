// all_gather: everyone gets everyone's block, in rank order.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends each piece to every peer. In place is safe: the input is then the rank's block of the output.
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

// Works on buffers that every rank reaches. On a lane that pulls, a rank reads everyone's block. On others it
// writes its own block to every output.
template <class Lane>
UNISONO_PROGRAM void all_gather_direct(Lane& lane, const Args& a) {
  const int me = lane.rank();
  auto block = [&](int p) { return block_of(a.bytes, a.block, Lane::kPulls ? p : me); };
  meet_in_turn(
      lane, [&](int p) { return block(p).bytes; },
      [&](int p, Range piece) {
        const byte* from = (Lane::kPulls && p != me ? a.inputs[p] : a.in) + piece.begin;
        byte* target = Lane::kPulls ? a.out : a.outputs[p];
        const Dst to{target + block(p).begin + piece.begin, a.stream};
        if (to.at != from) lane.move(&to, 1, &from, 1, piece.bytes);
      });
  meet(lane);
}

}  // namespace unisono
