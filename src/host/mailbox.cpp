#include "host/mailbox.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/deadline.hpp"
#include "host/group.hpp"

namespace unisono {
namespace {

constexpr std::chrono::seconds kMostCopy(1);  // that a letter which is given up waits for a peer's copy

}  // namespace

Mailbox::Mailbox(Group& group, const Symmetric& symmetric, bool check, std::unique_ptr<Abroad> abroad)
    : group_(group),
      abroad_(std::move(abroad)),
      symmetric_(symmetric),
      rank_(abroad_ ? abroad_->rank : group.rank()),
      size_(abroad_ ? static_cast<int>(abroad_->group_number.size()) : group.size()),
      check_(check),
      cells_(MailRing::cells_of(group)),
      heard_(bell(rank_).flag.load(std::memory_order_relaxed) - 1),
      inboxes_(static_cast<std::size_t>(size_)),
      outboxes_(static_cast<std::size_t>(size_)) {
  door_->mailbox = this;
  for (int r = 0; r < size_; ++r) {
    if (!near(r)) continue;
    inboxes_[static_cast<std::size_t>(r)].ring =
        std::make_unique<MailReader>(group_, cells_, number(rank_), number(r));
    outboxes_[static_cast<std::size_t>(r)].ring =
        std::make_unique<MailWriter>(group_, cells_, number(r), number(rank_));
  }
}

std::string Mailbox::name(int rank) const {
  return near(rank) ? group_.name(number(rank)) : "rank " + std::to_string(rank);
}

void Mailbox::no_message(int source) {
  group_.fail(
      FailureKind::mismatch,
      name(source) + " has sent what is no message: start every rank with the same version of Unisono.");
}

// Returns what an offer of a message says of its memory; none: it goes at once. A large one whose memory the
// receiver reaches takes less time if it is copied once, unless the receiver has found otherwise.
std::optional<Place> Mailbox::offer_of(const Message& message) {
  constexpr std::size_t kSmall = std::size_t{16} << 10;
  const bool here = near(message.peer);
  const bool fits = message.bytes <= (here ? MailRing::eager_bytes(group_.size()) : abroad_->most_bytes);
  if (fits && (!here || message.bytes <= kSmall)) return std::nullopt;
  const Place at = place(message.at, message.bytes, message.peer);
  const bool reached = at.allocation != Place::kNone;
  const bool in_pieces = at.allocation == Place::kAddress && to(message.peer).wants_pieces(message.bytes);
  if (fits && (!reached || in_pieces)) return std::nullopt;
  return at;
}

std::size_t Mailbox::piece_bytes(int peer) const {
  return near(peer) ? MailRing::piece_bytes(group_.size()) : abroad_->most_bytes;
}

// Returns whether there was room.
bool Mailbox::put(int peer, const Head& head, const std::byte* data, std::size_t bytes) {
  if (!near(peer)) return put_abroad(peer, head, {data, bytes});
  if (to(peer).put(head, data, bytes)) return true;
  blocked_ = true;
  return false;
}

// Writes what fits of a message that goes at once, from `moved` on. Returns whether all of it has moved.
bool Mailbox::put_pieces(const Message& message, std::size_t& moved) {
  const std::size_t most = piece_bytes(message.peer);
  do {
    const std::size_t bytes = std::min(most, message.bytes - moved);
    const bool first = moved == 0;
    if (!put(message.peer,
             {first ? Head::eager : Head::more, message.dtype, message.tag, first ? message.bytes : bytes,
              Place::kNone, 0, 0},
             message.at + moved, bytes))
      return false;
    moved += bytes;
  } while (moved < message.bytes);
  return true;
}

// Writes to a peer's ring what there is and fits: answers first, then messages, then parts of large ones.
void Mailbox::push(int peer) {
  Outbox& out = outboxes_[static_cast<std::size_t>(peer)];
  if (out.empty()) return;
  const bool here = near(peer);
  bool wrote = false, room = true;
  std::size_t sent = 0;
  while (room && !out.answers.empty()) {
    room = put(peer, out.answers.front(), nullptr, 0);
    if (room) out.answers.pop_front();
    wrote = wrote || room;
  }
  while (room && !out.letters.empty()) {
    const Sent letter = out.letters.front();
    const std::size_t before = letter->moved;
    const auto offer = before > 0 ? std::nullopt : offer_of(*letter);
    if (offer)
      room = put(peer,
                 {Head::offer, letter->dtype, letter->tag, letter->bytes, offer->allocation, numbers_ + 1,
                  offer->offset},
                 nullptr, 0);
    else room = put_pieces(*letter, letter->moved);
    wrote = wrote || letter->moved > before;
    if (!room) break;
    wrote = true;
    out.letters.pop_front();
    if (offer) offered_[letter->number = ++numbers_] = letter;
    else if (here) complete(letter, rank_);
    else out.leaving.emplace_back(out.records, letter);
  }
  while (room && !out.streams.empty()) {
    const Sent letter = out.streams.front();
    const std::size_t bytes = std::min<std::size_t>(piece_bytes(peer), letter->bytes - letter->moved);
    room = put(peer, {Head::part, letter->dtype, letter->tag, bytes, Place::kNone, letter->other, 0},
               letter->at + letter->moved, bytes);
    if (!room) break;
    wrote = true;
    letter->moved += bytes;
    if (letter->moved < letter->bytes) continue;
    out.streams.pop_front();
    sent = letter->bytes;
    if (here) complete(letter, rank_);
    else out.leaving.emplace_back(out.records, letter);
  }
  if (!here) complete_those_that_left(peer);
  else if (wrote) host::nudge(bell(peer));
  if (here && sent > 0) to(peer).own_next(sent);
}

void Mailbox::take_records(int source) {
  MailReader& ring = from(source);
  while (ring.ready()) {
    const auto record = ring.look();
    if (!record) no_message(source);
    take(source, *record);
    pop(source, *record);
  }
}

void Mailbox::pop(int source, const MailRecord& record) {
  if (from(source).pop(record)) host::ring(bell(source));
}

void Mailbox::take(int source, const MailRecord& record) {
  const Head& head = record.head;
  Inbox& inbox = inboxes_[static_cast<std::size_t>(source)];
  switch (head.kind) {
    case Head::eager:
    case Head::offer: {
      const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Sent& letter) {
        return letter->tag == head.tag && (letter->peer == source || letter->peer < 0);
      });
      if (found == posted_.end()) {
        Kept& kept = unexpected_.emplace_back(source, head);
        keeps_ = true;
        if (head.kind == Head::offer) return;
        kept.data.reserve(head.bytes);
        inbox.kept = &kept;
        return take_more(source, record);
      }
      const Sent letter = std::move(*found);
      posted_.erase(found);
      check(*letter, source, head.dtype, head.bytes);
      letter->expected = head.bytes;
      if (head.kind == Head::offer) return meet(letter, source, head);
      letter->in_pieces = true;
      if (learns(source, head.bytes)) letter->met = Clock::now();
      inbox.letter = letter;
      return take_more(source, record);
    }
    case Head::more: return take_more(source, record);
    case Head::taken: {
      const auto found = offered_.find(head.number);
      if (found == offered_.end()) return;  // its sender has given up
      const Sent letter = found->second;
      offered_.erase(found);
      copies_.remove(letter);
      return complete(letter, rank_);
    }
    case Head::share: {
      const auto found = offered_.find(head.number);
      if (found == offered_.end() || head.bytes != found->second->bytes) return;
      const Sent letter = found->second;
      if (letter.get() != own_) return;  // its rank does something else: the receiver copies all
      letter->theirs = reach({.allocation = head.allocation, .offset = head.other}, source, head.bytes);
      letter->shared = true;
      copies_.push_back(letter);
      to_copy_ = true;
      return;
    }
    case Head::wrote: {
      const Sent letter = inbox.shared;
      if (!letter || letter->number != head.number || head.bytes > letter->expected - letter->moved) return;
      return count_copied(letter, head.bytes, head.other != 0);
    }
    case Head::accept: {
      const auto found = offered_.find(head.number);
      if (found == offered_.end()) return;  // its sender has given up
      const Sent letter = found->second;
      offered_.erase(found);
      copies_.remove(letter);
      if (!near(source) && begin_long(letter)) return;
      letter->other = head.other;
      outboxes_[static_cast<std::size_t>(source)].streams.push_back(letter);
      return;
    }
    case Head::part: {
      const auto found = accepted_.find(head.number);
      if (found == accepted_.end()) return;
      const Sent letter = found->second;
      if (record.bytes() > letter->expected - letter->moved) return;
      record.copy_to(letter->at + letter->moved);
      letter->moved += record.bytes();
      if (letter->moved < letter->expected) return;
      accepted_.erase(found);
      return received(letter, source);
    }
  }
}

