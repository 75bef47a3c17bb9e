// How messages with tags are waited for: by a call, and by the thread of those that have begun.
#include <sched.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/deadline.hpp"
#include "base/text.hpp"
#include "host/group.hpp"
#include "host/mailbox.hpp"

namespace unisono {

// Returns whether there may be something to move on.
bool Mailbox::news() const { return blocked_ || bell(rank_).flag.load(std::memory_order_acquire) != heard_; }

// Returns whether a letter is done, after moving everything on.
bool Mailbox::arrived(const Letter& letter) {
  if (letter.done.load(std::memory_order_acquire)) return true;
  if (!news()) return false;
  const std::scoped_lock lock(mutex_);
  own_ = &letter;
  progress();
  own_ = nullptr;
  return letter.done.load(std::memory_order_relaxed);
}

std::string Mailbox::where(const Letter& letter) const {
  return std::string(letter.what()) + " with tag " + std::to_string(letter.tag) + " of " + group_.name(rank_);
}

void Mailbox::look(const Letter& letter, bool of_caller) {
  if (group_.left())
    throw UsageError("the communicator was closed by another thread while it waited in " + where(letter) +
                     ".");
  group_.check();
  if (of_caller) group_.let_caller_in();
  int others = 0;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    // read before `departed`, which a rank sets before it ends in good order
    const bool died = group_.dead(r);
    const bool left = group_.departed(r);
    if (!left) ++others;
    if (left ? r != letter.peer && r != letter.source : !died) continue;
    if (arrived(letter)) return;
    group_.fail(FailureKind::peer_lost, left ? group_.who(r) + " has closed its communicator, but " +
                                                   where(letter) +
                                                   " still waits for it: make both ends of every message."
                                             : group_.death_of(r, "in " + where(letter)));
  }
  if (others > 0 || size_ == 1 || letter.peer >= 0 || arrived(letter)) return;
  group_.fail(FailureKind::peer_lost, "every other rank has closed its communicator, but " + where(letter) +
                                          " still waits for one: make both ends of every message.");
}

void Mailbox::late(const Letter& letter) {
  std::string tags;
  {
    const std::scoped_lock lock(mutex_);
    std::set<int> others;
    for (const Kept& kept : unexpected_)
      if (letter.peer < 0 || kept.source == letter.peer) others.insert(kept.head.tag);
    for (const int tag : others)
      if (tags.size() < 100) tags += (tags.empty() ? "" : ", ") + std::to_string(tag);
  }
  const std::string whom = letter.peer < 0 ? "any rank" : group_.name(letter.peer);
  group_.fail(FailureKind::timeout, where(letter) + " has waited " + brief(timeout_of(letter)) + " s for " +
                                        whom + ": see what " +
                                        (letter.peer < 0 ? "the others are" : "that rank is") +
                                        " doing, give both ends of the message the same tag" +
                                        (tags.empty() ? "" : " (messages with tag " + tags + " have come)") +
                                        ", or raise the deadline (timeout_s, UNISONO_TIMEOUT_S).");
}

void Mailbox::rest(std::chrono::nanoseconds elapsed) {
  if (elapsed < host::kYielding) ::sched_yield();
  else host::nap(bell(rank_), heard_ + 1);
}

double Mailbox::timeout_of(const Letter& letter) const {
  return letter.timeout_s == 0 ? group_.usual_timeout_s() : letter.timeout_s;
}

void Mailbox::give_up(const Sent& letter) {
  const std::scoped_lock lock(mutex_);
  own_ = nullptr;
  forget(letter);
}

Received Mailbox::run(const Message& message) {
  const auto letter = std::make_shared<Letter>(message);
  group_.check();
  try {
    {
      const std::scoped_lock lock(mutex_);
      own_ = letter.get();
      post(letter);
      own_ = nullptr;
    }
    for (int i = 0; i < group_.patience().spins; ++i) {
      if (arrived(*letter)) return letter->received;
      host::pause();
    }
    wait_until([&] { return arrived(*letter); }, std::chrono::duration<double>(timeout_of(*letter)),
               [this](auto elapsed) { rest(elapsed); }, [&] { look(*letter, true); }, [&] { late(*letter); });
    return letter->received;
  } catch (const Error&) {
    give_up(letter);
    throw;
  } catch (...) {  // an interrupt, or no memory: this rank is out of step
    give_up(letter);
    group_.leave();
    throw;
  }
}

std::shared_ptr<Work::State> Mailbox::begin(const Message& message, CallThreads& threads) {
  const auto letter = std::make_shared<Letter>(message);
  letter->state = std::make_shared<Work::State>(message.what());
  group_.check();
  const std::scoped_lock lock(mutex_);
  begun_.push_back(letter);
  try {
    post(letter);
    if (begun_.empty() || driven_) return letter->state;
    threads.run_beside([this, &threads] { drive(threads); });
  } catch (...) {
    forget(letter);
    throw;
  }
  driven_ = true;
  return letter->state;
}

void Mailbox::call_back(CallThreads& threads) {
  for (auto& callbacks : std::exchange(ended_, {})) threads.run_beside(std::move(callbacks));
}

// Moves letters that have begun on until all have ended.
void Mailbox::drive(CallThreads& threads) {
  auto looked = Clock::now();
  auto done = [&] {
    const std::scoped_lock lock(mutex_);
    if (news()) progress();
    call_back(threads);
    if (begun_.empty()) driven_ = false;
    return begun_.empty();
  };
  auto look_at_all = [&] {
    std::list<Sent> letters;
    {
      const std::scoped_lock lock(mutex_);
      letters = begun_;
    }
    const auto gap = std::min(Clock::now() - looked, kMostCounted);
    looked = Clock::now();
    for (const Sent& letter : letters) {
      letter->waited += gap;
      look(*letter, false);
      if (letter->waited.count() > timeout_of(*letter) && !arrived(*letter)) late(*letter);
    }
  };
  std::exception_ptr error;
  try {
    constexpr std::chrono::duration<double> kWithoutEnd(1e9);
    wait_until(done, kWithoutEnd, [this](auto elapsed) { rest(elapsed); }, look_at_all, [] {});
  } catch (...) { error = std::current_exception(); }
  if (!error) return;
  const std::scoped_lock lock(mutex_);
  own_ = nullptr;
  driven_ = false;
  call_back(threads);
  const auto end_first = [&](std::exception_ptr why) {
    const Sent letter = begun_.front();
    forget(letter);
    threads.run_beside(letter->state->end(std::move(why)));
  };
  while (begun_.size() > 1) end_first(error);
  if (!begun_.empty()) end_first(std::move(error));
}

}  // namespace unisono
