#include "unisono/communicator.hpp"

#include <numeric>

#include "base/deadline.hpp"
#include "base/env.hpp"
#include "base/text.hpp"
#include "core/backend.hpp"

namespace unisono {
namespace {

// Throws UsageError unless `header_version` has this library's major and minor number. Patches change no
// layout.
void check_headers(int header_version) {
  if (header_version / 100 == kHeaderVersion / 100) return;
  throw UsageError("this program was compiled with the headers of Unisono " + version_text(header_version) +
                   ", but has loaded the library " + version_text(kHeaderVersion) +
                   ": compile it with the headers of that library, or load the library of those headers.");
}

}  // namespace

void Communicator::Impl::refuse_closed(std::string_view what) {
  throw UsageError("the communicator is closed: make a new one to call " + std::string(what) + ".");
}
void Communicator::Impl::refuse_inherited(std::string_view what) {
  throw UsageError("this process was forked from a rank and is none itself: call " + std::string(what) +
                   " in the rank's own process, or start the ranks with a launcher.");
}
void Communicator::Impl::refuse_inside(std::string_view what) {
  throw UsageError(std::string(what) + " was called from within a call of this communicator, as by a " +
                   "signal's handler: call it after that.");
}

double Communicator::Impl::timeout_of(const Options& options) {
  return check_timeout_s(options.timeout_s.value_or(env().timeout_s));
}

void Communicator::Impl::set_later_timeout(double timeout_s) {
  later_timeout_s_ = check_timeout_s(timeout_s);
  set_gpu_timeout(timeout_s);
}

int library_version() { return kHeaderVersion; }

Communicator::Communicator(int header_version, const std::shared_ptr<Bootstrap>& bootstrap,
                           const Options& options)
    : impl_((check_headers(header_version), make_backend(bootstrap, options))) {
  impl_->options = options;
  impl_->options.transport = {};  // what it holds may not outlive the constructor
  impl_->has_transport = static_cast<bool>(options.transport);
}
Communicator::~Communicator() {
  if (impl_) impl_->end_begun();
}
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&& other) noexcept {
  if (impl_ && &other != this) impl_->end_begun();
  impl_ = std::move(other.impl_);
  return *this;
}

Work Communicator::Impl::begin(const std::shared_ptr<Begun>& begun) {
  const std::string_view what = name_of(begun->collective);
  if (begun->request) name_algorithm(*begun->request);
  begun->call.algorithm = {};  // the caller's text
  const auto run_it = [this, begun] {
    if (!begun->request) do_barrier();
    else if (begun->pair) do_run_pair(*begun->request, begun->to, begun->from);
    else run_scaled(*begun->request);
  };
  if (begun->call.memory == Memory::device) return turn(what, run_it), Work();
  check_open(what);
  auto state = std::make_shared<Work::State>(what);
  call_threads().add(turns_, [this, what, state, begun, run_it](Turns::Number number) {
    const Turns::Turn turn(turns_, number);  // a later call finds the work done
    std::exception_ptr error;
    try {
      const auto run_beside = [&] {
        const Beside beside(*this);
        run_it();
      };
      in_turn(what, run_beside, begun->call.timeout_s);
    } catch (...) { error = std::current_exception(); }
    return state->end(std::move(error));
  });
  return Work(state);
}

// The scaled input takes the output's place, if that is as large. A named algorithm may still be refused, and
// compared calls may differ: both leave the buffers as they were.
void Communicator::Impl::run_scaled(Request& request) {
  if (request.call->factor == 1) return do_run(request);
  const bool refusable = check_ || request.algorithm != Algorithm::automatic;
  byte* to = request.args.out;
  if (refusable || request.out_bytes != request.in_bytes) {
    if (scaled_bytes_ < request.in_bytes) {
      scaled_bytes_ = 0;
      scaled_.reset();  // before the new one is made: not both at once
      scaled_ = std::make_unique_for_overwrite<byte[]>(request.in_bytes);
      scaled_bytes_ = request.in_bytes;
    }
    to = scaled_.get();
  }
  Call call = *request.call;
  const std::size_t count = request.in_bytes / size_of(call.dtype);
  scale({.to = to, .from = request.args.in, .count = count, .dtype = call.dtype, .factor = call.factor});
  call.in = to;
  call.factor = 1;
  Request sum(request.collective, call, request.rank, request.ranks);
  sum.algorithm = request.algorithm;
  do_run(sum);
}

