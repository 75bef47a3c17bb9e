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

double Communicator::Impl::timeout_of(const Options& options) {
  return check_timeout_s(options.timeout_s.value_or(env().timeout_s));
}

int library_version() { return kHeaderVersion; }

Communicator::Communicator(int header_version, const std::shared_ptr<Bootstrap>& bootstrap,
                           const Options& options)
    : impl_((check_headers(header_version), make_backend(bootstrap, options))) {}
Communicator::~Communicator() = default;
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;

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
void Communicator::close() noexcept { impl_->close(); }
bool Communicator::closed() const { return impl_->closed(); }
void Communicator::raise_if_failed() { impl_->raise_if_failed(); }
void Communicator::abort(const std::string& why) { impl_->abort(why); }

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

Registration Communicator::register_memory(const MemoryRange& range) {
  return Registration(impl_->register_memory(range));
}

std::optional<int> Communicator::device() const { return impl_->device(); }
bool Communicator::peer_access() const { return impl_->peer_access(); }
bool Communicator::nvlink() const { return impl_->nvlink(); }
std::string_view Communicator::card() const { return impl_->card(); }
void Communicator::synchronize(void* stream) { impl_->synchronize(stream); }
void* Communicator::last_stream() const { return impl_->last_stream(); }

bool Communicator::check() const { return impl_->check(); }
void Communicator::set_check(bool check) { impl_->set_check(check); }

std::vector<std::string_view> algorithms(Collective collective, Level level) {
  std::vector<std::string_view> names;
  for (const Algorithm one : Plan::algorithms(collective, level)) names.push_back(name_of(one));
  return names;
}

}  // namespace unisono
