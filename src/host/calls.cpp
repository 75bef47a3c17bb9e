// Calls on host memory: chooses their programs and finds their buffers.
#include <algorithm>

#include "base/env.hpp"
#include "core/comparison.hpp"
#include "core/dispatch.hpp"
#include "host/backend.hpp"
#include "host/move.hpp"
#include "host/rendezvous.hpp"
#include "programs/all_reduce_quantised.hpp"
#include "programs/send_recv.hpp"

namespace unisono {

void LocalCommunicator::run_on_host(Request& request) {
  if (traits_of(request.collective).by_parts()) return run_parts_on_host(request);
  Args& args = request.args;
  const Choice choice = choose_program(request);
  if (check_ && size() > 1 && !choice.asks) compare(*this, exchange(request));
  if (args.bytes == 0) return;
  args.stream = request.written_bytes() >= group_.stream_bytes();
  if (size() == 1) return host::copy(args.out, args.in, args.bytes);
  if (request.call->wire != Wire::exact) return run_quantised(request);
  group_.lane().prepare(request.call->dtype, request.call->op);
  run_chosen(request, choice, [&] {
    group_.lane().mark(request.mark());
    unisono::run(group_.lane(), request.collective, request.algorithm, args);
  });
}

void LocalCommunicator::run_planned(Request& request, const std::function<void()>& program) {
  run_chosen(request, choose_program(request), program);
}

// Chooses the program of a call of all ranks, except of one whose ranks exchange places first.
LocalCommunicator::Choice LocalCommunicator::choose_program(Request& request) {
  const Algorithm plain = planned(request);
  const bool copies = request.algorithm == Algorithm::automatic && is_direct(plain);
  host::CallWay* const way = copies ? way_of(request) : nullptr;
  const bool asks = asks_for_places(request, plain) && !(way && way->held());
  if (!asks) request.algorithm = copies ? staged(request) : plain;  // direct needs places
  return {asks, way};
}

// Runs `program` when the ranks know which one that is. Learns from its time.
template <class Program>
void LocalCommunicator::run_chosen(Request& request, const Choice& choice, const Program& program) {
  const auto [asks, way] = choice;
  const CollectiveTraits& traits = traits_of(request.collective);
  const bool waits = way && traits.has_output(rank(), request.args.root);
  const bool held = waits && !asks && traits.out.root_only;
  const auto began = held || (way && asks) ? Clock::now() : Clock::time_point{};
  const bool learns = asks && meet_places(request, way) && way;
  const auto met = learns ? Clock::now() : Clock::time_point{};
  group_.will_move(request.bytes(), request.algorithm);
  program();
  if (learns) way->took(!is_direct(request.algorithm), Clock::now() - met, met - began, waits);
  else if (held) way->took_held(Clock::now() - began);
  else if (way && asks) way->leave_out();
}

// Returns what ranks learn of such calls, alike on every rank; null: nothing. Requires: may_ask_kernel.
host::CallWay* LocalCommunicator::way_of(const Request& request) {
  const bool learns = size() > 1 && group_.learns_ways();
  return learns ? &ways_.of(request.collective, request.bytes()) : nullptr;
}

void LocalCommunicator::run_quantised(const Request& request) {
  group_.lane().prepare(request.call->dtype, request.call->op, request.call->wire);
  group_.lane().mark(request.mark());
  ChunkChannel<HostThread> channel(group_.lane());
  all_reduce_quantised(channel, request.args);
}

void LocalCommunicator::run_pair_on_host(Request& request, int to, int from) {
  Args& args = request.args;
  // one plan for both ends, whichever of send, recv and send_recv each has called
  Algorithm& algorithm = request.algorithm;
  const bool automatic = algorithm == Algorithm::automatic;
  if (automatic) algorithm = host_plan().choose(Collective::send_recv, args.bytes, false);
  if (is_direct(algorithm) && !group_.reaches_all()) algorithm = Algorithm::push;
  if (check_) compare_pair(*this, packets(), request, to, from);
  if (args.bytes == 0) return;
  args.stream = request.written_bytes() >= group_.stream_bytes();
  if (to == rank() && from == rank()) return host::copy(args.out, args.in, args.bytes);
  group_.lane().mark(request.mark());
  const HostThread::OwnWays own(group_.lane(), !env().stream_chunks);
  const auto reached = [this](const Place& place, int rank, std::size_t bytes) {
    return reach(place, rank, bytes);
  };
  const std::size_t sent = to < 0 ? 0 : args.bytes, received = from < 0 ? 0 : args.bytes;
  if (is_direct(algorithm)) {
    const bool learns = automatic && group_.learns_ways();
    PairsLearned learned;
    if (learns && sent > 0) learned.held_to = &pairs_.at(static_cast<std::size_t>(to)).held_to(sent);
    if (learns && received > 0) learned.from = &pairs_.at(static_cast<std::size_t>(from)).from(received);
    // in place, the source's half would overwrite what has not been sent
    std::vector<byte> kept;
    if (request.in_place() && sent > 0 && received > 0 && !learned.gives()) {
      kept.assign(args.in, args.in + sent);
      args.in = kept.data();
    }
    const Place in = place(args.in, sent);
    const Place out = place(args.out, received);
    const Offered mine{in, received == 0, learns};
    group_.lane().reach_far(!group_.one_process());
    send_recv_direct(group_.lane(), to, mine, sent, from, out, received, args, learned, reached);
  } else if (is_packets(algorithm)) {
    PacketChannel<HostThread> channel(group_.lane());
    send_recv_push(channel, to, sent, from, received, args);
  } else if (automatic && symmetric_->ever() &&
             is_direct(host_plan().choose(Collective::send_recv, args.bytes, true))) {
    const Place in = request.in_place() ? Place{} : place(args.in, sent);
    send_recv_lent(group_.lane(), to, in, sent, from, received, args, reached);
  } else {
    ChunkChannel<HostThread> channel(group_.lane());
    send_recv_push(channel, to, sent, from, received, args);
  }
}

void LocalCommunicator::do_barrier() {
  if (size() == 1) return;
  if (check_) compare(*this, group_.exchange(Ticket::of(Collective::barrier)));
  meet(group_.lane());
}

std::pair<std::shared_ptr<Segment>, std::uint32_t> LocalCommunicator::allocate_on_host(std::size_t bytes) {
  if (check_ && size() > 1) compare(*this, group_.exchange(Ticket::of(Collective::empty, bytes)));
  AllocationAgreement agreement(group_, bytes, "symmetric memory");
  agreement.attempt([&] { check_room(bytes, size()); });
  agreement.meet();  // before any rank has taken its part
  const std::size_t rounded = round_up(std::max<std::size_t>(bytes, 1), 4096);
  std::shared_ptr<Segment> own;
  agreement.attempt([&] { own = Segment::create(rounded); });
  const auto handles = agreement.meet(own ? own->handle() : Segment::Handle{});
  std::vector<std::shared_ptr<Segment>> segments;
  agreement.attempt([&] {
    for (int r = 0; r < size(); ++r)
      segments.push_back(r == rank() ? own : Segment::open(handles[static_cast<std::size_t>(r)], rounded));
  });
  agreement.meet();
  own->close_file();
  return {own, symmetric_->add(std::move(segments), rank())};
}

std::vector<byte*> LocalCommunicator::parts_of(const void* symmetric) const {
  const Place place = symmetric_->find(static_cast<const byte*>(symmetric), 0);
  std::vector<byte*> parts;
  for (int r = 0; r < size(); ++r) parts.push_back(symmetric_->resolve(place, r, 0));
  return parts;
}

// Returns, alike on every rank, whether the ranks first exchange their buffers' places, for a direct program.
// Large calls do if every rank may reach the buffers. plain: `planned`.
bool LocalCommunicator::asks_for_places(const Request& request, Algorithm plain) const {
  if (!is_direct(plain) && !symmetric_->ever()) return false;  // most small calls
  if (size() == 1 || request.bytes() == 0) return false;
  if (request.algorithm != Algorithm::automatic) return is_direct(plain);
  return (is_direct(plain) && group_.reaches_all()) ||
         (symmetric_->ever() && is_direct(host_plan().choose(request.collective, request.bytes(), true)));
}

// Returns the algorithm that the call names, else the plan's on plain memory.
Algorithm LocalCommunicator::planned(const Request& request) const {
  if (request.algorithm != Algorithm::automatic) return request.algorithm;
  return host_plan().choose(request.collective, request.bytes(), false);
}

Place LocalCommunicator::place(const byte* at, std::size_t bytes) const {
  if (bytes == 0) return {};
  if (const Place found = symmetric_->find(at, bytes); found.allocation != Place::kNone) return found;
  if (!group_.reaches_all()) return {};
  return {.allocation = Place::kAddress, .offset = reinterpret_cast<std::uint64_t>(at)};
}

byte* LocalCommunicator::reach(const Place& place, int rank, std::size_t bytes) {
  if (place.allocation == Place::kAddress && group_.reaches_all()) return group_.reach(rank, place.offset);
  if (byte* at = symmetric_->resolve(place, rank, bytes)) return at;
  group_.fail(FailureKind::mismatch,
              "rank " + std::to_string(number(rank)) + " announced a buffer outside its symmetric memory.");
}

void LocalCommunicator::refuse_direct(Algorithm algorithm) {
  throw UsageError(std::string(name_of(algorithm)) +
                   " needs buffers from Communicator::empty on every rank, out of place " +
                   "in an all_to_all: use them, or another algorithm.");
}

// Exchanges places. Sets the plan's algorithm, and fills in every buffer's address if it is direct. Returns
// whether ranks could choose between the kernel's copies and chunks. way: null, or holds to chunks from now
// on if they have chosen those.
bool LocalCommunicator::meet_places(Request& request, host::CallWay* way) {
  const auto tickets = exchange(request);
  compare(*this, tickets);
  const CollectiveTraits& traits = traits_of(request.collective);
  std::int64_t saved = 0;
  bool within_reach = true, symmetric = true;
  for (int r = 0; r < size(); ++r) {
    const Ticket& ticket = tickets[static_cast<std::size_t>(r)];
    const Reached needed = request.reached_by_peers(r);
    for (const auto& [need, place] : {std::pair(needed.in, ticket.in), std::pair(needed.out, ticket.out)}) {
      if (need == 0) continue;
      within_reach = within_reach && place.allocation != Place::kNone;
      symmetric = symmetric && place.allocation != Place::kNone && place.allocation != Place::kAddress;
    }
    if (way && traits.has_output(r, request.args.root)) saved += ticket.saves;
    if (traits.swaps) within_reach = within_reach && !ticket.in_place;
  }
  Algorithm& algorithm = request.algorithm;
  const bool automatic = algorithm == Algorithm::automatic;
  bool either = false;
  if (automatic) {
    algorithm = host_plan().choose(request.collective, request.bytes(), symmetric);
    either = is_direct(algorithm) && within_reach && !symmetric;
    if (is_direct(algorithm) && !symmetric && saved < 0) algorithm = staged(request);
    if (check_) {
      Ticket mine = tickets[static_cast<std::size_t>(rank())];
      mine.algorithm = algorithm;
      compare(*this, group_.exchange(mine));
    }
  }
  if (is_direct(algorithm) && !within_reach && automatic) algorithm = staged(request);
  if (way && !check_) way->hold(symmetric, symmetric_->ever(), !is_direct(algorithm), traits.out.root_only);
  if (!is_direct(algorithm)) return either;
  if (!within_reach) refuse_direct(algorithm);
  const bool far = !symmetric && !group_.one_process();
  inputs_.assign(tickets.size(), nullptr);
  outputs_.assign(tickets.size(), nullptr);
  for (int r = 0; r < size(); ++r) {
    const Ticket& ticket = tickets[static_cast<std::size_t>(r)];
    Reached needed = request.reached_by_peers(r);
    if (far && request.collective == Collective::gather)
      needed.in = request.in_bytes;  // HostThread::root_reads
    if (needed.in) inputs_[static_cast<std::size_t>(r)] = reach(ticket.in, r, needed.in);
    if (needed.out) outputs_[static_cast<std::size_t>(r)] = reach(ticket.out, r, needed.out);
  }
  request.args.inputs = inputs_.data();
  request.args.outputs = outputs_.data();
  group_.lane().reach_far(far);
  return either;
}

}  // namespace unisono
