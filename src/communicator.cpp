#include "unisono/communicator.hpp"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <limits>

#include "communicator_impl.hpp"
#include "dispatch.hpp"
#include "env.hpp"
#include "fabric/communicator.hpp"
#include "group.hpp"
#include "lane/cuda/engine.hpp"
#include "plan.hpp"
#include "programs/send_recv.hpp"
#include "rendezvous.hpp"
#include "request.hpp"
#include "symmetric.hpp"

namespace unisono {
namespace {

// Outputs from this size on are written around the cache: they would not stay in it until somebody reads
// them.
std::size_t default_stream_bytes() {
  const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache > 0 ? static_cast<std::size_t>(cache) / 4 : std::size_t{4} << 20;
}

}  // namespace

class HostCommunicator final : public Communicator::Impl {
 public:
  HostCommunicator(Bootstrap& bootstrap, const Communicator::Options& options)
      : check_(options.check.value_or(env().check)),
        stream_bytes_(env().stream_bytes ? env().stream_bytes : default_stream_bytes()),
        group_(bootstrap, options.timeout_s.value_or(env().timeout_s), check_, options.while_waiting),
        plan_(Plan::of_host(group_.size(), group_.crowded())),
        gpu_plan_(Plan::of_gpu(group_.size())) {
    if (options.device)
      engine_ = cuda::Engine::make(group_, {.device = *options.device,
                                            .max_sms = options.max_sms,
                                            .timeout_s = options.timeout_s.value_or(env().timeout_s)});
  }

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  Plan& plan(Memory memory) override { return memory == Memory::host ? plan_ : gpu_plan_; }
  cuda::Engine& engine() const override { return engine_ ? *engine_ : Impl::engine(); }
  bool has_engine() const override { return engine_ != nullptr; }
  bool closed() const override { return group_.left(); }
  void close() noexcept override { group_.leave(); }

  void run(Request request) override {
    const Turn turn(*this, request.collective);
    if (request.call->memory == Memory::device) return run_on_gpu(request, -1, -1);
    Args& args = request.args;
    const bool asks = asks_for_places(request);
    if (check_ && size() > 1 && !asks) compare(exchange(request));
    if (args.bytes == 0 && !asks) return;
    args.stream = request.out_bytes >= stream_bytes_;
    if (size() == 1) return copy(args.in, args.out, args.bytes);
    group_.lane().prepare(request.call->dtype, request.call->op);
    const Algorithm algorithm = asks ? meet_places(request) : plain(request);
    unisono::run(group_.lane(), request.collective, algorithm, args);
  }

  void run_pair(Request request, int to, int from) override {
    const Turn turn(*this, request.collective);
    if (request.call->memory == Memory::device) return run_on_gpu(request, to, from);
    if (check_) compare_pair(PacketChannel<HostThread>(group_.lane()), request, to, from);
    Args& args = request.args;
    if (args.bytes == 0) return;
    args.stream = request.out_bytes >= stream_bytes_;
    if (to == rank() && from == rank()) return copy(args.in, args.out, args.bytes);
    const std::size_t sent = to < 0 ? 0 : args.bytes, received = from < 0 ? 0 : args.bytes;
    // one table for both ends, whichever of send, recv and send_recv each has called
    Algorithm algorithm = request.algorithm;
    if (algorithm == Algorithm::automatic) algorithm = plan_.choose(Collective::send_recv, args.bytes, false);
    if (is_direct(algorithm) && !group_.reaches_all()) algorithm = Algorithm::push;
    if (is_direct(algorithm)) {
      // in place, the source's half would overwrite what has not been sent
      std::vector<byte> kept;
      if (request.in_place() && sent > 0 && received > 0) {
        kept.assign(args.in, args.in + sent);
        args.in = kept.data();
      }
      const Place in = place(args.in, sent), out = place(args.out, received);
      group_.lane().reach_far(!group_.one_process());
      send_recv_direct(
          group_.lane(), to, in, sent, from, out, received, args,
          [this](const Place& place, int rank, std::size_t bytes) { return reach(place, rank, bytes); });
    } else if (is_packets(algorithm)) {
      PacketChannel<HostThread> channel(group_.lane());
      send_recv_push(channel, to, sent, from, received, args);
    } else {
      ChunkChannel<HostThread> channel(group_.lane());
      send_recv_push(channel, to, sent, from, received, args);
    }
  }

