#include "nodes/backend.hpp"

#include <algorithm>
#include <thread>

#include "base/deadline.hpp"
#include "base/env.hpp"
#include "base/traits.hpp"
#include "cuda/nodes.hpp"
#include "nodes/host_space.hpp"

namespace unisono::nodes {
namespace {

// A wait within the node outlasts one between nodes, whose error says more.
constexpr double kLocalPatience = 1.25, kLocalGraceS = 0.5;
double local_timeout_s(double timeout_s) { return timeout_s * kLocalPatience + kLocalGraceS; }
// How long a rank that has lost a peer listens for what that peer, or its neighbours, say of the cause.
constexpr auto kListening = std::chrono::milliseconds(500);

// Keeps scratch of a call that failed to the end of the process: a transport, or a neighbour's direct write,
// may still reach it.
void keep(std::unique_ptr<Space> scratch) {
  static auto& kept = *new std::vector<std::unique_ptr<Space>>;
  static std::mutex keeping;
  const std::scoped_lock lock(keeping);
  kept.push_back(std::move(scratch));
}

}  // namespace

std::shared_ptr<Transport> make_transport(Bootstrap& bootstrap, const Communicator::Options& options) {
  if (options.transport) return options.transport();
  if (env().transport == "fabric") return fabric_transport(bootstrap, options);
  throw UsageError(
      "the ranks are on several nodes, and nothing carries data between them: make the communicator by "
      "unisono::mpi::communicator, give Options::transport, or set UNISONO_TRANSPORT=fabric.");
}

NodesCommunicator::Carrier::Carrier(NodesCommunicator& of, std::shared_ptr<Transport> transport,
                                    std::unique_ptr<Space> where)
    : space(std::move(where)),
      courier(of.place_, std::move(transport), of.timeout_s_, [&of] { of.look(); }),
      moves(of.place_, *of.local_, courier, *space),
      sums(moves, of.limits_) {}

NodesCommunicator::NodesCommunicator(Bootstrap& bootstrap, Topology place,
                                     const Communicator::Options& options, const Limits& limits)
    : Impl(options.check.value_or(env().check)),
      place_(std::move(place)),
      limits_(limits),
      timeout_s_(timeout_of(options)),
      while_waiting_(options.while_waiting) {
  NodeBootstrap of_node(bootstrap, place_);
  Communicator::Options inner = options;
  inner.timeout_s = local_timeout_s(timeout_s_);
  inner.check = false;  // calls are compared here, among all ranks
  inner.while_waiting = [this] {
    if (while_waiting_) while_waiting_();
    hear();
  };
  inner.transport = {};
  local_ = make_machine_backend(of_node, inner, place_.local());
  transport_ = make_transport(bootstrap, options);
  host_ = std::make_unique<Carrier>(*this, transport_, std::make_unique<HostSpace>());
  make_mailbox();
  if (!options.device) return;
  auto space = cuda::make_space(*options.device);
  gpu_space_ = space.get();
  nccl_ = std::make_shared<NcclTransport>(NcclTransport::Setting{
      bootstrap, *space, timeout_s_, [this](int of) { return place_.who(of); }, [this] { look(); }});
  gpu_ = std::make_unique<Carrier>(*this, nccl_, std::move(space));
}

void NodesCommunicator::set_timeout(std::optional<double> timeout_s) {
  for (Carrier* const one : {host_.get(), gpu_.get()})
    if (one) one->courier.set_timeout(timeout_s.value_or(timeout_s_));
  local_->set_timeout(timeout_s ? std::optional(local_timeout_s(*timeout_s)) : std::nullopt);
}

void NodesCommunicator::set_gpu_timeout(double timeout_s) {
  local_->set_gpu_timeout(local_timeout_s(timeout_s));
}

NodesCommunicator::~NodesCommunicator() {
  close();
  if (!host_ || !(failed_ || abandoned_)) return;
  keep(std::move(host_->space));
}

// A call on the GPU's memory, from begin to end. Does nothing for a call on host memory.
class NodesCommunicator::OnStream {
 public:
  OnStream(GpuSpace* space, const Call& call) : space_(call.memory == Memory::device ? space : nullptr) {
    if (space_) space_->begin(call.stream);
  }
  ~OnStream() {
    if (space_) space_->end();
  }
  OnStream(const OnStream&) = delete;