void Communicator::Impl::settle() noexcept {
  if (inherited() || turns_.inside()) return;
  {
    const std::scoped_lock lock(beginning_);
    if (!call_threads_) return;
  }
  call_threads_->settle();
}

CallThreads& Communicator::Impl::call_threads() {
  const std::scoped_lock lock(beginning_);
  if (!call_threads_)
    call_threads_ = std::make_unique<CallThreads>(
        [this](const std::string& why) { abort("a callback of a Work has thrown an exception: " + why); });
  return *call_threads_;
}

void Communicator::Impl::end_begun() noexcept {
  if (!call_threads_) return;
  if (inherited()) return static_cast<void>(call_threads_.release());  // its thread is the parent's
  close();
  call_threads_.reset();
}

std::vector<std::vector<int>> Communicator::Impl::nodes() const {
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  return {all};
}

double default_timeout_s() { return env().timeout_s; }

std::vector<std::vector<int>> Communicator::nodes() const { return impl_->nodes(); }
std::string Communicator::transport() const { return impl_->transport(); }
int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
void Communicator::close() noexcept {
  impl_->close();
  impl_->settle();
}
bool Communicator::closed() const { return impl_->closed(); }
void Communicator::raise_if_failed() { impl_->raise_if_failed(); }
void Communicator::abort(const std::string& why) { impl_->abort(why); }

void Communicator::all_reduce(const Call& call) { run(Collective::all_reduce, call); }
void Communicator::reduce(const Call& call) { run(Collective::reduce, call); }
void Communicator::broadcast(const Call& call) { run(Collective::broadcast, call); }
void Communicator::all_gather(const Call& call) { run(Collective::all_gather, call); }
void Communicator::gather(const Call& call) { run(Collective::gather, call); }
void Communicator::reduce_scatter(const Call& call) { run(Collective::reduce_scatter, call); }
void Communicator::scatter(const Call& call) { run(Collective::scatter, call); }
void Communicator::all_to_all(const Call& call) { run(Collective::all_to_all, call); }
void Communicator::all_to_all_v(const Call& call, std::span<const std::size_t> sends,
                                std::span<const std::size_t> receives) {
  run(call, sends, receives);
}
void Communicator::send(const Call& call, int to) { run(Collective::send, call, to, -1); }
void Communicator::recv(const Call& call, int from) { run(Collective::recv, call, -1, from); }
void Communicator::send(const Call& call, int to, int tag) { run(Collective::send, call, to, -1, tag); }
Received Communicator::recv(const Call& call, int from, int tag) {
  return run(Collective::recv, call, -1, from, tag);
}
void Communicator::send_recv(const Call& call, int to, int from) {
  run(Collective::send_recv, call, to, from);
}
void Communicator::batch_send_recv(const Call& call, std::span<const Outgoing> sends,
                                   std::span<const Incoming> receives) {
  run(call, sends, receives);
}
void Communicator::barrier() { impl_->barrier(); }

namespace {

[[noreturn]] void refuse_alone(Collective collective) {
  throw UsageError(std::string(name_of(collective)) +
                   " cannot be called so: give the parameters that its own function has.");
}

// Throws UsageError unless a Call alone describes such a call.
void check_alone(Collective collective) {
  const CollectiveTraits& traits = traits_of(collective);
  const bool moves = traits.in.extent != Extent::none || traits.out.extent != Extent::none;
  if (!moves || traits.two_ended || traits.by_parts()) refuse_alone(collective);
}

struct Ends {
  int to, from;  // -1: none
};

// Returns the ends that a call between two ranks has. Throws UsageError if it is no such call.
Ends ends_of(Collective collective, int to, int from) {
  const CollectiveTraits& traits = traits_of(collective);
  if (traits.two_ended)
    return {traits.in.extent == Extent::none ? -1 : to, traits.out.extent == Extent::none ? -1 : from};
  throw UsageError(std::string(name_of(collective)) +
                   " has no destination and no source: leave those parameters out.");
}

// Returns a message with a tag.
Message message_of(Collective collective, const Call& call, int ranks, int to, int from, int tag) {
  return {collective, call, ranks, collective == Collective::send ? to : from, tag};
}

Call as_bytes(Call call) {
  call.dtype = DType::u8;
  return call;
}

}  // namespace