  void run_on_gpu(const Request& request, int to, int from) {
    cuda::Engine& gpu = engine();
    gpu.check();
    const bool pair = to >= 0 || from >= 0;
    const bool symmetric = (!pair || (to >= 0 && from >= 0)) && gpu.symmetric(request);
    if (check_ && size() > 1) {
      if (pair) compare_pair(PacketChannel<HostThread>(group_.lane()), request, to, from);
      else if (request.collective == Collective::all_to_all_v) exchange_parts(request);
      else compare_places(request, symmetric);
    }
    if (request.args.bytes == 0) return;
    const Collective planned = pair ? Collective::send_recv : request.collective;
    Algorithm algorithm = request.algorithm;
    if (algorithm == Algorithm::automatic) algorithm = gpu_plan_.choose(planned, request.bytes(), symmetric);
    if (is_direct(algorithm) && !symmetric)
      throw UsageError(
          std::string(name_of(algorithm)) +
          " needs buffers from Communicator::empty at the same offset on every rank, out of place in an "
          "all_to_all: use them, or another algorithm.");
    gpu.run(request, algorithm, calls_, to, from);
  }

  void barrier() override {
    const Turn turn(*this, Collective::barrier);
    if (size() == 1) return;
    const Call call;
    if (check_) compare(group_.exchange(ticket(Collective::barrier, call, 0)));
    meet(group_.lane());
  }

  std::shared_ptr<void> allocate(std::size_t bytes, Memory memory) override {
    if (memory == Memory::device) return allocate_on_gpu(bytes);
    auto [segment, number] = allocate_on_host(bytes);
    return {segment->data(),
            [symmetric = symmetric_, number = number](void*) { symmetric->release(number); }};
  }

 private:
  bool inherited() const override { return group_.inherited(); }
  void enter(std::string_view what, std::uint64_t call) override {
    group_.doing(what, call);
    group_.check();
  }
  void disagree(const std::string& text) override { group_.fail(Group::Kind::mismatch, text); }

  // This rank's part of a new allocation, and the allocation's number.
  std::pair<std::shared_ptr<Segment>, std::uint32_t> allocate_on_host(std::size_t bytes) {
    const Turn turn(*this, Collective::empty);
    struct Offer {
      Segment::Handle handle;
      std::uint64_t asked;
    };
    if (check_ && size() > 1) compare(group_.exchange(ticket(Collective::empty, Call{}, bytes)));
    const bool absurd = bytes > std::numeric_limits<std::size_t>::max() / 2;  // and rounding it might wrap
    const std::size_t rounded = absurd ? bytes : round_up(std::max<std::size_t>(bytes, 1), 4096);
    std::shared_ptr<Segment> own;
    std::string problem;
    try {
      own = Segment::create(rounded);
    } catch (const ResourceError& error) { problem = error.what(); }
    const auto offers = group_.exchange(Offer{own ? own->handle() : Segment::Handle{}, bytes});
    for (int r = 0; r < size(); ++r)
      if (offers[static_cast<std::size_t>(r)].asked != offers[0].asked)
        group_.fail(Group::Kind::mismatch, "rank 0 asked for " + std::to_string(offers[0].asked) +
                                               " bytes of symmetric memory, but rank " + std::to_string(r) +
                                               " for " +
                                               std::to_string(offers[static_cast<std::size_t>(r)].asked) +
                                               ": ask for the same on every rank.");
    std::vector<std::shared_ptr<Segment>> segments;
    for (int r = 0; r < size() && problem.empty(); ++r) {
      const Offer& offer = offers[static_cast<std::size_t>(r)];
      if (offer.handle.fd < 0) problem = "rank " + std::to_string(r) + " could not reserve its part";
      else try {
          segments.push_back(r == rank() ? own : Segment::open(offer.handle, rounded));
        } catch (const ResourceError& error) { problem = error.what(); }
    }
    // everyone has it, or nobody: later calls count on that
    for (const Verdict& verdict : group_.exchange(Verdict{!problem.empty()}))
      if (verdict.failed)
        throw ResourceError("symmetric memory of " + std::to_string(bytes) +
                            " bytes a rank could not be had" +
                            (problem.empty() ? " on another rank: see its error." : ": " + problem));
    return {own, symmetric_->add(std::move(segments), rank())};
  }