 private:
  GpuSpace* space_;
};

void NodesCommunicator::close() noexcept {
  closed_ = true;
  if (inherited()) return;  // the parent's peers are not told of a child's end
  local_->close();
  transport_->close();
  if (nccl_) nccl_->close();
}

void NodesCommunicator::fail(const Failure& failure) noexcept {
  {
    const std::scoped_lock lock(failing_);
    if (failure_) return;
    failure_ = failure;
  }
  failed_ = true;
  local_->fail(failure);
}

void NodesCommunicator::raise_if_failed() {
  if (failed_) {
    const std::scoped_lock lock(failing_);
    if (failure_) raise(*failure_);
  }
  local_->raise_if_failed();
}

void NodesCommunicator::enter(std::string_view what, std::uint64_t) {
  doing_ = what;
  if (failed_) raise_if_failed();
}

void NodesCommunicator::hear() {
  if (failed_ || !transport_) return;
  const auto told = transport_->heard();
  if (!told || told->empty()) return;
  const Failure failure = failure_told(*told);
  fail(failure);
  raise(failure);
}

void NodesCommunicator::look() {
  if (closed_)
    throw UsageError("the communicator was closed by another thread while it waited in " + doing_ + ".");
  if (while_waiting_) while_waiting_();
  raise_if_failed();
  hear();
}

// Returns what has ended a call. A lost peer may have left because of a third rank's end: listens for a while
// to what the others say.
Failure NodesCommunicator::cause_of(const Error& error) {
  Failure own = failure_of(error);
  if (own.kind != FailureKind::peer_lost) return own;
  for (const auto until = Clock::now() + kListening; Clock::now() < until; std::this_thread::sleep_for(kLook))
    try {
      local_->raise_if_failed();
      hear();
    } catch (const Error& other) { return failure_of(other); }
  return own;
}

void NodesCommunicator::fail_by(const Error& error) {
  const Failure cause = failed_ ? failure_of(error) : cause_of(error);
  if (!failed_) {
    fail(cause);
    transport_->tell(told(cause));
  }
  transport_->close();  // where that breaks connections, the peers notice now
  if (nccl_) nccl_->close();
  raise_if_failed();
}

NodesCommunicator::Carrier& NodesCommunicator::carrier(Memory memory) {
  if (memory == Memory::host) return *host_;
  if (!gpu_) refuse_gpu();
  return *gpu_;
}

void NodesCommunicator::do_run(Request& request) {
  Carrier& by = carrier(request.call->memory);
  request.algorithm = chosen(request);
  guarded([&] {
    if (check_) compare_calls(request);
    const OnStream on(gpu_space_, *request.call);
    if (request.args.bytes > 0 || request.collective == Collective::all_to_all_v) run_by(by, request);
  });
}

void NodesCommunicator::run_by(Carrier& by, const Request& request) {
  const Args& a = request.args;
  const Call& call = *request.call;
  const Sum what{call.dtype, call.op, call.wire, size()};
  switch (request.collective) {
    case Collective::all_reduce:
      if (call.wire != Wire::exact) return by.sums.quantised(a.in, a.out, call.count, what);
      return by.sums.all_reduce(a.in, a.out, call.count, what, request.algorithm);
    case Collective::reduce:
      return by.sums.reduce(a.in, rank() == a.root ? a.out : nullptr, call.count, what, a.root,
                            request.algorithm);
    case Collective::reduce_scatter:
      return by.sums.reduce_scatter(a.in, a.out, call.count, what, request.algorithm);
    case Collective::broadcast: return by.moves.broadcast(a.in, a.out, a.bytes, a.root);
    case Collective::all_gather: return by.moves.all_gather(a.in, a.out, a.block).wait();
    case Collective::gather: return by.moves.gather(a.in, a.out, a.block, a.root).wait();
    case Collective::scatter: return by.moves.scatter(a.in, a.out, a.block, a.root);
    case Collective::all_to_all: return by.moves.all_to_all(a.in, a.out, a.block).wait();
    case Collective::all_to_all_v:
      return by.moves.all_to_all_v(request.sends, request.receives, request.in_place());
    default: return by.moves.batch(request.sends, request.receives);
  }
}

void NodesCommunicator::do_run_pair(Request& request, int to, int from) {
  Carrier& by = carrier(request.call->memory);
  const Args& a = request.args;
  guarded([&] {
    if (check_) compare_ends(request, to, from);
    if (a.bytes == 0) return;
    const OnStream on(gpu_space_, *request.call);
    if (to == rank()) return by.space->copy(a.out, a.in, a.bytes);
    by.moves.send_recv(a.in, to < 0 ? 0 : a.bytes, to, a.out, from < 0 ? 0 : a.bytes, from);
  });
}

void NodesCommunicator::do_barrier() {
  guarded([&] {
    if (check_) compare_all(Ticket::of(Collective::barrier));
    host_->moves.barrier();
  });
}

class NodesCommunicator::BegunExchange final : public Impl::Exchange {
 public:
  BegunExchange(NodesCommunicator& of, Courier::Exchange exchange)
      : of_(of), exchange_(std::move(exchange)) {}
  void wait() override {
    of_.guarded([&] { exchange_.wait(); });
  }