void Communicator::run(Collective collective, const Call& call) {
  if (collective == Collective::barrier) return impl_->barrier(call);
  check_alone(collective);
  impl_->run({collective, call, impl_->rank(), impl_->size()});
}
void Communicator::run(Collective collective, const Call& call, int to, int from) {
  const Ends ends = ends_of(collective, to, from);
  impl_->run_pair({collective, call, rank(), size(), ends.to, ends.from}, ends.to, ends.from);
}
Received Communicator::run(Collective collective, const Call& call, int to, int from, int tag) {
  return impl_->run(message_of(collective, call, size(), to, from, tag));
}
void Communicator::run(const Call& call, std::span<const std::size_t> sends,
                       std::span<const std::size_t> receives) {
  impl_->run({call, rank(), size(), sends, receives});
}
void Communicator::run(const Call& call, std::span<const Outgoing> sends,
                       std::span<const Incoming> receives) {
  const Call bytes = as_bytes(call);
  impl_->run({bytes, rank(), size(), sends, receives});
}

Work Communicator::begin(Collective collective, const Call& call) {
  const auto begun = std::make_shared<Begun>(collective, call);
  if (collective == Collective::barrier) {
    check_timeout(call);
    begun->call = {.timeout_s = call.timeout_s};
  } else {
    check_alone(collective);
    begun->request.emplace(collective, begun->call, rank(), size());
  }
  return impl_->begin(begun);
}
Work Communicator::begin(Collective collective, const Call& call, int to, int from) {
  const Ends ends = ends_of(collective, to, from);
  const auto begun = std::make_shared<Begun>(collective, call);
  begun->request.emplace(collective, begun->call, rank(), size(), ends.to, ends.from);
  begun->pair = true;
  begun->to = ends.to;
  begun->from = ends.from;
  return impl_->begin(begun);
}
Work Communicator::begin(Collective collective, const Call& call, int to, int from, int tag) {
  return impl_->begin(message_of(collective, call, size(), to, from, tag));
}
Work Communicator::begin(const Call& call, std::span<const std::size_t> sends,
                         std::span<const std::size_t> receives) {
  const auto begun = std::make_shared<Begun>(Collective::all_to_all_v, call);
  begun->request.emplace(begun->call, rank(), size(), sends, receives);
  return impl_->begin(begun);
}
Work Communicator::begin(const Call& call, std::span<const Outgoing> sends,
                         std::span<const Incoming> receives) {
  const auto begun = std::make_shared<Begun>(Collective::batch_send_recv, as_bytes(call));
  begun->request.emplace(begun->call, rank(), size(), sends, receives);
  return impl_->begin(begun);
}

Buffer Communicator::empty(std::size_t bytes, Memory memory) {
  return {impl_->allocate(bytes, memory), bytes};
}

Registration Communicator::register_memory(const MemoryRange& range) {
  return Registration(impl_->register_memory(range));
}

bool Communicator::tells_before_rest() const { return impl_->tells_before_rest(); }
std::optional<int> Communicator::device() const { return impl_->device(); }
bool Communicator::peer_access() const { return impl_->peer_access(); }
bool Communicator::nvlink() const { return impl_->nvlink(); }
std::string_view Communicator::card() const { return impl_->card(); }
void Communicator::synchronize(void* stream) { impl_->synchronize(stream); }
void* Communicator::last_stream() const { return impl_->last_stream(); }

void Communicator::set_timeout(double timeout_s) { impl_->set_later_timeout(timeout_s); }

bool Communicator::check() const { return impl_->check(); }
void Communicator::set_check(bool check) { impl_->set_check(check); }

std::vector<std::string_view> algorithms(Collective collective, Level level) {
  std::vector<std::string_view> names;
  for (const Algorithm one : Plan::algorithms(collective, level)) names.push_back(name_of(one));
  return names;
}

}  // namespace unisono