  std::shared_ptr<void> allocate_on_gpu(std::size_t bytes) {
    const Turn turn(*this, Collective::empty);
    if (check_ && size() > 1) compare(group_.exchange(ticket(Collective::empty, Call{}, bytes)));
    return engine().allocate(bytes);
  }

  struct Verdict {
    bool failed;
  };

  // Large calls first tell each other their buffers' places, wherever these may be within reach: if they are,
  // the program is a direct one. Every rank decides this alike. all_to_all_v always does: no rank knows the
  // others' sizes.
  bool asks_for_places(const Request& request) const {
    if (size() == 1) return false;
    if (request.collective == Collective::all_to_all_v) return true;
    if (request.bytes() == 0) return false;
    if (request.algorithm != Algorithm::automatic) return is_direct(request.algorithm);
    return (symmetric_->ever() && is_direct(plan_.choose(request.collective, request.bytes(), true))) ||
           (group_.reaches_all() && is_direct(plan_.choose(request.collective, request.bytes(), false)));
  }

  Algorithm plain(const Request& request) const {
    if (request.algorithm != Algorithm::automatic) return request.algorithm;
    const Algorithm chosen = plan_.choose(request.collective, request.bytes(), false);
    return is_direct(chosen) ? Plan::staged(request.collective)
                             : chosen;  // direct is for those who ask for places
  }

  std::vector<Ticket> exchange(const Request& request) {
    Ticket mine = ticket(request.collective, *request.call, request.call->count);
    mine.algorithm = request.algorithm;
    mine.in = place(request.args.in, request.in_bytes);
    mine.out = place(request.args.out, request.out_bytes);
    mine.in_place = request.in_place();
    return group_.exchange(mine);
  }

  Place place(const byte* at, std::size_t bytes) const {
    if (bytes == 0) return {};
    if (const Place found = symmetric_->find(at, bytes); found.allocation != Place::kNone) return found;
    if (group_.reaches_all()) return {Place::kAddress, reinterpret_cast<std::uint64_t>(at)};
    return {};
  }
  byte* reach(const Place& place, int rank, std::size_t bytes) {
    if (place.allocation == Place::kAddress && group_.reaches_all()) return group_.reach(rank, place.offset);
    if (byte* at = symmetric_->resolve(place, rank, bytes)) return at;
    group_.fail(Group::Kind::mismatch,
                "rank " + std::to_string(rank) + " announced a buffer outside its symmetric memory.");
  }

