// Large messages between two ranks: straight from buffer to buffer, or through chunks.
#pragma once

#include <cstdint>

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
  bool learns;              // by a CallWay
  std::int32_t saves = 0;   // CallWay::next of what it receives
  std::uint32_t holds = 0;  // messages to it that go through chunks unasked, if what it receives now does
};

// A receiver's answer to a sender's ticket.
struct Reply {
  Place out;
  std::size_t left;     // the first bytes, which the sender writes; the receiver pulls the others
  bool by_chunks;       // the sender sends all through chunks
  std::uint32_t holds;  // messages that it sends so unasked, after this one
};

// The ways that a rank has learned of messages to and from the peers of a call. Null: none.
struct PairsLearned {
  std::uint32_t* held_to = nullptr;  // PairWays::held_to of the destination
  host::CallWay* from = nullptr;     // PairWays::from of the source
  // Returns whether the message to the destination goes through chunks, unasked.
  bool gives() const { return held_to && *held_to > 0; }
};

// The most pieces of a message after which others of its kind, at most twice as large, go unasked. Its
// receiver has room for those once it makes its call.
inline constexpr std::size_t kMostHeld = 2;

// Sends `sent` bytes to `dst` and receives `received` from `src`; 0 bytes leave that half out. reach(place,
// rank, bytes): returns the address of a peer's buffer. The two ends may call different ones of send, recv
// and send_recv: each message has its own ticket (a packet from the sender) and reply, in the order of the
// calls.
//
// The receiver says which way a message goes. It goes through chunks if the two ends would rather have it so
// and do the same, send and receive or one of the two: the sender may otherwise wait for a call that its
// receiver makes later. Else the receiver pulls, and needs its sender no more, except if that has nothing
// else to do: it then writes half. Two ends that exchange, and learn, know from their tickets that they go
// through chunks.
//
// Both ends may have agreed with an earlier message on chunks for this one, whose sender then never waits:
// chunks have room for it, once the receiver is there.
template <class Reach>
void send_recv_direct(HostThread& lane, int dst, Offered mine, std::size_t sent, int src, const Place& out,
                      std::size_t received, const Args& a, const PairsLearned& learned, const Reach& reach) {
  PacketChannel<HostThread> tickets(lane);
  ChunkChannel<HostThread> chunks(lane);
  host::CallWay* way = learned.from;
  const bool gives = sent > 0 && learned.gives(), gets = received > 0 && way && way->held();
  const bool asks = sent > 0 && !gives, asked = received > 0 && !gets;
  if (gives) --*learned.held_to;
  if (gives) send_recv_push(chunks, dst, sent, src, gets ? received : 0, a);
  if (!asks && !asked) {
    if (!gives) send_recv_push(chunks, dst, 0, src, received, a);
    return;
  }
  Clock::time_point began, met;
  if (way && asked) {
    mine.saves = way->next();
    if (received <= kMostHeld * chunks.capacity()) mine.holds = way->holds();
    began = Clock::now();
  }
  if (asks) tickets.put(dst, reinterpret_cast<const byte*>(&mine), sizeof mine);
  bool known = false;
  Reply given{.out = out, .left = 0, .by_chunks = gets, .holds = 0}, got{};
  if (asked) {
    Offered theirs;
    tickets.take(src, {reinterpret_cast<byte*>(&theirs)}, sizeof theirs);
    const bool alike = theirs.only_sends == (sent == 0);
    if (way && theirs.in.symmetric()) way->leave_out();
    if (!alike || theirs.in.allocation != Place::kAddress) way = nullptr;
    if (way) met = Clock::now();
    given.by_chunks = way && std::int64_t{mine.saves} + theirs.saves < 0;
    if (!given.by_chunks && alike && sent == 0)
      given.left = smaller(round_up(received / 2, kAlign), received);
    if (way && given.by_chunks && theirs.learns) {
      given.holds = mine.holds;
      way->hold(given.holds);
      known = asks && dst == src && mine.in.allocation == Place::kAddress;
      got = {.out = {}, .left = 0, .by_chunks = true, .holds = theirs.holds};
    }
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
  if (asks && !known) {
    // what comes from the source may be what the destination waits for, before it makes this call
    while (coming > 0 && !lane.comes_first(dst, Slot::reply, src, Slot::chunk)) {
      const std::size_t bytes = smaller(coming, chunks.capacity());
      chunks.take(src, {rest.out, a.stream}, bytes);
      rest.out += bytes;
      coming -= bytes;
    }
    got = lane.wait_note<Reply>(dst, Slot::reply);
  }
  if (asks && learned.held_to && got.by_chunks) *learned.held_to = got.holds;
  send_recv_push(chunks, dst, asks && got.by_chunks ? sent : 0, src, coming, rest);
  if (asks && !got.by_chunks) {
    const Dst to{reach(got.out, dst, sent), a.stream};
    lane.move(&to, 1, &a.in, 1, smaller(got.left, sent));
    if (got.left > 0) lane.signal(dst, Slot::meet);
    lane.wait(dst, Slot::meet);
  }
  if (given.left > 0) lane.wait(src, Slot::meet);
  if (way && asked && (sent == 0 || (asks && got.by_chunks == given.by_chunks)))
    way->took(given.by_chunks, Clock::now() - met, met - began);
}

// Does the same for messages that the plan has go through chunks, between ranks that have symmetric memory. A
// call that sends and receives lends its input if that is symmetric memory, at `lent`: it puts the place in a
// packet, where the chunks would come, and waits at its end until the receiver has read. The receiver takes
// what comes.
template <class Reach>
void send_recv_lent(HostThread& lane, int dst, const Place& lent, std::size_t sent, int src,
                    std::size_t received, const Args& a, const Reach& reach) {
  PacketChannel<HostThread> offers(lane);
  ChunkChannel<HostThread> chunks(lane);
  const bool lends = sent > 0 && received > 0 && dst != lane.rank() && lent.symmetric();
  if (lends) {
    offers.put(dst, reinterpret_cast<const byte*>(&lent), sizeof lent);
    lane.wake(dst);
  }
  const std::size_t first = lends ? 0 : smaller(sent, 2 * chunks.capacity());
  send_recv_push(chunks, dst, first, src, 0, a);
  Args rest = a;
  rest.in += first;
  if (received > 0 && lane.packet_comes(src)) {
    Place theirs;
    offers.take(src, {reinterpret_cast<byte*>(&theirs)}, sizeof theirs);
    const byte* from = reach(theirs, src, received);
    const Dst to{a.out, a.stream};
    lane.move(&to, 1, &from, 1, received);
    lane.signal(src, Slot::meet);
    received = 0;
  }
  send_recv_push(chunks, dst, lends ? 0 : sent - first, src, received, rest);
  if (lends) lane.wait(dst, Slot::meet);
}

}  // namespace unisono
