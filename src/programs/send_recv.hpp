// send, recv, and both at once, between pairs and in rings.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends `sent` bytes to `dst` and receives `received` from `src`; 0 bytes leave that half out. Both go piece
// by piece, so that a ring of such calls cannot lock up. If the channel tells what has come, a ring in which
// some ranks receive before they send cannot lock up either. A rank two pieces ahead gives only while nothing
// has come. If all ranks of a ring waited for room, each would have looked later than the one before it. Over
// a fabric a piece may come after the look for it: there no rank waits for room alone.
template <class Channel>
UNISONO_PROGRAM void send_recv_push(Channel& channel, int dst, std::size_t sent, int src,
                                    std::size_t received, const Args& a) {
  auto& lane = channel.lane;
  auto give = [&](Range round) {
    if (round.begin < sent) channel.put(dst, a.in + round.begin, smaller(round.bytes, sent - round.begin));
  };
  auto take = [&](Range round) {
    if (round.begin < received)
      channel.take(src, {a.out + round.begin, a.stream}, smaller(round.bytes, received - round.begin));
  };
  if constexpr (requires { channel.comes_before_room(src, dst, true); }) {
    Rounds gives(lane, sent, channel.capacity()), takes(lane, received, channel.capacity());
    int ahead = 0;
    bool patient = true;  // whether something has come in the last wait
    auto take_next = [&] {
      if (!takes.more() || !gives.more()) return takes.more();
      if (ahead < 2) return false;
      patient = channel.comes_before_room(src, dst, patient);
      return patient;
    };
    while (gives.more() || takes.more()) {
      if (take_next()) {
        take(takes.range());
        takes.next();
        --ahead;
      } else {
        give(gives.range());
        gives.next();
        ++ahead;
      }
    }
  } else {
    one_ahead(lane, Rounds(lane, sent < received ? received : sent, channel.capacity()), give, take);
  }
}

// Does the same if receivers tell their senders an address. mine: this rank's output as `src` reaches it, to
// which the data goes at once; null: the data goes through chunks.
template <class Channel>
UNISONO_PROGRAM void send_recv_told(Channel& channel, int dst, std::size_t sent, int src,
                                    std::size_t received, byte* mine, const Args& a) {
  auto& lane = channel.lane;
  const Rounds rounds(lane, sent < received ? received : sent, channel.capacity());
  if (!rounds.more()) return;  // the peers' workers of this number return too: no signal is left over
  if (received > 0) lane.signal_note(src, Slot::reply, mine);
  byte* const theirs = sent > 0 ? lane.wait_note(dst, Slot::reply) : nullptr;
  one_ahead(
      lane, rounds,
      [&](Range round) {
        if (round.begin >= sent) return;
        const byte* from = a.in + round.begin;
        const std::size_t bytes = smaller(round.bytes, sent - round.begin);
        if (!theirs) return channel.put(dst, from, bytes);
        const Dst to{theirs + round.begin, a.stream};
        lane.move(&to, 1, &from, 1, bytes);
      },
      [&](Range round) {
        if (mine || round.begin >= received) return;
        if (theirs) settle(lane);  // in place, what has not been read yet must not be overwritten
        channel.take(src, {a.out + round.begin, a.stream}, smaller(round.bytes, received - round.begin));
      });
  if (theirs) lane.signal(dst, Slot::meet);
  if (mine && received > 0) lane.wait(src, Slot::meet);
}

}  // namespace unisono
