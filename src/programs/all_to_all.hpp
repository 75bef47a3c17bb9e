// all_to_all: rank r gets, in rank order, everyone's block r; all_to_all_v, with a size for every pair.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Round k moves the k-th piece of every pair. A piece has gone before the piece that takes its place arrives, so equal parts
// may be exchanged in place.
template <class Channel>
UNISONO_PROGRAM void all_to_all_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  auto sent = [&](int p) {
    return a.sends ? a.sends[p] : Args::Part{a.block * static_cast<std::size_t>(p), a.block};
  };
  auto received = [&](int p) {
    return a.receives ? a.receives[p] : Args::Part{a.block * static_cast<std::size_t>(p), a.block};
  };
  std::size_t longest = a.block;
  if (a.sends)
    for (int p = 0; p < n; ++p) {
      longest = longest < sent(p).bytes ? sent(p).bytes : longest;
      longest = longest < received(p).bytes ? received(p).bytes : longest;
    }
  for (Rounds r(lane, longest, channel.capacity()); r.more(); r.next()) {
    const auto [begin, step] = r.range();
    for (int i = 1; i < n; ++i) {
      const int p = peer_at(lane, i);
      if (const auto s = sent(p); begin < s.bytes)
        channel.put(p, a.in + s.offset + begin, smaller(step, s.bytes - begin));
    }
    if (const auto own = sent(me); begin < own.bytes) {
      const byte* from = a.in + own.offset + begin;
      const Dst to{a.out + received(me).offset + begin, a.stream};
      if (to.at != from) lane.move(&to, 1, &from, 1, smaller(step, own.bytes - begin));
    }
    for (int i = 1; i < n; ++i) {
      const int p = peer_at(lane, n - i);
      if (const auto s = received(p); begin < s.bytes)
        channel.take(p, {a.out + s.offset + begin, a.stream}, smaller(step, s.bytes - begin));
    }
  }
}

// On buffers that everyone reaches, out of place: I write to each rank its block. With sizes by pair, outputs[p] is where
// rank p wants mine.
template <class Lane>
UNISONO_PROGRAM void all_to_all_direct(Lane& lane, const Args& a) {
  meet(lane);
  for (int i = 0; i < lane.size(); ++i) {
    const int p = peer_at(lane, i);
    const auto sent = a.sends ? a.sends[p] : Args::Part{a.block * static_cast<std::size_t>(p), a.block};
    byte* theirs = a.outputs[p] + (a.sends ? 0 : a.block * static_cast<std::size_t>(lane.rank()));
    for (Rounds r(lane, sent.bytes, lane.tile_bytes()); r.more(); r.next()) {
      const auto [begin, bytes] = r.range();
      const byte* from = a.in + sent.offset + begin;
      const Dst to{theirs + begin, a.stream};
      lane.move(&to, 1, &from, 1, bytes);
    }
  }
  meet(lane);
}

}  // namespace unisono
