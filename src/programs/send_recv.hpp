// send, recv, and both at once: pairs and rings.
#pragma once

#include "lane/channel.hpp"

namespace unisono {

// Sends `sent` bytes to `dst` and receives `received` from `src`; 0 bytes leave that half out. Both go piece
// by piece, so that a ring of such calls cannot lock up.
template <class Channel>
UNISONO_PROGRAM void send_recv_push(Channel& channel, int dst, std::size_t sent, int src,
                                    std::size_t received, const Args& a) {
  for (Rounds r(channel.lane, sent < received ? received : sent, channel.capacity()); r.more(); r.next()) {
    const auto [begin, step] = r.range();
    if (begin < sent) channel.put(dst, a.in + begin, smaller(step, sent - begin));
    if (begin < received) channel.take(src, {a.out + begin, a.stream}, smaller(step, received - begin));
  }
}

}  // namespace unisono