  // Exchanges places; gives the plan's algorithm, and every buffer's address when that is a direct one.
  Algorithm meet_places(Request& request) {
    const bool by_parts = request.collective == Collective::all_to_all_v;
    const auto tickets = by_parts ? exchange_parts(request) : exchange(request);
    if (!by_parts) compare(tickets);
    std::size_t bytes = request.bytes();
    bool within_reach = true, symmetric = true;
    for (int r = 0; r < size(); ++r) {
      const Ticket& its = tickets[static_cast<std::size_t>(r)];
      const Reached needed = by_parts ? Reached{its.total, 0} : request.reached_by_peers(r);
      for (const auto& [need, place] : {std::pair(needed.in, its.in), std::pair(needed.out, its.out)}) {
        if (need == 0 || place.allocation == Place::kAnywhere) continue;
        within_reach = within_reach && place.allocation != Place::kNone;
        symmetric = symmetric && place.allocation != Place::kNone && place.allocation != Place::kAddress;
      }
      // in place, a peer may overwrite a block before its owner has sent it
      if (by_parts || request.collective == Collective::all_to_all)
        within_reach = within_reach && !its.in_place;
      if (by_parts) bytes = std::max<std::size_t>(bytes, its.total);
    }
    Algorithm algorithm = request.algorithm;
    if (algorithm == Algorithm::automatic) algorithm = plan_.choose(request.collective, bytes, symmetric);
    if (!is_direct(algorithm)) return algorithm;
    if (!within_reach && request.algorithm == Algorithm::automatic) return Plan::staged(request.collective);
    if (!within_reach)
      throw UsageError(std::string(name_of(algorithm)) +
                       " needs buffers from Communicator::empty on every rank, out of place " +
                       "in an all_to_all: use them, or another algorithm.");
    inputs_.assign(tickets.size(), nullptr);
    outputs_.assign(tickets.size(), nullptr);
    for (int r = 0; r < size(); ++r) {
      const Ticket& its = tickets[static_cast<std::size_t>(r)];
      const Reached needed = request.reached_by_peers(r);
      if (needed.in) inputs_[static_cast<std::size_t>(r)] = reach(its.in, r, needed.in);
      if (needed.out) outputs_[static_cast<std::size_t>(r)] = reach(its.out, r, needed.out);
    }
    request.args.inputs = inputs_.data();
    request.args.outputs = outputs_.data();
    group_.lane().reach_far(!symmetric && !group_.one_process());
    return algorithm;
  }

  // On a GPU, one rank's place stands for all.
  void compare_places(const Request& request, bool symmetric) {
    Ticket mine = ticket(request.collective, *request.call, request.call->count);
    mine.algorithm = request.algorithm;
    mine.in = engine_->place(request.args.in, 0);
    mine.out = engine_->place(request.args.out, 0);
    mine.in_place = symmetric;
    const auto tickets = group_.exchange(mine);
    compare(tickets);
    for (int r = 1; r < size(); ++r) {
      const Ticket& its = tickets[static_cast<std::size_t>(r)];
      const bool same = its.in_place == tickets[0].in_place &&
                        (!its.in_place || (its.in == tickets[0].in && its.out == tickets[0].out));
      if (!same)
        group_.fail(
            Group::Kind::mismatch,
            "rank 0 and rank " + std::to_string(r) + " gave " + std::string(name_of(request.collective)) +
                " different places of symmetric memory: give the same offset of the same allocation on "
                "every rank, or none.");
    }
  }

