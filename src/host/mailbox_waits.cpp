// How messages with tags are waited for: by calls, and by the thread of those that have begun.
#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "base/deadline.hpp"
#include "base/text.hpp"
#include "host/group.hpp"
#include "host/mailbox.hpp"

namespace unisono {
namespace {

// How long the thread of letters that have begun sleeps while others move them on, or before it does. Waking
// it costs a thread that begins a letter more than the letter does.
constexpr std::chrono::microseconds kAside(200);
constexpr int kSleepsWithoutLetters = 100;  // until that thread ends
constexpr std::chrono::duration<double> kWithoutEnd(1e9);
constexpr std::chrono::microseconds kNapAbroad(100);

// Returns whether an exception is an Error, which the other ranks learn of by themselves.
bool is_error(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error&) { return true; } catch (...) {
    return false;
  }
}

}  // namespace

// A thread that moves everything on while it waits.
class Mailbox::Waiter {
 public:
  explicit Waiter(Door& door) : door_(door) { ++door_.waiters; }
  ~Waiter() {
    if (--door_.waiters == 0) door_.waiters.notify_all();
  }
  Waiter(const Waiter&) = delete;

 private:
  Door& door_;
};

Mailbox::~Mailbox() {
  if (group_.inherited()) return;  // the threads are the parent's
  {
    const std::scoped_lock lock(mutex_);
    door_->mailbox = nullptr;
  }
  while (const int waiters = door_->waiters) door_->waiters.wait(waiters);
}

// Returns whether there may be something to move on.
bool Mailbox::news() const {
  if (abroad_ || blocked_ || to_copy_ || bell(rank_).flag.load(std::memory_order_acquire) != heard_)
    return true;
  return std::any_of(inboxes_.begin(), inboxes_.end(), [](const Inbox& in) { return in.ring->ready(); });
}

// Returns whether a letter is done, after moving everything on.
bool Mailbox::arrived(const Letter& letter) {
  if (letter.done.load(std::memory_order_acquire)) return true;
  if (!news()) return false;
  Lock lock(mutex_);
  const Own own(own_, letter);
  progress();
  copy_some(lock);
  return letter.done.load(std::memory_order_relaxed);
}

void Mailbox::part_from(int peer) {
  if (peer >= 0 && near(peer)) group_.part_from(number(peer));
}

void Mailbox::wait(const Letter& letter, std::optional<Clock::time_point> until) {
  for (int i = 0; i < group_.patience().spins; ++i) {
    if (arrived(letter)) return;
    host::pause();
  }
  part_from(letter.peer);
  wait_until([&] { return arrived(letter) || (until && Clock::now() >= *until); }, kWithoutEnd,
             [this](auto elapsed) { rest(elapsed, group_.patience().yielding); }, [] {},
             [] {});  // the thread of letters looks
}

// Waits for a letter that has begun.
void Mailbox::Letter::move_on(std::optional<Clock::time_point> until) {
  std::function<void()> callbacks;
  {
    Lock lock(door->mutex);
    Mailbox* const mailbox = door->mailbox;  // which stays until the waiter has left
    if (done || !mailbox) return;
    const Waiter waiter(*door);
    ++waiters;
    lock.unlock();
    std::exception_ptr error;
    try {
      mailbox->wait(*this, until);
    } catch (...) { error = std::current_exception(); }
    lock.lock();
    if (error) mailbox->end_all(lock, std::move(error));
    --waiters;
    callbacks = std::exchange(last, nullptr);
    lock.unlock();
  }
  if (callbacks) callbacks();
}

std::string Mailbox::where(const Letter& letter) const {
  return std::string(letter.what()) + " with tag " + std::to_string(letter.tag) + " of " + name(rank_);
}

