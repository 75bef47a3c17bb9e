#include "nodes/courier.hpp"

#include <sched.h>

#include <thread>

#include "base/deadline.hpp"
#include "base/text.hpp"

namespace unisono::nodes {
namespace {

// A wait polls without rest for kSpinning if there are cores enough, then yields its core between polls, and
// from kYielding on naps between them. Many engines move data only when they are polled: with cores enough, a
// wait naps only when it has lasted longer than a long message.
constexpr auto kSpinning = std::chrono::microseconds(200);
constexpr std::chrono::milliseconds kYielding{1000}, kYieldingCrowded{5};
constexpr auto kNap = std::chrono::microseconds(100);

}  // namespace

// Turns what a transport throws into an error with the names of both ranks.
template <class Step>
auto Courier::guarded(const Step& step) {
  try {
    return step();
  } catch (const TransportError& error) { failed(error); }
}

Courier::Exchange Courier::begin(const Messages& messages) {
  if (messages.sends.empty() && messages.receives.empty()) return {};
  return {*this, guarded([&] { return transport_->exchange(messages.sends, messages.receives); })};
}

void Courier::Exchange::wait() {
  if (!pending_) return;
  courier_->wait(*pending_);
  pending_.reset();
}

void Courier::Exchange::poll() {
  if (pending_ && courier_->guarded([&] { return pending_->test(); })) pending_.reset();
}

void Courier::wait(Transport::Pending& pending) {
  auto rest = [this](Clock::duration elapsed) {
    if (elapsed < kSpinning && !place_.crowded) return;
    if (elapsed < (place_.crowded ? kYieldingCrowded : kYielding)) ::sched_yield();
    else std::this_thread::sleep_for(kNap);
  };
  guarded([&] {
    wait_until([&] { return pending.test(); }, std::chrono::duration<double>(timeout_s_), rest, look_,
               [&] { late(pending); });
  });
}

void Courier::late(Transport::Pending& pending) const {
  std::string peers;
  for (const int rank : pending.open()) peers += (peers.empty() ? "" : ", ") + place_.who(rank);
  throw TimeoutError(place_.who(place_.rank) + " has waited " + brief(timeout_s_) + " s for " +
                     (peers.empty() ? "its peers" : peers) + " over " + transport_->name() +
                     ": see what that rank and the link between the nodes are doing, or raise "
                     "UNISONO_TIMEOUT_S.");
}

void Courier::failed(const TransportError& error) const {
  const std::string me = place_.who(place_.rank), peer = place_.who(error.peer());
  if (error.other_length())
    throw MismatchError(
        peer + " sent " +
        (error.sent() ? std::to_string(*error.sent()) + " bytes" : "a message of another length") +
        " where " + me + " expects " + std::to_string(error.expected()) +
        " bytes: make the same call on every rank (UNISONO_CHECK=1 compares them).");
  throw PeerLostError(me + " has lost " + peer + " over " + transport_->name() + " (" + error.what() +
                      "): look at that process's own output, then start the ranks again.");
}

}  // namespace unisono::nodes
