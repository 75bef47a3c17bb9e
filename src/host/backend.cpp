#include "host/backend.hpp"

#include <unistd.h>

#include "base/env.hpp"

namespace unisono {
namespace {

// Returns the bytes from which outputs go around the cache: they would not stay there until they are read.
std::size_t default_stream_bytes() {
  const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache > 0 ? static_cast<std::size_t>(cache) / 4 : std::size_t{4} << 20;
}

}  // namespace

LocalCommunicator::LocalCommunicator(Bootstrap& bootstrap, const Communicator::Options& options,
                                     const std::vector<int>& numbers)
    : Impl(options.check.value_or(env().check)),
      stream_bytes_(env().stream_bytes ? env().stream_bytes : default_stream_bytes()),
      group_(bootstrap, timeout_of(options), check_, options.while_waiting, numbers),
      plan_(Plan::of_host({.ranks = group_.size(),
                           .ranks_a_core = group_.ranks_a_core(),
                           .cached = group_.cached(),
                           .one_process = group_.one_process()})) {}

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

}  // namespace unisono