void Mailbox::look(const Letter& letter, bool of_caller) {
  if (group_.left())
    throw UsageError("the communicator was closed by another thread while it waited in " + where(letter) +
                     ".");
  group_.check();
  if (of_caller) group_.let_caller_in();
  else if (abroad_) abroad_->hear();
  int others = 0;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (!near(r)) {
      ++others;
      continue;
    }
    // read before `departed`, which a rank sets before it ends in good order
    const bool died = group_.dead(number(r));
    const bool left = group_.departed(number(r));
    if (!left) ++others;
    if (left ? r != letter.peer && r != letter.source : !died) continue;
    if (arrived(letter)) return;
    group_.fail(FailureKind::peer_lost, left ? group_.who(number(r)) + " has closed its communicator, but " +
                                                   where(letter) +
                                                   " still waits for it: make both ends of every message."
                                             : group_.death_of(number(r), "in " + where(letter)));
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
  const std::string whom = letter.peer < 0 ? "any rank" : name(letter.peer);
  group_.fail(FailureKind::timeout, where(letter) + " has waited " + brief(timeout_of(letter)) + " s for " +
                                        whom + ": see what " +
                                        (letter.peer < 0 ? "the others are" : "that rank is") +
                                        " doing, give both ends of the message the same tag" +
                                        (tags.empty() ? "" : " (messages with tag " + tags + " have come)") +
                                        ", or raise the deadline (timeout_s, UNISONO_TIMEOUT_S).");
}

void Mailbox::rest(std::chrono::nanoseconds elapsed, std::chrono::microseconds yielding) {
  if (to_copy_) return;
  if (elapsed < yielding) host::rest(bell(rank_), heard_ + 1, yielding, elapsed);
  else if (abroad_) std::this_thread::sleep_for(kNapAbroad);  // no bell rings
  else host::nap(bell(rank_), heard_ + 1, [this] { return news(); });
}

double Mailbox::timeout_of(const Letter& letter) const {
  if (letter.timeout_s != 0) return letter.timeout_s;
  return abroad_ ? abroad_->timeout_s : group_.usual_timeout_s();
}

void Mailbox::give_up(const Sent& letter) {
  if (!letter) return;
  Lock lock(mutex_);
  forget(lock, letter);
}

// Returns whether no letter or record is under way that the next record of a ring could be for.
bool Mailbox::idle() const {
  return posted_.empty() && unexpected_.empty() && offered_.empty() && accepted_.empty() && copies_.empty() &&
         begun_.empty();
}

// Requires the lock. moved: gets the bytes that have moved. Returns whether all have.
bool Mailbox::send_at_once(const Message& message, std::size_t& moved) {
  if (message.peer == rank_ || !near(message.peer) || offer_of(message)) return false;
  if (!outboxes_[static_cast<std::size_t>(message.peer)].empty()) return false;
  const bool all = put_pieces(message, moved);
  if (all || moved > 0) host::nudge(bell(message.peer));
  if (all) to(message.peer).own_next(message.bytes);
  return all;
}

// Requires no lock, and takes it. Sets `letter` if a part of the message has come, and the rest is not there.
bool Mailbox::receive_at_once(const Message& message, Received& received, Sent& letter) {
  if (message.peer < 0 || abroad_) return false;
  MailReader& ring = from(message.peer);
  const auto comes = [&] {
    for (int i = group_.patience().spins; !ring.ready(); --i) {
      if (i <= 0 || keeps_.load(std::memory_order_relaxed)) return false;
      host::pause();
    }
    return true;
  };
  if (!comes()) return false;
  const std::scoped_lock lock(mutex_);
  if (!idle() || !ring.ready()) return false;
  auto record = ring.look();
  if (!record) no_message(message.peer);
  const Head head = record->head;
  if (head.kind != Head::eager || head.tag != message.tag) return false;
  check(message, message.peer, head.dtype, head.bytes);
  const auto met = learns(message.peer, head.bytes) ? Clock::now() : Clock::time_point();
  for (received = {message.peer, 0};;) {
    record->copy_to(message.at + received.bytes);
    received.bytes += record->bytes();
    pop(message.peer, *record);
    if (received.bytes == head.bytes) {
      if (met != Clock::time_point()) learn(message.peer, head.bytes, true, met);
      return true;
    }
    if (!comes()) break;
    record = ring.look();
    if (!record || record->head.kind != Head::more || record->bytes() > head.bytes - received.bytes)
      break;  // others see to it
  }
  letter = std::make_shared<Letter>(message);
  letter->expected = head.bytes;
  letter->moved = received.bytes;
  letter->in_pieces = true;
  letter->met = met;
  inboxes_[static_cast<std::size_t>(message.peer)].letter = letter;
  return false;
}

