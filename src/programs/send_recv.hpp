// send, recv, and both at once: pairs and rings.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends `sent` bytes to `dst` and receives `received` from `src`; 0 bytes leave that half out. Both go piece
// by piece, so that a ring of such calls cannot lock up. Where the channel tells what has come, one with
// ranks that receive, then send, cannot either: a rank two pieces ahead gives only while nothing has come, so
// in a ring of ranks that all wait for room each would have looked later than the one before it. What comes
// over a fabric may come later than it is looked for: there no rank waits for room alone.
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
    bool patient = true;  // after a wait in which something has come
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

// The same, where a receiver tells its sender of an address: `mine` is this rank's output as `src` reaches
// it, to which the data then goes at once; null: through chunks.
template <class Channel>
UNISONO_PROGRAM void send_recv_told(Channel& channel, int dst, std::size_t sent, int src,
                                    std::size_t received, byte* mine, const Args& a) {
  auto& lane = channel.lane;
  const Rounds rounds(lane, sent < received ? received : sent, channel.capacity());
  if (!rounds.more()) return;  // nor does this worker of the peers, so that no word waits to be heard
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
