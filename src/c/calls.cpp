// Calls of the C interface: runs them, and begins them as works.
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "c/arguments.hpp"
#include "c/enumerations.hpp"

using namespace unisono;
using namespace unisono::c;

struct unisono_work {
  Work work;
};

namespace {

std::span<const std::size_t> counts(const std::size_t* from, const char* name, int ranks) {
  return {&given(from, name), static_cast<std::size_t>(ranks)};
}

// Returns the messages of one direction. make: makes a message of C++.
template <class Made, class T, class Make>
std::vector<Made> messages(const T* from, std::size_t many, const char* name, int ranks, const Make& make) {
  if (many > static_cast<std::size_t>(ranks))
    throw UsageError(std::string("call->num_") + name + "=" + std::to_string(many) + " are too many for " +
                     std::to_string(ranks) + " ranks: give each peer one message, or call it again.");
  std::vector<Made> all;
  if (many > 0) given(from, ("call->" + std::string(name)).c_str());
  for (std::size_t i = 0; i < many; ++i) all.push_back(make(from[i]));
  return all;
}

// Checks a call of `of`, and gives it to Communicator::run or `begin` as `to` does: to(arguments of either).
template <class To>
auto dispatch(const Communicator& of, std::int32_t wanted, const unisono_call* from, const To& to) {
  const auto collective = number<Collective>(wanted, kRunnable, "collective", "unisono_collective");
  if (collective == Collective::barrier && !from) return to(collective);
  unisono_call room;
  const unisono_call& c = read(from, room, "call", "unisono_call", offsetof(unisono_call, factor));
  check_reserved(c.reserved, "call->reserved");
  if (collective == Collective::barrier) return to(collective, Call{.timeout_s = c.timeout_s});
  const Call call{.in = c.in,
                  .out = c.out,
                  .count = c.count,
                  .dtype = number<DType>(c.dtype, kDTypes, "call->dtype", "unisono_dtype"),
                  .op = number<Op>(c.op, kOps, "call->op", "unisono_op"),
                  .root = c.root,
                  .memory = memory_of(c.memory, "call->memory"),
                  .stream = c.stream,
                  .algorithm = c.algorithm ? std::string_view(c.algorithm) : std::string_view(),
                  .wire = number<Wire>(c.wire, kWires, "call->wire", "unisono_wire"),
                  .timeout_s = c.timeout_s,
                  .factor = c.factor == 0 ? 1 : c.factor};
  if (number<bool>(c.tagged, 2, "call->tagged", "flag")) return to(collective, call, c.to, c.from, c.tag);
  switch (collective) {
    case Collective::send:
    case Collective::recv:
    case Collective::send_recv: return to(collective, call, c.to, c.from);
    case Collective::all_to_all_v: {
      const auto sends = counts(c.send_counts, "call->send_counts", of.size());
      return to(call, sends, counts(c.recv_counts, "call->recv_counts", of.size()));
    }
    case Collective::batch_send_recv: break;
    default: return to(collective, call);
  }
  const auto sends =
      messages<Outgoing>(c.sends, c.num_sends, "sends", of.size(),
                         [](const unisono_outgoing& one) { return Outgoing{one.data, one.bytes, one.to}; });
  const auto receives =
      messages<Incoming>(c.receives, c.num_receives, "receives", of.size(),
                         [](const unisono_incoming& one) { return Incoming{one.data, one.bytes, one.from}; });
  return to(call, std::span<const Outgoing>(sends), std::span<const Incoming>(receives));
}

unisono_received as_c(const Received& received) { return {received.bytes, received.source}; }

}  // namespace

int unisono_run(unisono_comm* comm, std::int32_t collective, const unisono_call* call) {
  return guarded([&] {
    Communicator& of = given(comm, "comm").communicator;
    dispatch(of, collective, call, [&](const auto&... form) {
      if constexpr (sizeof...(form) < 5) return of.run(form...);
      else if (const Received received = of.run(form...); call->received) *call->received = as_c(received);
    });
  });
}

int unisono_begin(unisono_comm* comm, std::int32_t collective, const unisono_call* call,
                  unisono_work** work) {
  return guarded([&] {
    given(work, "work") = nullptr;
    Communicator& of = given(comm, "comm").communicator;
    auto made = std::make_unique<unisono_work>();
    made->work = dispatch(of, collective, call, [&](const auto&... form) { return of.begin(form...); });
    *work = made.release();
  });
}

int unisono_wait(const unisono_work* work, double timeout_s) {
  return guarded(
      [&] { given(work, "work").work.wait(timeout_s == 0 ? std::nullopt : std::optional(timeout_s)); });
}

int unisono_done(const unisono_work* work) {
  int done = -1;
  guarded([&] { done = given(work, "work").work.done(); });
  return done;
}

int unisono_then(const unisono_work* work, void (*callback)(void*), void* user) {
  return guarded(
      [&] { given(work, "work").work.then([call = &given(callback, "callback"), user] { call(user); }); });
}

int unisono_work_received(const unisono_work* work, unisono_received* received) {
  return guarded([&] { given(received, "received") = as_c(given(work, "work").work.received()); });
}

void unisono_work_free(unisono_work* work) { delete work; }
