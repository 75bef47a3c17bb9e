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

// Returns the shard that this rank of a reduce combines and writes to the root. On a linked lane the root has
// none, since only the sums then enter it, but with two ranks it has all. Where the kernel copies, the root
// has a larger one: of n inputs it copies n-1, and the others those and the sums. To add a source takes half
// as long as its copy, and a copy costs what kCall bytes more would. Pages are not shared, and a few of them
// are not worth the calls (docs/notes/host-kernel.md).
template <class Lane>
UNISONO_PORTABLE Range reduced_by(const Lane& lane, std::size_t bytes, int root) {
  constexpr std::size_t kCall = std::size_t{16} << 10, kPage = 4096, kFew = 3 * kPage;
  const int n = lane.size(), me = lane.rank();
  if (Lane::kLinked && n == 2) return {0, me == root ? bytes : 0};
  if (n == 1 || !copies_far(lane)) return share_of(lane, bytes, root);
  const auto others = static_cast<std::size_t>(n - 1);
  const std::size_t costs = 3 * others + 2, all = 3 * others * others + costs;  // of a byte, in halves
  std::size_t roots = (bytes / all * costs + 2 * kCall * others / all) / kPage * kPage;
  if (bytes < roots + kFew) roots = bytes;
  if (me == root) return {0, roots};
  const Range rest = share_without(bytes - roots, n, root, me);
  return {roots + rest.begin, rest.bytes};
}

// Works on buffers that every rank reaches: each rank combines its shard and writes it to the root.
template <class Lane>
UNISONO_PROGRAM void reduce_direct(Lane& lane, const Args& a) {
  const int n = lane.size();
  meet_first(lane);
  const Range mine = reduced_by(lane, a.bytes, a.root);
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
