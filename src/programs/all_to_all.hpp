// all_to_all: rank r gets, in rank order, everyone's block r; all_to_all_v and batch_send_recv, with a size
// for every pair.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// A round moves a piece of every pair. A piece has gone before the piece that takes its place arrives,
// so equal parts may be exchanged in place.
template <class Channel>
UNISONO_PROGRAM void all_to_all_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  auto block = [&](byte* of, int p) {
    return Args::Part{of + a.block * static_cast<std::size_t>(p), a.block};
  };
  auto sent = [&](int p) { return a.sends ? a.sends[p] : block(const_cast<byte*>(a.in), p); };
  auto received = [&](int p) { return a.receives ? a.receives[p] : block(a.out, p); };
  std::size_t longest = a.block;
  if (a.sends)
    for (int p = 0; p < n; ++p) {
      longest = longest < sent(p).bytes ? sent(p).bytes : longest;
      longest = longest < received(p).bytes ? received(p).bytes : longest;
    }
  one_ahead(
      lane, Rounds(lane, longest, channel.capacity()),
      [&](Range round) {
        for (int i = 1; i < n; ++i) {
          const int p = peer_at(lane, i);
          const auto s = sent(p);
          if (round.begin < s.bytes)
            channel.put(p, s.at + round.begin, smaller(round.bytes, s.bytes - round.begin));
        }
        const auto own = sent(me);
        if (round.begin >= own.bytes) return;
        const byte* from = own.at + round.begin;
        const Dst to{received(me).at + round.begin, a.stream};
        if (to.at != from) lane.move(&to, 1, &from, 1, smaller(round.bytes, own.bytes - round.begin));
      },
      [&](Range round) {
        for (int i = 1; i < n; ++i) {
          const int p = peer_at(lane, n - i);
          const auto s = received(p);
          if (round.begin < s.bytes)
            channel.take(p, {s.at + round.begin, a.stream}, smaller(round.bytes, s.bytes - round.begin));
        }
      });
}

// On buffers that everyone reaches, out of place. Where loads are as good as stores I read my block from each
// rank; elsewhere, and with sizes by pair (outputs[p] is where rank p wants my part), I write to each rank
// its block.
template <class Lane>
UNISONO_PROGRAM void all_to_all_direct(Lane& lane, const Args& a) {
  const bool pulls = Lane::kPulls && !a.sends;
  const int me = lane.rank();
  auto block = [&](int p) { return a.block * static_cast<std::size_t>(p); };
  meet_in_turn(
      lane, [&](int p) { return a.sends ? a.sends[p].bytes : a.block; },
      [&](int p, Range piece) {
        const byte* source = a.sends             ? a.sends[p].at
                             : p == me || !pulls ? a.in + block(p)
                                                 : a.inputs[p] + block(me);
        byte* target = pulls ? a.out + block(p) : a.outputs[p] + (a.sends ? 0 : block(me));
        const byte* from = source + piece.begin;
        const Dst to{target + piece.begin, a.stream};
        lane.move(&to, 1, &from, 1, piece.bytes);
      });
  meet(lane);
}

// What a GPU's SMs do beside copy engines: from each of these inputs to the output of the same number, the
// peers' first.
template <class Lane>
UNISONO_PROGRAM void copy_beside(Lane& lane, const Args& a) {
  for (int i = 1; i <= lane.size(); ++i) {
    const int p = peer_at(lane, i);
    for (Rounds r(lane, a.sends[p].bytes, lane.tile_bytes()); r.more(); r.next()) {
      const byte* from = a.inputs[p] + r.range().begin;
      const Dst to{a.outputs[p] + r.range().begin, a.stream};
      lane.move(&to, 1, &from, 1, r.range().bytes);
    }
  }
}

}  // namespace unisono