Received Mailbox::run(const Message& message) {
  group_.check();
  Received received;
  Sent letter;
  std::optional<Waiter> waiter;
  try {
    if (!message.sends && receive_at_once(message, received, letter)) return received;
    {
      const std::scoped_lock lock(mutex_);
      std::size_t moved = 0;
      if (message.sends && send_at_once(message, moved)) return {rank_, 0};
      waiter.emplace(*door_);
      if (!letter) {
        letter = std::make_shared<Letter>(message);
        letter->moved = moved;
        const Own own(own_, *letter);
        post(letter);
      }
    }
    for (int i = 0; i < group_.patience().spins; ++i) {
      if (arrived(*letter)) return letter->received;
      host::pause();
    }
    part_from(message.peer);
    wait_until([&] { return arrived(*letter); }, std::chrono::duration<double>(timeout_of(*letter)),
               [this](auto elapsed) { rest(elapsed, group_.patience().yielding); },
               [&] { look(*letter, true); }, [&] { late(*letter); });
    return letter->received;
  } catch (const Error&) {
    give_up(letter);
    throw;
  } catch (...) {  // an interrupt, or no memory: this rank is out of step
    group_.leave();
    give_up(letter);
    throw;
  }
}

std::shared_ptr<Work::State> Mailbox::begin(const Message& message, CallThreads& threads) {
  const auto letter = std::make_shared<Letter>(message, door_);
  group_.check();
  Lock lock(mutex_);
  threads_ = &threads;
  begun_.push_back(letter);
  try {
    post(letter);
    if (begun_.empty() || driven_) return letter;
    threads.run_beside([this] { drive(); });
  } catch (...) {
    forget(lock, letter);
    throw;
  }
  driven_ = true;
  return letter;
}

// Sees to letters that have begun, until there have been none for a while: ends those that fail, and moves
// them on while no one waits.
void Mailbox::drive() {
  std::this_thread::sleep_for(kAside);  // who begins a letter often waits at once
  auto looked = Clock::now(), began = looked;
  for (int idle = 0;;) {
    std::exception_ptr error;
    try {
      bool moves = false;
      {
        Lock lock(mutex_);
        idle = begun_.empty() ? idle + 1 : 0;
        if (idle > 0 && (idle > kSleepsWithoutLetters || group_.left())) {
          driven_ = false;
          return;
        }
        moves = idle == 0 && door_->waiters == 0;
        if (moves && news()) {
          progress();
          copy_some(lock);
        }
      }
      if (moves) {
        rest(Clock::now() - began, host::kYieldingCrowded);  // beside its rank's own work
      } else {
        std::this_thread::sleep_for(kAside);
        began = Clock::now();
      }
      const auto gap = Clock::now() - looked;
      if (gap < kLook) continue;
      look_at_begun(std::min<Clock::duration>(gap, kMostCounted));
      looked = Clock::now();
    } catch (...) { error = std::current_exception(); }
    if (!error) continue;
    Lock lock(mutex_);
    end_all(lock, std::move(error));
  }
}

void Mailbox::look_at_begun(Clock::duration gap) {
  std::list<Sent> letters;
  {
    const std::scoped_lock lock(mutex_);
    letters = begun_;
  }
  for (const Sent& letter : letters) {
    letter->waited += gap;
    look(*letter, false);
    if (letter->waited.count() > timeout_of(*letter) && !arrived(*letter)) late(*letter);
  }
}

// Ends all letters that have begun with an error.
void Mailbox::end_all(Lock& lock, std::exception_ptr error) {
  if (!is_error(error)) group_.leave();  // no memory: this rank is out of step
  if (abroad_) abroad_->failed(error);
  const auto end_first = [&](std::exception_ptr why) {
    const Sent letter = begun_.front();
    forget(lock, letter);
    if (!letter->done) end(letter, std::move(why));
  };
  while (begun_.size() > 1) end_first(error);
  if (!begun_.empty()) end_first(std::move(error));
  host::ring(bell(rank_));
}

}  // namespace unisono
