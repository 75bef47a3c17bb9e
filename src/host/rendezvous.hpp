// Large messages between two ranks: straight from buffer to buffer, or through chunks.
#pragma once

#include "core/request.hpp"
#include "host/call_ways.hpp"
#include "host/host_thread.hpp"
#include "lane/channel.hpp"
#include "programs/send_recv.hpp"

namespace unisono {

// A sender's ticket.
struct Offered {
  Place in;
  bool only_sends;
  bool small_pages;  // of which chunks would carry it better, where the kernel's copies are slow
  bool learns;       // where they are fast: by a CallWay
  bool by_chunks;    // rather than by these copies, as it has learned
};

// A receiver's answer to a sender's ticket.
struct Reply {
  Place out;
  std::size_t left;  // the first bytes, which the sender writes; the receiver pulls the others
  bool by_chunks;    // the sender sends all through chunks
};

// The bytes from which a message that only goes one way, from small pages, goes through chunks. Below, halves
// by the kernel take less (docs/notes/host.md).
inline constexpr std::size_t kOneWay = std::size_t{1} << 20;

// Sends `sent` bytes to `dst` and receives `received` from `src`; 0 bytes leave that half out. reach(place,
// rank, bytes): returns the address of a peer's buffer. The two ends may call different ones of send, recv
// and send_recv: each message has its own ticket (a packet from the sender) and reply, in the order of the
// calls.
//
// The receiver says which way a message goes. From small pages, or as either end would rather have it, it
// goes through chunks, but only if both ends do the same, send and receive or one of the two: the sender may
// otherwise wait for a call that its receiver makes later. Else the receiver pulls, and needs its sender no
// more, except if that has nothing else to do: it then writes half. Two ends that exchange, and learn, know
// from their tickets that they go through chunks. way: learns from the call; null: of none.
template <class Reach>
void send_recv_direct(HostThread& lane, int dst, const Offered& mine, std::size_t sent, int src,
                      const Place& out, std::size_t received, const Args& a, host::CallWay* way,
                      const Reach& reach) {
  PacketChannel<HostThread> tickets(lane);
  ChunkChannel<HostThread> chunks(lane);
  Clock::time_point met;
  bool known = false;
  if (sent > 0) tickets.put(dst, reinterpret_cast<const byte*>(&mine), sizeof mine);
  Reply given{.out = out, .left = 0, .by_chunks = false}, got{};
  if (received > 0) {
    Offered theirs;
    tickets.take(src, {reinterpret_cast<byte*>(&theirs)}, sizeof theirs);
    const bool alike = theirs.only_sends == (sent == 0);
    if (!alike || theirs.in.allocation != Place::kAddress) way = nullptr;
    if (way) met = Clock::now();
    given.by_chunks = way ? mine.by_chunks || theirs.by_chunks
                          : alike && theirs.small_pages && (sent > 0 || received >= kOneWay);
    if (!given.by_chunks && alike && sent == 0)
      given.left = smaller(round_up(received / 2, kAlign), received);
    known = way && given.by_chunks && theirs.learns && dst == src && mine.in.allocation == Place::kAddress;
    if (!known) lane.signal_note(src, Slot::reply, given);
    if (!given.by_chunks) {
      const byte* from = reach(theirs.in, src, received) + given.left;
      const Dst to{a.out + given.left, a.stream};
      lane.move(&to, 1, &from, 1, received - given.left);
      lane.signal(src, Slot::meet);
    }
  }
  Args rest = a;
  std::size_t coming = given.by_chunks ? received : 0;
  if (known) {
    got = given;
  } else if (sent > 0) {
    // what comes from the source may be what the destination waits for, before it makes this call
    while (coming > 0 && !lane.comes_first(dst, Slot::reply, src, Slot::chunk)) {
      const std::size_t bytes = smaller(coming, chunks.capacity());
      chunks.take(src, {rest.out, a.stream}, bytes);
      rest.out += bytes;
      coming -= bytes;
    }
    got = lane.wait_note<Reply>(dst, Slot::reply);
  }
  send_recv_push(chunks, dst, got.by_chunks ? sent : 0, src, coming, rest);
  if (sent > 0 && !got.by_chunks) {
    const Dst to{reach(got.out, dst, sent), a.stream};
    lane.move(&to, 1, &a.in, 1, smaller(got.left, sent));
    if (got.left > 0) lane.signal(dst, Slot::meet);
    lane.wait(dst, Slot::meet);
  }
  if (given.left > 0) lane.wait(src, Slot::meet);
  if (way && (sent == 0 || got.by_chunks == given.by_chunks)) way->took(given.by_chunks, Clock::now() - met);
}

}  // namespace unisono
