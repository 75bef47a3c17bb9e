// A large message between two ranks, without staging.
#pragma once

#include "lane/channel.hpp"
#include "lane/host/host_thread.hpp"
#include "symmetric.hpp"

namespace unisono {

// What a receiver answers to the ticket of a sender.
struct Reply {
  Place out;
  std::size_t left;  // bytes, from the first, that the sender is to push; the receiver pulls the others
};

// Sends `sent` bytes to `dst` and receives `received` from `src`; 0 bytes leave that half out. A receiver
// that sends nothing leaves half of the copying to its sender, who has nothing else to do. `reach(place,
// rank, bytes)` gives the address of a peer's buffer. Ends of a pair need not call the same of send, recv and
// send_recv: each transfer has its own ticket (from the sender, a packet) and reply, in the order of the
// calls.
template <class Reach>
void send_recv_direct(HostThread& lane, int dst, const Place& in, std::size_t sent, int src, const Place& out,
                      std::size_t received, const Args& a, const Reach& reach) {
  PacketChannel<HostThread> tickets(lane);
  if (sent > 0) tickets.put(dst, reinterpret_cast<const byte*>(&in), sizeof in);
  if (received > 0) {
    Place theirs;
    tickets.take(src, {reinterpret_cast<byte*>(&theirs)}, sizeof theirs);
    const std::size_t left = sent > 0 ? 0 : smaller(round_up(received / 2, kAlign), received);
    lane.signal_note(src, Slot::reply, Reply{out, left});
    const byte* from = reach(theirs, src, received) + left;
    const Dst to{a.out + left, a.stream};
    lane.move(&to, 1, &from, 1, received - left);
    lane.signal(src, Slot::meet);
  }
  if (sent > 0) {
    const Reply reply = lane.wait_note<Reply>(dst, Slot::reply);
    const Dst to{reach(reply.out, dst, sent), a.stream};
    lane.move(&to, 1, &a.in, 1, smaller(reply.left, sent));
    lane.signal(dst, Slot::meet);
    lane.wait(dst, Slot::meet);
  }
  if (received > 0) lane.wait(src, Slot::meet);
}

}  // namespace unisono