// Takes a piece of the message that this source writes.
void Mailbox::take_more(int source, const MailRecord& record) {
  Inbox& inbox = inboxes_[static_cast<std::size_t>(source)];
  if (Kept* const kept = inbox.kept) {
    if (record.bytes() > kept->head.bytes - kept->data.size()) no_message(source);
    for (const auto& part : {record.data, record.rest})
      kept->data.insert(kept->data.end(), part.begin(), part.end());
    if (kept->data.size() == kept->head.bytes) inbox.kept = nullptr;
  } else if (const Sent letter = inbox.letter) {
    if (record.bytes() > letter->expected - letter->moved) no_message(source);
    record.copy_to(letter->at + letter->moved);
    letter->moved += record.bytes();
    if (letter->moved < letter->expected) return;
    inbox.letter = nullptr;
    received(letter, source);
  }  // else its receiver has given up
}

// Takes an offer for a receive.
void Mailbox::meet(const Sent& letter, int source, const Head& head) {
  letter->source = source;
  letter->number = head.number;
  letter->theirs = reach({.allocation = head.allocation, .offset = head.other}, source, head.bytes);
  if (head.allocation == Place::kAddress && learns(source, head.bytes)) {
    letter->met = Clock::now();
    letter->in_pieces =
        head.bytes > MailRing::eager_bytes(group_.size()) && from(source).wants_pieces(head.bytes);
  }
  if (!letter->theirs || letter->in_pieces) return accept(letter);
  share(letter);
  copies_.push_back(letter);
  to_copy_ = true;
  if (letter.get() != own_ && door_->waiters > 0) host::ring(bell(rank_));
}

