#include "unisono/communicator.hpp"

#include <unistd.h>

#include "env.hpp"
#include "impl.hpp"

namespace unisono {
namespace {

// Outputs from this size on are written around the cache: they would not stay in it until somebody reads
// them.
std::size_t default_stream_bytes() {
  const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache > 0 ? static_cast<std::size_t>(cache) / 4 : std::size_t{4} << 20;
}

}  // namespace

Communicator::Impl::Impl(Bootstrap& bootstrap, const Options& options)
    : check_(options.check.value_or(env().check)),
      stream_bytes_(env().stream_bytes ? env().stream_bytes : default_stream_bytes()),
      group_(bootstrap, options.timeout_s.value_or(env().timeout_s), check_, options.while_waiting),
      plan_(Plan::of_host(group_.size(), group_.crowded())),
      gpu_plan_(Plan::of_gpu(group_.size())) {
  if (options.device)
    engine_ = cuda::Engine::make(group_, {.device = *options.device,
                                          .max_sms = options.max_sms,
                                          .peer_access = options.peer_access,
                                          .timeout_s = options.timeout_s.value_or(env().timeout_s)});
  if (engine_ && !engine_->peer_access()) gpu_plan_ = Plan::of_gpu_staged(group_.size());
}

cuda::Engine& Communicator::Impl::engine() const {
  if (!engine_) throw UsageError("the communicator has no GPU: make it with device=, on every rank.");
  return *engine_;
}

Communicator::Impl::Turn::Turn(Impl& impl, Collective collective) : impl_(impl) {
  if (impl_.closed())
    throw UsageError("the communicator is closed: make a new one to call " +
                     std::string(name_of(collective)) + ".");
  if (impl_.group_.inherited())
    throw UsageError("this process was forked from a rank and is none itself: call " +
                     std::string(name_of(collective)) +
                     " in the rank's own process, or start the ranks with a launcher.");
  if (impl_.busy_.exchange(true, std::memory_order_acquire))
    throw UsageError(
        "another thread is inside a call of this communicator: make one communicator for each thread.");
  impl_.group_.doing(name_of(collective), ++impl_.calls_);
  try {
    impl_.group_.check();
  } catch (...) {
    impl_.busy_.store(false, std::memory_order_release);
    throw;
  }
}

void Communicator::Impl::run(Request request) {
  const Turn turn(*this, request.collective);
  if (request.call->memory == Memory::device) run_on_gpu(request, -1, -1);
  else run_on_host(request);
}

void Communicator::Impl::run_pair(Request request, int to, int from) {
  const Turn turn(*this, request.collective);
  if (request.call->memory == Memory::device) run_on_gpu(request, to, from);
  else run_pair_on_host(request, to, from);
}

Communicator::Communicator(const std::shared_ptr<Bootstrap>& bootstrap, const Options& options)
    : impl_(std::make_unique<Impl>(*bootstrap, options)) {}
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
  if (memory == Memory::device) return {impl_->allocate_on_gpu(bytes), bytes};
  auto [segment, number] = impl_->allocate(bytes);
  void* data = segment->data();
  std::shared_ptr<void> owner(
      data, [symmetric = impl_->symmetric(), number = number](void*) { symmetric->release(number); });
  return {std::move(owner), bytes};
}

std::optional<int> Communicator::device() const {
  return impl_->has_engine() ? std::optional(impl_->engine().device()) : std::nullopt;
}

bool Communicator::peer_access() const { return impl_->has_engine() && impl_->engine().peer_access(); }

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

bool Communicator::check() const { return impl_->check(); }
void Communicator::set_check(bool check) { impl_->set_check(check); }

int device_count() { return cuda::Engine::devices(); }

std::vector<std::string_view> algorithms(Collective collective, Memory memory) {
  std::vector<std::string_view> names;
  for (const Algorithm one : Plan::algorithms(collective, memory)) names.push_back(name_of(one));
  return names;
}

}  // namespace unisono
