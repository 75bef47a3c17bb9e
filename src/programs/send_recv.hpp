// send, recv, and both at once: pairs and rings.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends `sent` bytes to `dst` and receives `received` from `src`; 0 bytes leave that half out. Both go piece
// by piece, so that a ring of such calls cannot lock up.
template <class Channel>
UNISONO_PROGRAM void send_recv_push(Channel& channel, int dst, std::size_t sent, int src,
                                    std::size_t received, const Args& a) {
  one_ahead(
      channel.lane, Rounds(channel.lane, sent < received ? received : sent, channel.capacity()),
      [&](Range round) {
        if (round.begin < sent)
          channel.put(dst, a.in + round.begin, smaller(round.bytes, sent - round.begin));
      },
      [&](Range round) {
        if (round.begin < received)
          channel.take(src, {a.out + round.begin, a.stream}, smaller(round.bytes, received - round.begin));
      });
}

// On outputs that the senders reach: outputs[dst] is where `dst` wants it. -1 leaves a half out.
template <class Lane>
UNISONO_PROGRAM void send_recv_put(Lane& lane, int dst, int src, const Args& a) {
  if (src >= 0) lane.announce(src, Slot::meet);  // my output may be written
  if (dst >= 0) {
    lane.wait(dst, Slot::meet);
    for (Rounds r(lane, a.bytes, lane.tile_bytes()); r.more(); r.next()) {
      const byte* from = a.in + r.range().begin;
      const Dst to{a.outputs[dst] + r.range().begin, a.stream};
      lane.move(&to, 1, &from, 1, r.range().bytes);
    }
    lane.signal(dst, Slot::meet);
  }
  if (src >= 0) lane.wait(src, Slot::meet);
}

}  // namespace unisono
