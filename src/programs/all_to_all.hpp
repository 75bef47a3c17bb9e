// all_to_all: rank r gets everyone's block r, in rank order. all_to_all_v, batch_send_recv: a size for each
// pair.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Return this rank's part for rank p, and its part from rank p.
UNISONO_PORTABLE inline Args::Part part_for(const Args& a, int p) {
  if (a.sends) return a.sends[p];
  return {const_cast<byte*>(a.in) + a.block * static_cast<std::size_t>(p), a.block};
}
UNISONO_PORTABLE inline Args::Part part_from(const Args& a, int p) {
  if (a.receives) return a.receives[p];
  return {a.out + a.block * static_cast<std::size_t>(p), a.block};
}

// Moves a piece of every pair in each round, by put(p, source, piece) and take(p, target, piece). A piece has
// gone before take() writes to its place: equal parts may be exchanged in place.
template <class Channel, class Put, class Take>
UNISONO_PROGRAM void all_to_all_rounds(Channel& channel, const Args& a, const Put& put, const Take& take) {
  auto& lane = channel.lane;
  const int n = lane.size(), me = lane.rank();
  std::size_t longest = a.block;
  if (a.sends)
    for (int p = 0; p < n; ++p) {
      longest = longest < a.sends[p].bytes ? a.sends[p].bytes : longest;
      longest = longest < a.receives[p].bytes ? a.receives[p].bytes : longest;
    }
  auto piece = [](const Args::Part& part, Range round) {
    return Range{round.begin, smaller(round.bytes, part.bytes - round.begin)};
  };
  one_ahead(
      lane, Rounds(lane, longest, channel.capacity()),
      [&](Range round) {
        for (int i = 1; i < n; ++i) {
          const int p = peer_at(lane, i);
          const auto part = part_for(a, p);
          if (round.begin < part.bytes) put(p, part.at + round.begin, piece(part, round));
        }
        const auto own = part_for(a, me);
        if (round.begin >= own.bytes) return;
        const byte* from = own.at + round.begin;
        const Dst to{part_from(a, me).at + round.begin, a.stream};
        if (to.at != from) lane.move(&to, 1, &from, 1, piece(own, round).bytes);
      },
      [&](Range round) {
        for (int i = 1; i < n; ++i) {
          const int p = peer_at(lane, n - i);
          const auto part = part_from(a, p);
          if (round.begin < part.bytes) take(p, part.at + round.begin, piece(part, round));
        }
      });
}

template <class Channel>
UNISONO_PROGRAM void all_to_all_push(Channel& channel, const Args& a) {
  all_to_all_rounds(
      channel, a, [&](int p, const byte* from, Range piece) { channel.put(p, from, piece.bytes); },
      [&](int p, byte* to, Range piece) { channel.take(p, {to, a.stream}, piece.bytes); });
}

// Moves parts if receivers tell senders addresses. outputs[p] is this rank's part from rank p, as p reaches
// it: its data goes there at once. null: its data goes through chunks.
template <class Channel>
UNISONO_PROGRAM void all_to_all_told(Channel& channel, const Args& a) {
  auto& lane = channel.lane;
  const int n = lane.size();
  // a worker announces only parts that it has rounds of, so that every signal is waited for
  auto mine = [&](const Args::Part& part) { return Rounds(lane, part.bytes, channel.capacity()).more(); };
  for (int i = 1; i < n; ++i) {
    const int p = peer_at(lane, n - i);
    if (mine(a.receives[p])) lane.signal_note(p, Slot::reply, a.outputs[p]);
  }
  Dst* const theirs = lane.destinations();
  for (int i = 1; i < n; ++i) {
    const int p = peer_at(lane, i);
    theirs[p].at = mine(a.sends[p]) ? lane.wait_note(p, Slot::reply) : nullptr;
  }
  all_to_all_rounds(
      channel, a,
      [&](int p, const byte* from, Range piece) {
        if (!theirs[p].at) return channel.put(p, from, piece.bytes);
        const Dst to{theirs[p].at + piece.begin, a.stream};
        lane.move(&to, 1, &from, 1, piece.bytes);
      },
      [&](int p, byte* to, Range piece) {
        if (a.outputs[p]) return;
        if (theirs[p].at) settle(lane);
        channel.take(p, {to, a.stream}, piece.bytes);
      });
  for (int i = 1; i < n; ++i)
    if (const int p = peer_at(lane, i); theirs[p].at) lane.signal(p, Slot::meet);
  for (int i = 1; i < n; ++i)
    if (const int p = peer_at(lane, n - i); a.outputs[p] && mine(a.receives[p])) lane.wait(p, Slot::meet);
}

// Works on buffers that every rank reaches, out of place. On a lane that pulls, a rank reads its block from
// each rank. On others it writes to each rank its block.
template <class Lane>
UNISONO_PROGRAM void all_to_all_direct(Lane& lane, const Args& a) {
  constexpr bool pulls = Lane::kPulls;
  const int me = lane.rank();
  auto block = [&](int p) { return a.block * static_cast<std::size_t>(p); };
  meet_in_turn(
      lane, [&](int) { return a.block; },
      [&](int p, Range piece) {
        const byte* source = p == me || !pulls ? a.in + block(p) : a.inputs[p] + block(me);
        byte* target = pulls ? a.out + block(p) : a.outputs[p] + block(me);
        const byte* from = source + piece.begin;
        const Dst to{target + piece.begin, a.stream};
        lane.move(&to, 1, &from, 1, piece.bytes);
      });
  meet(lane);
}

// Does the SMs' part beside copy engines: copies each of these inputs to the output of the same number, the
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
