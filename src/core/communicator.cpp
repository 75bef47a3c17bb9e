#include "unisono/communicator.hpp"

#include "base/env.hpp"
#include "core/plan.hpp"
#include "cuda/engine.hpp"
#include "fabric/communicator.hpp"
#include "host/backend.hpp"

namespace unisono {
namespace {

// Both ends of a message have one plan, whichever call each makes.
Collective planned(Collective collective) {
  return collective == Collective::send || collective == Collective::recv ? Collective::send_recv
                                                                          : collective;
}

}  // namespace

double Communicator::Impl::timeout_of(const Options& options) {
  const double seconds = options.timeout_s.value_or(env().timeout_s);
  constexpr double kMost = 1e9;  // clocks count them in narrow numbers
  if (!(seconds > 0 && seconds <= kMost))
    throw UsageError("timeout_s=" + std::to_string(seconds) +
                     " is no deadline: give seconds above 0, at most 1e9.");
  return seconds;
}

Communicator::Communicator(const std::shared_ptr<Bootstrap>& bootstrap, const Options& options)
    : impl_(options.fabric
                ? fabric::make_communicator(*bootstrap, options)
                : std::unique_ptr<Impl>(std::make_unique<LocalCommunicator>(*bootstrap, options))) {}
Communicator::~Communicator() = default;
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
void Communicator::close() noexcept { impl_->close(); }
bool Communicator::closed() const { return impl_->closed(); }
void Communicator::fail(const std::string& text, bool late) noexcept { impl_->fail(text, late); }
void Communicator::raise_if_failed() { impl_->raise_if_failed(); }

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
  impl_->run({call, rank(), size(), sends, receives});
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

void Communicator::batch_send_recv(const Call& call, std::span<const Outgoing> sends,
                                   std::span<const Incoming> receives) {
  Call bytes = call;
  bytes.dtype = DType::u8;
  impl_->run({bytes, rank(), size(), sends, receives});
}

void Communicator::barrier() { impl_->barrier(); }

Buffer Communicator::empty(std::size_t bytes, Memory memory) {
  return {impl_->allocate(bytes, memory), bytes};
}

std::optional<int> Communicator::device() const { return impl_->device(); }
std::optional<int> Communicator::Impl::device() const {
  return has_engine() ? std::optional(engine().device()) : std::nullopt;
}

bool Communicator::peer_access() const { return impl_->has_engine() && impl_->engine().peer_access(); }
bool Communicator::nvlink() const { return impl_->has_engine() && impl_->engine().nvlink(); }

void Communicator::synchronize(void* stream) { impl_->synchronize(stream); }
void Communicator::Impl::synchronize(void* stream) { engine().synchronize(stream); }

void* Communicator::last_stream() const {
  return impl_->has_engine() ? impl_->engine().last_stream() : nullptr;
}

std::string_view Communicator::card() const { return impl_->engine().card(); }

int Communicator::sms(Collective collective, std::size_t bytes, bool symmetric, std::string_view algorithm,
                      bool in_place) const {
  const auto known = from_name<Algorithm>(algorithm, kAlgorithms);
  if (!known) throw UsageError("there is no algorithm '" + std::string(algorithm) + "'.");
  const cuda::Engine& gpu = impl_->engine();
  collective = planned(collective);
  const bool reached = symmetric && gpu.reaches(collective, in_place);
  const Shape shape = impl_->plan(Memory::device).shape(collective, bytes, reached, *known);
  return gpu.shape(collective, *known, shape, bytes).blocks;
}

void Communicator::set_shape(int blocks, int threads, std::size_t piece_bytes) {
  const Shape shape{blocks, threads, piece_bytes};
  check_shape(shape, "kernels are asked for");
  impl_->engine().set_shape(shape);
}
void Communicator::reset_shape() { impl_->engine().set_shape(std::nullopt); }

std::string_view Communicator::plan(Collective collective, std::size_t bytes, bool symmetric, Memory memory,
                                    bool in_place) const {
  collective = planned(collective);
  const Plan& plan = impl_->plan(memory);
  if (memory == Memory::device && collective == Collective::all_to_all_v)
    bytes /= static_cast<std::size_t>(size());  // its messages, if they are of a size
  if (memory == Memory::device && impl_->has_engine())
    return name_of(impl_->engine().choose(plan, collective, bytes, symmetric, in_place));
  if (collective == Collective::send_recv) symmetric = false;  // as the call does
  const Algorithm chosen = plan.choose(collective, bytes, symmetric);
  // in place, a peer may overwrite a block before its owner has sent it
  const bool kept =
      !in_place || (collective != Collective::all_to_all && collective != Collective::all_to_all_v);
  const bool reached = symmetric || memory == Memory::device || impl_->reaches_any_memory();
  return name_of(is_direct(chosen) && !(reached && kept) ? Plan::staged(collective) : chosen);
}

void Communicator::set_plan(const std::vector<PlanEntry>& entries, Memory memory) {
  std::vector<Plan::Entry> read;
  for (const PlanEntry& entry : entries) {
    const auto algorithm = from_name<Algorithm>(entry.algorithm, kAlgorithms);
    if (!algorithm)
      throw UsageError("the plan table names the algorithm '" + std::string(entry.algorithm) +
                       "', which does not exist.");
    read.push_back({planned(entry.collective),
                    entry.symmetric,
                    entry.up_to_bytes,
                    *algorithm,
                    {entry.blocks, entry.threads, entry.piece_bytes}});
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
