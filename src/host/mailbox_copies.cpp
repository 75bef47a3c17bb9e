// Large messages with tags that are copied from memory to memory.
#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "host/far.hpp"
#include "host/group.hpp"
#include "host/mailbox.hpp"

namespace unisono {
namespace {

// Bytes of a message from which the kernel copies it, if that suits its pages. Below, parts take less time.
constexpr std::size_t kFarPays = std::size_t{64} << 10;
// Bytes of a message from which a sender that waits copies a share.
constexpr std::size_t kSharePays = 2 * host::Portions::kLeast;
constexpr std::size_t kSlice = std::size_t{1} << 20;  // bytes between two looks at other messages

}  // namespace

Place Mailbox::place(const std::byte* at, std::size_t bytes, int peer) const {
  if (!near(peer)) return {};
  if (const Place found = symmetric_.find(at, bytes); found.allocation != Place::kNone) return found;
  const bool reached = group_.near(number(peer)) ||
                       (group_.reaches_all() && bytes >= kFarPays && group_.kernel_suits(at, bytes));
  if (!reached) return {};
  return {.allocation = Place::kAddress, .offset = reinterpret_cast<std::uint64_t>(at)};
}

std::byte* Mailbox::reach(const Place& place, int peer, std::size_t bytes) const {
  if (place.allocation == Place::kNone || !near(peer)) return nullptr;
  const int owner = number(peer);
  if (place.allocation == Place::kAddress && (group_.near(owner) || group_.reaches_all()))
    return group_.reach(owner, place.offset);
  if (std::byte* const at = symmetric_.resolve(place, owner, bytes)) return at;
  group_.fail(FailureKind::mismatch, name(peer) + " has offered a message outside its symmetric memory.");
}

MailRing& Mailbox::ring_of(const Letter& letter) {
  const int peer = letter.other_end();
  if (letter.sends) return to(peer);
  return from(peer);
}

// Lets the sender of a message copy it too if it waits for that alone, on a core of its own, and reaches this
// rank's memory. One message of a sender at a time.
void Mailbox::share(const Sent& letter) {
  const int source = letter->source;
  Inbox& inbox = inboxes_[static_cast<std::size_t>(source)];
  if (inbox.shared || inbox.alone || source == rank_ || letter->expected < kSharePays ||
      group_.patience().crowded)
    return;
  const Place at = place(letter->at, letter->expected, source);
  if (at.allocation == Place::kNone) return;
  inbox.shared = letter;
  letter->shared = true;
  from(source).portions().open(static_cast<std::uint32_t>(letter->number), letter->expected);
  outboxes_[static_cast<std::size_t>(source)].answers.push_back(
      {Head::share, letter->dtype, letter->tag, letter->expected, at.allocation, letter->number, at.offset});
}

// Copies some of a message: the waiter's own, or another. A long copy would hold up other threads, so that
// the lock is free meanwhile.
void Mailbox::copy_some(Lock& lock) {
  to_copy_ = !copies_.empty();
  if (!to_copy_) return;
  const Letter* const own = own_;
  auto found =
      std::find_if(copies_.begin(), copies_.end(), [&](const Sent& one) { return one.get() == own; });
  if (found == copies_.end()) found = copies_.begin();
  const Sent letter = *found;
  copies_.erase(found);
  to_copy_ = !copies_.empty();
  letter->copied_now = true;
  own_ = nullptr;
  lock.unlock();
  const auto [part, all] = copy_part(*letter);
  lock.lock();
  own_ = own;
  letter->copied_now = false;
  copied_.notify_all();
  if (part.bytes() == 0) return;  // the other end has the rest; or is gone, and the next look says why
  const std::size_t bytes = letter->whole();
  if (letter->shared ? part.bytes() < bytes : (part.end < bytes && all)) {
    copies_.push_front(letter);
    to_copy_ = true;
  }
  if (letter->sends) {
    outboxes_[static_cast<std::size_t>(letter->peer)].answers.push_back(
        {Head::wrote, letter->dtype, letter->tag, part.bytes(), Place::kNone, letter->number,
         std::uint64_t{all}});
    return push(letter->peer);
  }
  count_copied(letter, letter->shared || all ? part.bytes() : bytes - part.begin, all);
}

// Copies a part of a message, without the lock. Returns the part, and whether all of it is copied. Nothing is
// left to copy if the part is empty, or the other end is gone.
std::pair<host::Portion, bool> Mailbox::copy_part(const Letter& letter) {
  // A rank that gives up a message says so, then waits for the copies that were counted before (`forget`).
  MailRing& ring = ring_of(letter);
  ring.copies().fetch_add(1, std::memory_order_acq_rel);
  host::Portion part;
  if (const bool gone = group_.failed() || group_.departed(number(letter.other_end())); !gone)
    part = letter.shared
               ? ring.portions().take(letter.sends, static_cast<std::uint32_t>(letter.number), letter.whole())
               : host::Portion{letter.moved, std::min(letter.moved + kSlice, letter.whole())};
  const auto [to, from] =
      letter.sends ? std::pair(letter.theirs, letter.at) : std::pair(letter.at, letter.theirs);
  const bool all = part.bytes() == 0 || group_.copy(to + part.begin, from + part.begin, part.bytes());
  ring.copies().fetch_sub(1, std::memory_order_acq_rel);
  return {part, all};
}

// Counts what either end has copied of a message, or has failed to.
void Mailbox::count_copied(const Sent& letter, std::size_t bytes, bool all) {
  const int source = letter->source;
  Inbox& inbox = inboxes_[static_cast<std::size_t>(source)];
  letter->moved += bytes;
  letter->refused = letter->refused || !all;
  if (letter->moved < letter->expected) return;
  if (letter->shared) {
    inbox.shared = nullptr;
    inbox.alone = letter->refused;
    copies_.remove(letter);
  }
  if (letter->refused) {
    accept(letter);
    return push(source);
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
  from(source).want_pieces(bytes, way.next() < 0);
}

}  // namespace unisono