 private:
  NodesCommunicator& of_;
  Courier::Exchange exchange_;
};

std::unique_ptr<Communicator::Impl::Exchange> NodesCommunicator::begin_exchange(
    std::span<const Outgoing> sends, std::span<const Incoming> receives) {
  return guarded([&] {
    if (check_) {
      const Call call{.dtype = DType::u8};
      compare_calls({call, rank(), size(), sends, receives});
    }
    return std::make_unique<BegunExchange>(
        *this, host_->courier.begin({{sends.begin(), sends.end()}, {receives.begin(), receives.end()}}));
  });
}

void NodesCommunicator::meet_node() {
  guarded([&] { local_->barrier(); });
}

// Asks as for partial sums of an element's size, and for root 0.
Algorithm NodesCommunicator::choose(Collective collective, std::size_t bytes, bool, Memory, bool) {
  return planned_algorithm(collective, bytes, 1, 0);
}

int NodesCommunicator::sms(Collective collective, std::size_t bytes, bool symmetric, Algorithm,
                           bool in_place) {
  const Algorithm inside = local_->choose(collective, bytes, symmetric, Memory::device, in_place);
  return local_->sms(collective, bytes, symmetric, inside, in_place);
}

Algorithm NodesCommunicator::planned_algorithm(Collective collective, std::size_t bytes, double wide,
                                               int root) const {
  if (!traits_of(collective).combines) return Algorithm::automatic;
  const Algorithm listed = plan_.listed(collective, bytes, false);
  const bool runs = listed != Algorithm::automatic && (listed != Algorithm::chain || place_.uniform());
  return runs ? listed : nodes::choose(collective, place_, limits_, bytes, wide, root);
}

Algorithm NodesCommunicator::chosen(const Request& request) const {
  if (!traits_of(request.collective).combines || request.call->wire != Wire::exact) return request.algorithm;
  if (request.algorithm == Algorithm::chain && !place_.uniform())
    throw UsageError(
        "chain needs as many ranks on every node, with consecutive numbers: use two_shot, or place the "
        "ranks node by node.");
  if (request.algorithm != Algorithm::automatic) return request.algorithm;
  const Sum what{request.call->dtype, request.call->op, Wire::exact, size()};
  return planned_algorithm(request.collective, request.in_bytes,
                           static_cast<double>(what.wide()) / static_cast<double>(what.item()),
                           request.args.root);
}

void NodesCommunicator::synchronize(void* stream) {
  if (!nccl_) refuse_gpu();
  guarded([&] {
    nccl_->synchronize(stream);
    local_->synchronize(stream);
  });
}

}  // namespace unisono::nodes
