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
      Rounds(channel.lane, sent < received ? received : sent, channel.capacity()),
      [&](Range round) {
        if (round.begin < sent)
          channel.put(dst, a.in + round.begin, smaller(round.bytes, sent - round.begin));
      },
      [&](Range round) {
        if (round.begin < received)
          channel.take(src, {a.out + round.begin, a.stream}, smaller(round.bytes, received - round.begin));
      });
}

}  // namespace unisono
