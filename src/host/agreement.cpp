// Exchanges the ranks' tickets of a call before it runs.
#include "core/comparison.hpp"
#include "host/backend.hpp"

namespace unisono {

static_assert(sizeof(Ticket) <= HostThread::kPacketBytes);

std::vector<Ticket> LocalCommunicator::exchange(const Request& request) {
  Ticket mine = Ticket::of(request);
  mine.in = place(request.args.in, request.in_bytes);
  mine.out = place(request.args.out, request.out_bytes);
  mine.in_place = request.in_place();
  if (may_ask_kernel(request)) {
    const Reached reached = request.reached_by_peers(rank());
    if (host::CallWay* const way = way_of(request)) mine.saves = way->next();
    else mine.by_chunks = small_pages(mine.in, reached.in) || small_pages(mine.out, reached.out);
  }
  return group_.exchange(mine);
}

// Exchanges the tickets of all_to_all_v. Each pair has its own count, which both ranks must give alike. Each
// peer has its own place in this rank's output.
std::vector<Ticket> LocalCommunicator::exchange_parts(const Request& request) {
  const std::size_t element = size_of(request.call->dtype);
  // the place of the whole output, so that every rank decides alike; an empty one is no obstacle
  Place whole{.allocation = Place::kAnywhere};
  if (request.out_bytes > 0) whole = place(request.args.out, request.out_bytes);
  const bool by_chunks = may_ask_kernel(request) && small_pages(whole, request.out_bytes);
  auto ticket_of = [&](const Args::Part& part, int p) {
    const Args::Part& theirs = request.receives[static_cast<std::size_t>(p)];
    Ticket ticket = Ticket::of(request.collective, part.bytes / element, *request.call);
    const bool by_message =
        request.call->memory == Memory::device && request.algorithm == Algorithm::automatic;
    ticket.algorithm = by_message ? planned(request, part) : request.algorithm;
    ticket.in = whole;
    ticket.out = place(theirs.at, theirs.bytes);
    ticket.by_chunks = by_chunks;
    ticket.total = request.bytes();
    ticket.in_place = request.in_place() && request.out_bytes > 0;
    return ticket;
  };
  auto tickets = compare_parts(*this, packets(), request, ticket_of);
  const auto me = static_cast<std::size_t>(rank());
  tickets[me] = ticket_of(request.sends[me], rank());
  if (check_) meet(group_.lane());  // ranks without a mismatch learn here of those with one
  return tickets;
}

}  // namespace unisono
