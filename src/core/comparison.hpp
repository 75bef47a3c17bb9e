// How ranks compare their calls before they run. Each says its own (usually a Ticket), and two that differ
// fail the communicator with one text.
#pragma once

#include <string>
#include <vector>

#include "core/backend.hpp"
#include "core/request.hpp"
#include "lane/channel.hpp"

namespace unisono {

// Says on every rank what ranks `a` and `b` have called. Called: a Ticket, or what has a `text` as well.
template <class Called>
void mismatch(Communicator::Impl& impl, int a, const Called& by_a, int b, const Called& by_b,
              const char* advice = "make the same call, by the same plan, on every rank.") {
  impl.disagree("rank " + std::to_string(impl.number(a)) + " called " + by_a.text() + ", but rank " +
                std::to_string(impl.number(b)) + " called " + by_b.text() + ": " + advice);
}

// Compares tickets, one of each rank. Two that differ give one error, the same on every rank.
inline void compare(Communicator::Impl& impl, const std::vector<Ticket>& tickets) {
  for (std::size_t r = 1; r < tickets.size(); ++r)
    if (!tickets[0].matches(tickets[r])) mismatch(impl, 0, tickets[0], static_cast<int>(r), tickets[r]);
}

// Compares the ends of a pair in passing: the receiver sees the sender's ticket.
template <class Channel>
void compare_pair(Communicator::Impl& impl, Channel channel, const Request& request, int to, int from) {
  const int me = impl.rank();
  Ticket mine = Ticket::of(Collective::send_recv, request.call->count, *request.call);
  mine.algorithm = request.algorithm;
  if (to >= 0 && to != me) channel.put(to, reinterpret_cast<const byte*>(&mine), sizeof mine);
  if (from < 0 || from == me) return;
  Ticket its;
  channel.take(from, {reinterpret_cast<byte*>(&its)}, sizeof its);
  if (!mine.matches(its))
    mismatch(impl, me, mine, from, its,
             "give both ends of a message the same count and dtype, by the same plan.");
}

// Compares a part of a call by parts, of which both of its ranks must say the same. expected: what this rank
// says of it.
inline void compare_part(Communicator::Impl& impl, const Ticket& expected, int peer, const Ticket& its) {
  if (!expected.matches(its) || expected.count != its.count) mismatch(impl, impl.rank(), expected, peer, its);
}

// Compares each part of a call by parts. Ranks of an all_to_all_v without a mismatch learn here of those with
// one.
template <class Channel>
void compare_parts(Communicator::Impl& impl, Channel channel, const Request& request) {
  auto of = [&](const Args::Part& part) {
    Ticket one = Ticket::of(request.collective, part.bytes / size_of(request.call->dtype), *request.call);
    one.algorithm =
        request.algorithm == Algorithm::automatic ? impl.planned(request, part) : request.algorithm;
    return one;
  };
  auto told = [&](const std::vector<Args::Part>& parts, int p) {
    return request.collective == Collective::all_to_all_v || parts[static_cast<std::size_t>(p)].at;
  };
  for (int i = 1; i < impl.size(); ++i) {
    const int p = peer_at(channel.lane, i);
    if (!told(request.sends, p)) continue;
    const Ticket mine = of(request.sends[static_cast<std::size_t>(p)]);
    channel.put(p, reinterpret_cast<const byte*>(&mine), sizeof mine);
  }
  for (int i = 1; i < impl.size(); ++i) {
    const int p = peer_at(channel.lane, i);
    if (!told(request.receives, p)) continue;
    Ticket its;
    channel.take(p, {reinterpret_cast<byte*>(&its)}, sizeof its);
    compare_part(impl, of(request.receives[static_cast<std::size_t>(p)]), p, its);
  }
  if (request.collective == Collective::all_to_all_v) meet(channel.lane);
}

}  // namespace unisono
