// all_reduce in wire form, a byte for each element and a scale for each block (wire.hpp): about a quarter of
// the traffic of f32, half of the traffic of bf16.
#pragma once

#include "base/wire.hpp"
#include "lane/channel.hpp"

namespace unisono {

// Sends each peer its shard of a round. Units: ranges count elements.
template <class Channel>
UNISONO_PROGRAM void put_shards_quantised(Channel& channel, const Args& a, Range round) {
  auto& lane = channel.lane;
  const std::size_t shard = shard_bytes(round.bytes, lane.size());
  for (int i = 1; i < lane.size(); ++i) {
    const int p = peer_at(lane, i);
    const Range s = block_of(round.bytes, shard, p);
    const byte* from = a.in + (round.begin + s.begin) * lane.element_bytes();
    const Dst to = channel.reserve(p, wire::bytes_of(s.bytes));
    lane.requantise(&to, 1, &from, 1, {.src = 0}, s.bytes);
    channel.commit(p, wire::bytes_of(s.bytes));
  }
}

// Combines this rank's shard of every quantised input, and sends everyone the quantised sum: two shots. The
// rank's own input and output are quantised too, and blocks lie at multiples of 32 elements of the whole
// buffer. Therefore no bit depends on who combines what. Units: ranges count elements. In place is safe.
template <class Channel>
UNISONO_PROGRAM void all_reduce_quantised(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  const std::size_t element = lane.element_bytes();
  static_assert(wire::bytes_of(kAlign) <= 2 * kAlign);  // the least that a channel has room for
  const std::size_t most = wire::count_in(channel.capacity()) / kAlign * kAlign;
  Rounds r(lane, a.bytes / element, most * static_cast<std::size_t>(n));
  Rounds next = r;
  if (next.more()) put_shards_quantised(channel, a, next.range());
  for (; r.more(); r.next()) {
    const auto [begin, count] = r.range();
    const std::size_t shard = shard_bytes(count, n);
    const Range mine = block_of(count, shard, me);
    const std::size_t own = (begin + mine.begin) * element, bytes = wire::bytes_of(mine.bytes);
    auto srcs = lane.sources();
    auto dsts = lane.destinations();
    for (int p = 0; p < n; ++p) srcs[p] = p == me ? a.in + own : channel.arrived(p, bytes);
    dsts[0] = {a.out + own};
    for (int i = 1; i < n; ++i) dsts[i] = channel.reserve(peer_at(lane, i), bytes);
    lane.requantise(dsts, n, srcs, n, {.src = me, .dst = 0}, mine.bytes);
    for (int i = 1; i < n; ++i) {
      channel.release(peer_at(lane, i));
      channel.commit(peer_at(lane, i), bytes);
    }
    next.next();
    if (next.more()) put_shards_quantised(channel, a, next.range());  // shards travel while sums come in
    for (int i = 1; i < n; ++i) {
      const int p = peer_at(lane, n - i);
      const Range s = block_of(count, shard, p);
      const byte* from = channel.arrived(p, wire::bytes_of(s.bytes));
      const Dst to{a.out + (begin + s.begin) * element};
      lane.requantise(&to, 1, &from, 1, {.dst = 0}, s.bytes);
      channel.release(p);
    }
  }
}

}  // namespace unisono
