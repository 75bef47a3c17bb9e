// A large message between two ranks, without staging: both copy half of it.
#pragma once

#include "lane/channel.hpp"
#include "lane/host/host_thread.hpp"
#include "symmetric.hpp"

namespace unisono {

// Sends `sent` bytes to `dst`, who pulls the second half while I push the first, and receives likewise from `src`; 0 bytes leave
// that half out. `reach(place, rank, bytes)` gives the address of a peer's buffer. Ends of a pair need not call the same of
// send, recv and send_recv: each transfer has its own ticket (from the sender, a packet) and reply, in the order of the calls.
template <class Reach>
void send_recv_direct(HostThread& lane, int dst, const Place& in, std::size_t sent, int src, const Place& out,
                      std::size_t received, const Args& a, const Reach& reach) {
  PacketChannel<HostThread> tickets(lane);
  if (sent > 0) tickets.put(dst, reinterpret_cast<const byte*>(&in), sizeof in);
  if (received > 0) {
    Place theirs;
    tickets.take(src, {reinterpret_cast<byte*>(&theirs)}, sizeof theirs);
    lane.signal_note(src, Slot::reply, out);
    const std::size_t half = smaller(round_up(received / 2, kAlign), received);
    const byte* from = reach(theirs, src, received) + half;
    const Dst to{a.out + half, a.stream};
    lane.move(&to, 1, &from, 1, received - half);
    lane.signal(src, Slot::meet);
  }
  if (sent > 0) {
    const Place theirs = lane.wait_note<Place>(dst, Slot::reply);
    const std::size_t half = smaller(round_up(sent / 2, kAlign), sent);
    const Dst to{reach(theirs, dst, sent), a.stream};
    lane.move(&to, 1, &a.in, 1, half);
    lane.signal(dst, Slot::meet);
    lane.wait(dst, Slot::meet);
  }
  if (received > 0) lane.wait(src, Slot::meet);
}

}  // namespace unisono
