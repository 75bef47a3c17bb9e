// Large messages between two ranks, without staging.
#pragma once

#include "core/request.hpp"
#include "host/host_thread.hpp"
#include "lane/channel.hpp"

namespace unisono {

// A sender's ticket.
struct Offered {
  Place in;
  bool only_sends;
};

// A receiver's answer to a sender's ticket.
struct Reply {
  Place out;
  std::size_t left;  // the first bytes, which the sender pushes; the receiver pulls the others
};

// Sends `sent` bytes to `dst` and receives `received` from `src`; 0 bytes leave that half out. A receiver
// that sends nothing leaves half of the copying to a sender that receives nothing. Any other receiver pulls
// all, so that it needs its sender no more. reach(place, rank, bytes): returns the address of a peer's
// buffer. The two ends may call different ones of send, recv and send_recv: each transfer has its own ticket
// (a packet from the sender) and reply, in the order of the calls.
template <class Reach>
void send_recv_direct(HostThread& lane, int dst, const Place& in, std::size_t sent, int src, const Place& out,
                      std::size_t received, const Args& a, const Reach& reach) {
  PacketChannel<HostThread> tickets(lane);
  const Offered mine{in, received == 0};
  if (sent > 0) tickets.put(dst, reinterpret_cast<const byte*>(&mine), sizeof mine);
  std::size_t left = 0;
  if (received > 0) {
    Offered theirs;
    tickets.take(src, {reinterpret_cast<byte*>(&theirs)}, sizeof theirs);
    left = sent > 0 || !theirs.only_sends ? 0 : smaller(round_up(received / 2, kAlign), received);
    lane.signal_note(src, Slot::reply, Reply{out, left});
    const byte* from = reach(theirs.in, src, received) + left;
    const Dst to{a.out + left, a.stream};
    lane.move(&to, 1, &from, 1, received - left);
    lane.signal(src, Slot::meet);
  }
  if (sent > 0) {
    const Reply reply = lane.wait_note<Reply>(dst, Slot::reply);
    const Dst to{reach(reply.out, dst, sent), a.stream};
    lane.move(&to, 1, &a.in, 1, smaller(reply.left, sent));
    if (reply.left > 0) lane.signal(dst, Slot::meet);
    lane.wait(dst, Slot::meet);
  }
  if (left > 0) lane.wait(src, Slot::meet);
}

}  // namespace unisono
