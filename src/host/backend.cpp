#include "host/backend.hpp"

#include <cstring>

#include "base/env.hpp"
#include "core/comparison.hpp"
#include "host/move.hpp"

namespace unisono {

namespace {

Plan plan_of(const Group& group, bool cached) {
  static_assert(HostThread::kPacketBytes == Plan::Host::kPacket);
  return Plan::of_host({.ranks = group.size(),
                        .ranks_a_core = group.ranks_a_core(),
                        .cached = cached,
                        .one_process = group.one_process(),
                        .kernel_fast = group.kernel_copies() == KernelCopies::fast,
                        .lets_go = host::lets_go()});
}

}  // namespace

LocalCommunicator::LocalCommunicator(Bootstrap& bootstrap, const Communicator::Options& options,
                                     const std::vector<int>& numbers)
    : Impl(options.check.value_or(env().check)),
      group_(bootstrap, timeout_of(options), check_, options.while_waiting, numbers),
      plans_{plan_of(group_, false), plan_of(group_, true)} {
  group_.set_before_rest(options.before_rest);
}

void LocalCommunicator::do_run(Request& request) {
  if (request.call->memory == Memory::device) refuse_gpu();
  run_on_host(request);
}

void LocalCommunicator::do_run_pair(Request& request, int to, int from) {
  if (request.call->memory == Memory::device) refuse_gpu();
  run_pair_on_host(request, to, from);
}

std::shared_ptr<void> LocalCommunicator::do_allocate(std::size_t bytes, Memory memory) {
  if (memory == Memory::device) refuse_gpu();
  auto [segment, number] = allocate_on_host(bytes);
  return {segment->data(), [symmetric = symmetric_, number = number](void*) { symmetric->release(number); }};
}

AllocationAgreement<Group> LocalCommunicator::begin_registration(const MemoryRange& range) {
  group_.lane().mark(kMarkOfRegistration);  // a rank that makes another call meets other marks
  if (check_ && size() > 1) compare(*this, group_.exchange(Ticket::of(Collective::register_memory)));
  return agree_to_register(group_, range);
}

// Ranks reach plain memory as it is, or cannot reach it at all: there is nothing to keep but the owner.
std::shared_ptr<void> LocalCommunicator::do_register(const MemoryRange& range) {
  auto agreement = begin_registration(range);
  agreement.attempt([&] {
    if (range.bytes > 0 && symmetric_->find(static_cast<const byte*>(range.data), 1).allocation)
      throw UsageError(kSymmetricAlready);
  });
  agreement.meet();
  return std::const_pointer_cast<void>(range.owner);
}

void LocalCommunicator::do_end(Registration::State& one) {
  group_.lane().mark(kMarkOfEnd);
  if (size() > 1) compare(*this, group_.exchange(Ticket::of(Collective::end_registration, one.number)));
}

// A sum of one weighed row, which the kernels have of all but f64.
void scale(const Scaling& array) {
  if (array.dtype != DType::f64) {
    const auto factor = static_cast<float>(array.factor);
    return host::kernels().rows.weigh[static_cast<int>(array.dtype)](array.to, &array.from, &factor, 1,
                                                                     array.count);
  }
  for (std::size_t at = 0; at < array.count * sizeof(double); at += sizeof(double)) {
    double value;
    std::memcpy(&value, array.from + at, sizeof(value));
    value *= array.factor;
    std::memcpy(array.to + at, &value, sizeof(value));
  }
}

}  // namespace unisono
