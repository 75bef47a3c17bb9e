// Agreements of the ranks of all nodes: that their calls are the same, on symmetric memory, on registrations.
#include <vector>

#include "base/traits.hpp"
#include "core/comparison.hpp"
#include "nodes/backend.hpp"

namespace unisono::nodes {

template <class T>
std::vector<T> NodesCommunicator::everyones(const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(size()));
  host_->moves
      .all_gather(reinterpret_cast<const byte*>(&mine), reinterpret_cast<byte*>(all.data()), sizeof mine)
      .wait();
  return all;
}

void NodesCommunicator::compare_all(const Ticket& mine) { compare(*this, everyones(mine)); }

void NodesCommunicator::compare_calls(const Request& request) {
  if (traits_of(request.collective).by_parts()) return compare_parts(request);
  compare_all(Ticket::of(request));
}

// Each part is compared by the ranks of both ends: of an all_to_all_v every part, of a batch the messages.
void NodesCommunicator::compare_parts(const Request& request) {
  const auto ranks = static_cast<std::size_t>(size());
  std::vector<Ticket> mine(ranks), expected(ranks), told(ranks);
  std::vector<Args::Part> sends(ranks), receives(ranks);
  const std::size_t item = request.collective == Collective::all_to_all_v ? size_of(request.call->dtype) : 1;
  auto fill = [&](std::vector<Args::Part>& to, std::vector<Ticket>& tickets, std::vector<Ticket>& of,
                  const std::vector<Args::Part>& parts) {
    for (std::size_t p = 0; p < ranks; ++p) {
      if (request.collective == Collective::batch_send_recv && !parts[p].at) continue;
      of[p] = Ticket::of(request.collective, parts[p].bytes / item, *request.call);
      to[p] = {reinterpret_cast<byte*>(&tickets[p]), sizeof(Ticket)};
    }
  };
  fill(sends, mine, mine, request.sends);
  fill(receives, told, expected, request.receives);
  host_->moves.batch(sends, receives);
  for (int p = 0; p < size(); ++p) {
    const auto at = static_cast<std::size_t>(p);
    if (receives[at].at && p != rank()) compare_part(*this, expected[at], p, told[at]);
  }
}

void NodesCommunicator::compare_ends(const Request& request, int to, int from) {
  if (to == rank()) return;
  const Ticket mine = Ticket::of(Collective::send_recv, request.call->count, *request.call);
  Ticket told{};
  host_->moves.send_recv(reinterpret_cast<const byte*>(&mine), to < 0 ? 0 : sizeof mine, to,
                         reinterpret_cast<byte*>(&told), from < 0 ? 0 : sizeof told, from);
  if (from >= 0 && !mine.matches(told))
    mismatch(*this, rank(), mine, from, told, "give both ends of a message the same count and dtype.");
}

// The ranks of all nodes, for AllocationAgreement.
struct NodesCommunicator::Everyone {
  NodesCommunicator& of;
  int rank() const { return of.rank(); }
  static int number(int rank) { return rank; }
  [[noreturn]] static void fail(FailureKind kind, const std::string& text) { raise({kind, text}); }
  template <class T>
  std::vector<T> exchange(const T& mine) {
    return of.everyones(mine);
  }
};

std::shared_ptr<void> NodesCommunicator::do_allocate(std::size_t bytes, Memory memory) {
  return guarded([&] {
    if (check_) compare_all(Ticket::of(Collective::empty, bytes));
    Everyone everyone{*this};
    AllocationAgreement agreement(everyone, bytes, "symmetric memory");
    std::shared_ptr<void> made;
    agreement.attempt([&] { made = local_->allocate(bytes, memory); });
    agreement.meet();
    return made;
  });
}

// Ranks agree on what all backends check first, so that none waits on its node for a rank that has nothing to
// register.
std::shared_ptr<void> NodesCommunicator::do_register(const MemoryRange& range) {
  return guarded([&] {
    if (check_) compare_all(Ticket::of(Collective::register_memory));
    Everyone everyone{*this};
    auto agreement = agree_to_register(everyone, range);
    std::shared_ptr<Registration::State> local;
    agreement.attempt([&] { local = local_->register_memory(range); });
    const auto take_back = [&] {
      if (local) local_->end(*local);
    };
    try {
      agreement.meet();
    } catch (const Refused&) {
      take_back();
      throw;
    } catch (const RefusedUse&) {
      take_back();
      throw;
    }
    return local;
  });
}

void NodesCommunicator::do_end(Registration::State& one) {
  guarded([&] {
    compare_all(Ticket::of(Collective::end_registration, one.number));
    local_->end(*std::static_pointer_cast<Registration::State>(one.kept));
  });
}

}  // namespace unisono::nodes
