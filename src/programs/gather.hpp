// gather: the root gets everyone's block, in rank order.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends each block to the root. In place is safe: the root's input is then its block of its output.
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

// Works on an output that every rank reaches: each rank writes its own block. The root reads the end of large
// blocks itself if the lane says so (root_reads), and then reaches the inputs.
template <class Lane>
UNISONO_PROGRAM void gather_direct(Lane& lane, const Args& a) {
  const int me = lane.rank();
  std::size_t read = 0;
  if constexpr (requires { lane.root_reads(a.block); }) read = lane.root_reads(a.block);
  auto move = [&](int p, std::size_t first, std::size_t last) {
    byte* target = a.outputs[a.root] + a.block * static_cast<std::size_t>(p);
    const byte* source = p == me ? a.in : a.inputs[p];
    if (source == target) return;
    for (Rounds r(lane, last - first, lane.tile_bytes()); r.more(); r.next()) {
      const std::size_t begin = first + r.range().begin;
      const byte* from = source + begin;
      const Dst to{target + begin, a.stream};
      lane.move(&to, 1, &from, 1, r.range().bytes);
    }
  };
  meet_first(lane);
  if (me == a.root && read > 0)
    for (int i = 1; i < lane.size(); ++i) move(peer_at(lane, i), a.block - read, a.block);
  move(me, 0, me == a.root ? a.block : a.block - read);
  meet(lane);
}

}  // namespace unisono
