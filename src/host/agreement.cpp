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
  if (may_ask_kernel(request))
    if (host::CallWay* const way = way_of(request)) mine.saves = way->next();
  return group_.exchange(mine);
}

}  // namespace unisono
