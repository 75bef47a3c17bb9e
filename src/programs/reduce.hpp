// reduce: the root gets the combination, in rank order, of everyone's input.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

template <class Channel>
UNISONO_PROGRAM void reduce_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  for (Rounds r(lane, a.bytes, one_way(channel, a.bytes)); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    if (me != a.root) {
      channel.put(a.root, a.in + begin, bytes);
      continue;
    }
    auto srcs = lane.sources();
    for (int p = 0; p < n; ++p) srcs[p] = p == me ? a.in + begin : channel.arrived(p, bytes);
    const Dst to{a.out + begin, a.stream};
    lane.move(&to, 1, srcs, n, bytes);
    for (int i = 1; i < n; ++i) channel.release(peer_at(lane, i));
  }
}

// Combines a shard on each rank except the root, and writes the sum to the root's output, which every rank
// reaches (Rabenseifner's reduce-scatter and gather). Only stores cross between ranks.
template <class Channel>
UNISONO_PROGRAM void reduce_two_shot_push(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  auto piece = [&](Range round, int p) {
    const Range share = share_without(round.bytes, n, a.root, p);
    return Range{round.begin + share.begin, share.bytes};
  };
  one_ahead(
      lane, Rounds(lane, a.bytes, channel.capacity() * static_cast<std::size_t>(n - 1)),
      [&](Range round) {
        for (int i = 1; i < n; ++i)
          if (const int p = peer_at(lane, i); p != a.root)
            channel.put(p, a.in + piece(round, p).begin, piece(round, p).bytes);
      },
      [&](Range round) {
        if (me == a.root) return;
        const Range mine = piece(round, me);
        auto srcs = lane.sources();
        for (int p = 0; p < n; ++p) srcs[p] = p == me ? a.in + mine.begin : channel.arrived(p, mine.bytes);
        const Dst to{a.outputs[a.root] + mine.begin, a.stream};
        lane.move(&to, 1, srcs, n, mine.bytes);
        for (int i = 1; i < n; ++i) channel.release(peer_at(lane, i));
      });
  meet(lane);
}

// Works on buffers that every rank reaches: each rank combines its shard and writes it to the root. On a
// linked lane the root has no shard: only the sums enter it. With two ranks the root has it all.
template <class Lane>
UNISONO_PROGRAM void reduce_direct(Lane& lane, const Args& a) {
  const int n = lane.size();
  meet_first(lane);
  const Range mine = Lane::kLinked && n == 2 ? Range{0, lane.rank() == a.root ? a.bytes : 0}
                                             : share_of(lane, a.bytes, a.root);
  for (Rounds r(lane, mine.bytes, lane.tile_bytes()); r.more(); r.next()) {
    const auto [begin, bytes] = r.range();
    auto srcs = lane.sources();
    for (int p = 0; p < n; ++p) srcs[p] = a.inputs[p] + mine.begin + begin;
    const Dst to{a.outputs[a.root] + mine.begin + begin, a.stream};
    lane.move(&to, 1, srcs, n, bytes);
  }
  meet(lane);
}

}  // namespace unisono
