// Large messages with tags that their receivers copy from the senders' memory.
#include <algorithm>
#include <atomic>
#include <string>

#include "host/far.hpp"
#include "host/group.hpp"
#include "host/mailbox.hpp"

namespace unisono {
namespace {

// Bytes of a message from which the kernel copies it, if that suits its pages. Below, parts take less time.
constexpr std::size_t kFarPays = std::size_t{64} << 10;
constexpr std::size_t kSlice = std::size_t{1} << 20;  // bytes between two looks at other messages

}  // namespace

Place Mailbox::place(const Message& message) const {
  if (!near(message.peer)) return {};
  if (const Place found = symmetric_.find(message.at, message.bytes); found.allocation != Place::kNone)
    return found;
  const bool reached =
      group_.near(number(message.peer)) ||
      (group_.reaches_all() && message.bytes >= kFarPays && group_.kernel_suits(message.at, message.bytes));
  if (!reached) return {};
  return {.allocation = Place::kAddress, .offset = reinterpret_cast<std::uint64_t>(message.at)};
}

const std::byte* Mailbox::reach(const Place& place, int source, std::size_t bytes) const {
  if (place.allocation == Place::kNone || !near(source)) return nullptr;
  const int owner = number(source);
  if (place.allocation == Place::kAddress && (group_.near(owner) || group_.reaches_all()))
    return group_.reach(owner, place.offset);
  if (const std::byte* at = symmetric_.resolve(place, owner, bytes)) return at;
  group_.fail(FailureKind::mismatch, name(source) + " has offered a message outside its symmetric memory.");
}

// Copies some of a message: the waiter's own, or another. A long copy would hold up other threads, so that
// the lock is free meanwhile.
void Mailbox::copy_some(Lock& lock) {
  if (copies_.empty()) return;
  const Letter* const own = own_;
  auto found =
      std::find_if(copies_.begin(), copies_.end(), [&](const Sent& one) { return one.get() == own; });
  if (found == copies_.end()) found = copies_.begin();
  const Sent letter = *found;
  copies_.erase(found);
  to_copy_ = !copies_.empty();
  letter->copied_now = true;
  const std::size_t bytes = std::min<std::size_t>(kSlice, letter->expected - letter->moved);
  own_ = nullptr;
  lock.unlock();
  // A sender that gives up says so, then waits for the copies that were counted before (`forget`).
  const int source = letter->source;
  std::atomic<std::uint32_t>& copies = from(source).copies();
  copies.fetch_add(1, std::memory_order_acq_rel);
  const bool gone = group_.failed() || group_.departed(number(source));
  const bool copied = !gone && group_.copy(letter->at + letter->moved, letter->from + letter->moved, bytes);
  copies.fetch_sub(1, std::memory_order_acq_rel);
  lock.lock();
  own_ = own;
  letter->copied_now = false;
  copied_.notify_all();
  if (gone) return;  // the next look says why
  if (!copied) {
    accept(letter);
    return push(source);
  }
  letter->moved += bytes;
  if (letter->moved < letter->expected) {
    copies_.push_front(letter);
    to_copy_ = true;
    return;
  }
  outboxes_[static_cast<std::size_t>(source)].answers.push_back(
      {Head::taken, letter->dtype, letter->tag, 0, Place::kNone, letter->number, 0});
  push(source);
  received(letter, source);
}

bool Mailbox::learns(int source, std::size_t bytes) const {
  return bytes >= kFarPays && near(source) && !group_.near(number(source)) && group_.learns_ways();
}

void Mailbox::learn(int source, std::size_t bytes, bool in_pieces, Clock::time_point met) {
  host::CallWay& way = inboxes_[static_cast<std::size_t>(source)].ways.of(Collective::recv, bytes);
  way.took(in_pieces, Clock::now() - met);
  from(source).want_pieces(bytes, way.next());
}

}  // namespace unisono