// Asks for a message in parts, or as a long one.
void Mailbox::accept(const Sent& letter) {
  letter->moved = 0;
  if (near(letter->source) || !begin_long(letter)) accepted_[++numbers_] = letter;
  outboxes_[static_cast<std::size_t>(letter->source)].answers.push_back(
      {Head::accept, letter->dtype, letter->tag, 0, Place::kNone, letter->number, numbers_});
}

void Mailbox::check(const Message& to, int source, DType dtype, std::uint64_t bytes) {
  const auto differs = [&](const std::string& how) {
    group_.fail(FailureKind::mismatch, "the message with tag " + std::to_string(to.tag) + " of " +
                                           name(source) + " to " + name(rank_) + how);
  };
  if (bytes > to.bytes)
    differs(" has " + std::to_string(bytes) + " bytes, but its receive has room for " +
            std::to_string(to.bytes) + ": receive as much as is sent.");
  if (check_ && dtype != to.dtype)
    differs(" is of " + std::string(name_of(dtype)) + ", but its receive is of " +
            std::string(name_of(to.dtype)) + ": give both ends one dtype.");
}

void Mailbox::received(const Sent& letter, int source) {
  if (letter->met != Clock::time_point()) learn(source, letter->expected, letter->in_pieces, letter->met);
  complete(letter, source);
}

