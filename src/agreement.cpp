// What the ranks tell each other of a call before it runs.
#include "impl.hpp"
#include "lane/channel.hpp"

namespace unisono {

Ticket Communicator::Impl::ticket(Collective collective, const Call& call, std::uint64_t count) const {
  Ticket ticket{};
  ticket.collective = collective;
  ticket.dtype = call.dtype;
  ticket.op = call.op;
  ticket.memory = call.memory;
  ticket.root = static_cast<std::uint16_t>(call.root);
  ticket.count = count;
  return ticket;
}

std::vector<Ticket> Communicator::Impl::exchange(const Request& request) {
  Ticket mine = ticket(request.collective, *request.call, request.call->count);
  mine.algorithm = request.algorithm;
  mine.in = place(request.args.in, request.in_bytes);
  mine.out = place(request.args.out, request.out_bytes);
  mine.in_place = request.in_place();
  return group_.exchange(mine);
}

// All the same, or one error that names two that differ, the same on every rank.
void Communicator::Impl::compare(const std::vector<Ticket>& tickets) {
  for (std::size_t r = 1; r < tickets.size(); ++r)
    if (!tickets[0].matches(tickets[r])) mismatch(0, tickets[0], static_cast<int>(r), tickets[r]);
}

void Communicator::Impl::mismatch(int a, const Ticket& of_a, int b, const Ticket& of_b) {
  group_.fail(Group::Kind::mismatch, "rank " + std::to_string(a) + " called " + of_a.text() + ", but rank " +
                                         std::to_string(b) + " called " + of_b.text() +
                                         ": make the same call on every rank.");
}

// The ends of a pair compare in passing: the receiver sees what the sender sends.
void Communicator::Impl::compare_pair(const Request& request, int to, int from) {
  PacketChannel<HostThread> channel(group_.lane());
  Ticket mine = ticket(Collective::send_recv, *request.call, request.call->count);
  mine.algorithm = request.algorithm;
  if (to >= 0 && to != rank()) channel.put(to, reinterpret_cast<const byte*>(&mine), sizeof mine);
  if (from < 0 || from == rank()) return;
  Ticket its;
  channel.take(from, {reinterpret_cast<byte*>(&its)}, sizeof its);
  if (!mine.matches(its)) mismatch(rank(), mine, from, its);
}

// In all_to_all_v each pair has a count of its own, which both of its ranks must give alike, and each peer
// a place of its own in my output.
std::vector<Ticket> Communicator::Impl::exchange_parts(const Request& request) {
  PacketChannel<HostThread> channel(group_.lane());
  const std::size_t element = size_of(request.call->dtype);
  auto of = [&](const Args::Part& part, int p) {
    const Args::Part& theirs = request.receives[static_cast<std::size_t>(p)];
    Ticket ticket = this->ticket(request.collective, *request.call, part.bytes / element);
    ticket.algorithm = request.algorithm;
    // of the whole output, so that every rank decides alike; empty, it is no obstacle
    ticket.in =
        request.out_bytes > 0 ? place(request.args.out, request.out_bytes) : Place{Place::kAnywhere, 0};
    ticket.out = place(request.args.out + theirs.offset, theirs.bytes);
    ticket.total = request.bytes();
    ticket.in_place = request.in_place() && request.out_bytes > 0;
    return ticket;
  };
  std::vector<Ticket> tickets(static_cast<std::size_t>(size()));
  tickets[static_cast<std::size_t>(rank())] = of(request.sends[static_cast<std::size_t>(rank())], rank());
  for (int i = 1; i < size(); ++i) {
    const int p = peer_at(group_.lane(), i);
    const Ticket mine = of(request.sends[static_cast<std::size_t>(p)], p);
    channel.put(p, reinterpret_cast<const byte*>(&mine), sizeof mine);
  }
  for (int i = 1; i < size(); ++i) {
    const int p = peer_at(group_.lane(), i);
    const Ticket expected = of(request.receives[static_cast<std::size_t>(p)], p);
    Ticket& its = tickets[static_cast<std::size_t>(p)];
    channel.take(p, {reinterpret_cast<byte*>(&its)}, sizeof its);
    if (!expected.matches(its) || expected.count != its.count) mismatch(rank(), expected, p, its);
  }
  if (check_) meet(group_.lane());  // whoever has not failed waits here for those who have
  return tickets;
}

}  // namespace unisono