  // In all_to_all_v each pair has a count of its own, which both of its ranks must give alike, and each peer
  // a place of its own in my output.
  std::vector<Ticket> exchange_parts(const Request& request) {
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

  static void copy(const byte* from, byte* to, std::size_t bytes) {
    if (from != to) std::memcpy(to, from, bytes);
  }

  bool check_;
  std::size_t stream_bytes_;
  Group group_;
  Plan plan_, gpu_plan_;
  std::unique_ptr<cuda::Engine> engine_;
  std::shared_ptr<Symmetric> symmetric_ = std::make_shared<Symmetric>();
  std::vector<const byte*> inputs_;
  std::vector<byte*> outputs_;
};

Communicator::Communicator(const std::shared_ptr<Bootstrap>& bootstrap, const Options& options)
    : impl_(options.fabric ? fabric::make_communicator(*bootstrap, options)
                           : std::unique_ptr<Impl>(std::make_unique<HostCommunicator>(*bootstrap, options))) {
}
Communicator::~Communicator() = default;
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
void Communicator::close() noexcept { impl_->close(); }
bool Communicator::closed() const { return impl_->closed(); }

void Communicator::all_reduce(const Call& call) {
  impl_->run({Collective::all_reduce, call, rank(), size()});
}
void Communicator::reduce(const Call& call) { impl_->run({Collective::reduce, call, rank(), size()}); }
void Communicator::broadcast(const Call& call) { impl_->run({Collective::broadcast, call, rank(), size()}); }
void Communicator::all_gather(const Call& call) {
  impl_->run({Collective::all_gather, call, rank(), size()});
}
void Communicator::gather(const Call& call) { impl_->run({Collective::gather, call, rank(), size()}); }
void Communicator::reduce_scatter(const Call& call) {
  impl_->run({Collective::reduce_scatter, call, rank(), size()});
}
void Communicator::scatter(const Call& call) { impl_->run({Collective::scatter, call, rank(), size()}); }
void Communicator::all_to_all(const Call& call) {
  impl_->run({Collective::all_to_all, call, rank(), size()});
}

void Communicator::all_to_all_v(const Call& call, std::span<const std::size_t> sends,
                                std::span<const std::size_t> receives) {
  if (sends.size() != static_cast<std::size_t>(size()))
    throw UsageError("all_to_all_v needs " + std::to_string(size()) +
                     " send counts, one for each rank, not " + std::to_string(sends.size()) + ".");
  impl_->run({call, rank(), sends, receives});
}

void Communicator::send(const Call& call, int to) {
  impl_->run_pair({Collective::send, call, rank(), size(), to, -1}, to, -1);
}
void Communicator::recv(const Call& call, int from) {
  impl_->run_pair({Collective::recv, call, rank(), size(), -1, from}, -1, from);
}
void Communicator::send_recv(const Call& call, int to, int from) {
  impl_->run_pair({Collective::send_recv, call, rank(), size(), to, from}, to, from);
}

void Communicator::barrier() { impl_->barrier(); }

Buffer Communicator::empty(std::size_t bytes, Memory memory) {
  return {impl_->allocate(bytes, memory), bytes};
}

std::optional<int> Communicator::device() const {
  return impl_->has_engine() ? std::optional(impl_->engine().device()) : std::nullopt;
}

void Communicator::synchronize(void* stream) { impl_->engine().synchronize(stream); }

int Communicator::sms(Collective collective, std::size_t bytes, std::string_view algorithm) const {
  const auto known = from_name<Algorithm>(algorithm, kAlgorithms);
  if (!known) throw UsageError("there is no algorithm '" + std::string(algorithm) + "'.");
  return *known == Algorithm::copy_engine ? 0 : impl_->engine().shape(collective, *known, bytes).blocks;
}

void Communicator::set_shape(int blocks, int threads, std::size_t piece_bytes) {
  impl_->engine().set_shape({blocks, threads, piece_bytes});
}

std::string_view Communicator::plan(Collective collective, std::size_t bytes, bool symmetric,
                                    Memory memory) const {
  if (collective == Collective::send || collective == Collective::recv) collective = Collective::send_recv;
  return name_of(impl_->plan(memory).choose(collective, bytes, symmetric));
}

void Communicator::set_plan(const std::vector<PlanEntry>& entries, Memory memory) {
  std::vector<Plan::Entry> read;
  for (const PlanEntry& entry : entries) {
    const auto algorithm = from_name<Algorithm>(entry.algorithm, kAlgorithms);
    if (!algorithm)
      throw UsageError("the plan table names the algorithm '" + std::string(entry.algorithm) +
                       "', which does not exist.");
    read.push_back({entry.collective, entry.symmetric, entry.up_to_bytes, *algorithm});
  }
  impl_->plan(memory).set(read);
}

int device_count() { return cuda::Engine::devices(); }

std::vector<std::string_view> algorithms(Collective collective, Memory memory) {
  std::vector<std::string_view> names;
  for (const Algorithm one : Plan::algorithms(collective, memory)) names.push_back(name_of(one));
  return names;
}

}  // namespace unisono