// Ends a letter. The waiter of another one may do so: its own is then told by the bell.
void Mailbox::complete(const Sent& letter, int source) {
  const Received received{source, letter->expected};
  if (letter->door) {
    end(letter, {}, received);
  } else {
    letter->received = received;
    letter->done.store(true, std::memory_order_release);
  }
  if (letter.get() != own_) host::ring(bell(rank_));
}

// Ends a letter that has begun. Its callbacks run in a thread that waits for it, if there is one.
void Mailbox::end(const Sent& letter, std::exception_ptr error, const Received& received) {
  begun_.remove(letter);
  auto callbacks = letter->State::end(std::move(error), received);
  if (callbacks.empty()) return;
  if (letter->waiters > 0) letter->last = threads_->lend(std::move(callbacks));
  else threads_->run_beside(std::move(callbacks));
}

void Mailbox::post(const Sent& letter) {
  if (letter->sends) {
    outboxes_[static_cast<std::size_t>(letter->peer)].letters.push_back(letter);
    return progress();
  }
  progress();
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Kept& kept) {
    return kept.head.tag == letter->tag && (letter->peer == kept.source || letter->peer < 0);
  });
  if (found == unexpected_.end()) return posted_.push_back(letter);
  Inbox& inbox = inboxes_[static_cast<std::size_t>(found->source)];
  const bool more = inbox.kept == &*found;  // is to come
  if (more) inbox.kept = nullptr;
  const Kept kept = std::move(*found);
  unexpected_.erase(found);
  keeps_ = !unexpected_.empty();
  check(*letter, kept.source, kept.head.dtype, kept.head.bytes);
  letter->expected = kept.head.bytes;
  if (kept.head.kind == Head::offer) {
    meet(letter, kept.source, kept.head);
    return push(kept.source);
  }
  if (!kept.data.empty()) std::memcpy(letter->at, kept.data.data(), kept.data.size());
  letter->moved = kept.data.size();
  if (more) inbox.letter = letter;
  else complete(letter, kept.source);
}

void Mailbox::progress() {
  do {
    heard_ = bell(rank_).flag.load(std::memory_order_acquire);
    blocked_ = false;
    for (int r = 0; r < size_; ++r)
      if (near(r)) take_records(r);
    if (abroad_) {
      take_records_from_abroad();
      complete_long_ones();
    }
    for (int r = 0; r < size_; ++r) push(r);
  } while (from(rank_).ready());
}

// Leaves a letter where it is. Nobody reaches its memory afterwards, except a peer that was stopped as it
// did. Requires: this rank has left or failed, or nobody has heard of the letter.
void Mailbox::forget(Lock& lock, const Sent& letter) {
  copied_.wait(lock, [&] { return !letter->copied_now; });
  for (Inbox& in : inboxes_) {
    if (in.letter == letter) in.letter = nullptr;
    if (in.shared != letter) continue;
    in.shared = nullptr;
    in.ring->portions().close();
  }
  const int peer = letter->other_end();
  if ((letter->sends && near(peer)) || letter->shared) {
    auto& copies = ring_of(*letter).copies();
    bool late = false;
    // an addition, not a load: a peer that counts itself later sees that this rank has given up
    const auto over = [&] {
      return late || copies.fetch_add(0, std::memory_order_acq_rel) == 0 || group_.dead(number(peer));
    };
    wait_until(over, kMostCopy, [](auto) { ::sched_yield(); }, [] {}, [&] { late = true; });
  }
  posted_.remove(letter);
  begun_.remove(letter);
  copies_.remove(letter);
  long_.remove_if([&](const auto& one) { return one.first == letter; });
  for (Outbox& out : outboxes_) {
    std::erase(out.letters, letter);
    std::erase(out.streams, letter);
    std::erase_if(out.leaving, [&](const auto& one) { return one.second == letter; });
  }
  for (auto* const all : {&offered_, &accepted_})
    std::erase_if(*all, [&](const auto& one) { return one.second == letter; });
}

}  // namespace unisono
