#include "host/mailbox.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/bytes.hpp"
#include "host/group.hpp"
#include "host/move.hpp"

namespace unisono {
namespace {

constexpr std::size_t kMostRing = std::size_t{256} << 10, kLeastRing = std::size_t{8} << 10;
constexpr std::size_t kRings = std::size_t{1} << 20;      // bytes of a rank, unless its rings are the least
constexpr std::size_t kMostPart = std::size_t{16} << 10;  // bytes of a record's data
constexpr std::size_t kRecord = 64;                       // records begin at multiples
constexpr std::size_t kRoom = std::size_t{64} << 10;      // of a ring, that is taken at once
constexpr std::size_t kBell = 2 * sizeof(host::Line);     // what lies behind it has lines of its own

std::size_t ring_bytes(int ranks) {
  return std::clamp(kRings / static_cast<std::size_t>(ranks) / 4096 * 4096, kLeastRing, kMostRing);
}

// Returns the most bytes of a record's data: some records have room in any ring.
std::size_t part_bytes(int ranks) { return std::min(ring_bytes(ranks) / 4, kMostPart); }

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  const Dst dst{to};
  host::kernels().copy(&dst, 1, from, bytes);
}

}  // namespace

std::size_t Mailbox::head_bytes(int ranks) { return kBell + static_cast<std::size_t>(ranks) * sizeof(Ring); }
std::size_t Mailbox::data_bytes(int ranks) { return static_cast<std::size_t>(ranks) * ring_bytes(ranks); }

Mailbox::Mailbox(Group& group, const Symmetric& symmetric, bool check, std::unique_ptr<Abroad> abroad)
    : group_(group),
      abroad_(std::move(abroad)),
      symmetric_(symmetric),
      rank_(abroad_ ? abroad_->rank : group.rank()),
      size_(abroad_ ? static_cast<int>(abroad_->group_number.size()) : group.size()),
      check_(check),
      heard_(bell(rank_).flag.load(std::memory_order_relaxed) - 1),
      outboxes_(static_cast<std::size_t>(size_)) {
  door_->mailbox = this;
}

std::string Mailbox::name(int rank) const {
  return near(rank) ? group_.name(number(rank)) : "rank " + std::to_string(rank);
}

host::Line& Mailbox::bell(int rank) const {
  return *reinterpret_cast<host::Line*>(group_.mail(number(rank)));
}
Mailbox::Ring& Mailbox::ring(int reader, int writer) const {
  return reinterpret_cast<Ring*>(group_.mail(number(reader)) + kBell)[number(writer)];
}
std::byte* Mailbox::data(int reader, int writer) const {
  return group_.mail_data(number(reader)) +
         static_cast<std::size_t>(number(writer)) * ring_bytes(group_.size());
}

void Mailbox::no_message(int source) {
  group_.fail(
      FailureKind::mismatch,
      name(source) + " has sent what is no message: start every rank with the same version of Unisono.");
}

void Mailbox::take_room(int owner, const std::byte* ring, std::uint64_t at, std::size_t bytes) {
  const std::size_t whole = ring_bytes(group_.size());
  const std::uint64_t end = std::min<std::uint64_t>(at + bytes, whole);
  for (std::uint64_t room = round_up(at, kRoom); room < end; room += kRoom)
    group_.fill(owner, ring + room, std::min<std::size_t>(kRoom, whole - room));
}

// Returns whether there was room.
bool Mailbox::put(int peer, const Head& head, const std::byte* data, std::size_t bytes) {
  if (!near(peer)) return put_abroad(peer, head, {data, bytes});
  Ring& to = ring(peer, rank_);
  const std::size_t whole = ring_bytes(group_.size()), record = round_up(sizeof head + bytes, kRecord);
  const std::uint64_t at = to.written.load(std::memory_order_relaxed);
  auto room = [&] { return whole - (at - to.taken.load(std::memory_order_acquire)) >= record; };
  if (!room()) {
    to.blocked.store(1, std::memory_order_seq_cst);
    if (!room()) {
      blocked_ = true;
      return false;
    }
  }
  std::byte* const ring = this->data(peer, rank_);
  take_room(number(peer), ring, at, record);
  std::memcpy(ring + at % whole, &head, sizeof head);
  const std::size_t begin = (at + sizeof head) % whole, first = std::min(bytes, whole - begin);
  if (first > 0) copy_bytes(ring + begin, data, first);
  if (bytes > first) copy_bytes(ring, data + first, bytes - first);
  to.written.store(at + record, std::memory_order_release);
  return true;
}

// Writes to a peer's ring what there is and fits: answers first, then messages, then parts of large ones.
void Mailbox::push(int peer) {
  Outbox& out = outboxes_[static_cast<std::size_t>(peer)];
  if (out.empty()) return;
  const std::size_t most = near(peer) ? part_bytes(group_.size()) : abroad_->most_bytes;
  bool wrote = false, room = true;
  while (room && !out.answers.empty()) {
    room = put(peer, out.answers.front(), nullptr, 0);
    if (room) out.answers.pop_front();
    wrote = wrote || room;
  }
  while (room && !out.letters.empty()) {
    const Sent letter = out.letters.front();
    const bool eager = letter->bytes <= most;
    const std::uint64_t number = eager ? 0 : ++numbers_;
    const Place at = eager ? Place() : place(*letter);
    room = put(peer,
               {eager ? Head::eager : Head::offer, letter->tag, letter->bytes, number, at.offset,
                letter->dtype, at.allocation},
               letter->at, eager ? letter->bytes : 0);
    if (!room) break;
    wrote = true;
    out.letters.pop_front();
    if (!eager) offered_[number] = letter;
    else if (near(peer)) complete(letter, rank_);
    else out.leaving.emplace_back(out.records, letter);
  }
  while (room && !out.streams.empty()) {
    const Sent letter = out.streams.front();
    const std::size_t bytes = std::min<std::size_t>(most, letter->bytes - letter->moved);
    room = put(peer, {Head::part, letter->tag, bytes, letter->other, 0, letter->dtype, Place::kNone},
               letter->at + letter->moved, bytes);
    if (!room) break;
    wrote = true;
    letter->moved += bytes;
    if (letter->moved < letter->bytes) continue;
    out.streams.pop_front();
    if (near(peer)) complete(letter, rank_);
    else out.leaving.emplace_back(out.records, letter);
  }
  if (!near(peer)) complete_those_that_left(peer);
  else if (wrote) host::ring(bell(peer));
}

void Mailbox::take_records(int source) {
  Ring& from = ring(rank_, source);
  const std::size_t whole = ring_bytes(group_.size());
  const std::byte* const ring = data(rank_, source);
  std::uint64_t at = from.taken.load(std::memory_order_relaxed);
  while (at != from.written.load(std::memory_order_acquire)) {
    Head head;
    take_room(number(rank_), ring, at, sizeof head);
    std::memcpy(&head, ring + at % whole, sizeof head);
    const bool carries = head.kind == Head::eager || head.kind == Head::part;
    if (carries && head.bytes > part_bytes(group_.size())) no_message(source);
    const std::size_t bytes = carries ? head.bytes : 0, begin = (at + sizeof head) % whole;
    take_room(number(rank_), ring, at + sizeof head, bytes);
    take(source, head, {ring + begin, std::min(bytes, whole - begin)}, ring);
    at += round_up(sizeof head + bytes, kRecord);
    from.taken.store(at, std::memory_order_seq_cst);
    if (from.blocked.load(std::memory_order_seq_cst) != 0) {
      from.blocked.store(0, std::memory_order_relaxed);
      host::ring(bell(source));
    }
  }
}

void Mailbox::take(int source, const Head& head, std::span<const std::byte> data, const std::byte* rest) {
  auto copy = [&](std::byte* to) {
    if (!data.empty()) copy_bytes(to, data.data(), data.size());
    if (head.bytes > data.size()) copy_bytes(to + data.size(), rest, head.bytes - data.size());
  };
  switch (head.kind) {
    case Head::eager:
    case Head::offer: {
      const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Sent& letter) {
        return letter->tag == head.tag && (letter->peer == source || letter->peer < 0);
      });
      if (found == posted_.end()) {
        Kept& kept = unexpected_.emplace_back(source, head);
        if (head.kind == Head::offer) return;
        kept.data.resize(head.bytes);
        return copy(kept.data.data());
      }
      const Sent letter = std::move(*found);
      posted_.erase(found);
      check(*letter, source, head.dtype, head.bytes);
      letter->expected = head.bytes;
      if (head.kind == Head::offer) return meet(letter, source, head);
      copy(letter->at);
      return complete(letter, source);
    }
    case Head::taken: {
      const auto found = offered_.find(head.number);
      if (found == offered_.end()) return;  // its sender has given up
      const Sent letter = found->second;
      offered_.erase(found);
      return complete(letter, rank_);
    }
    case Head::accept: {
      const auto found = offered_.find(head.number);
      if (found == offered_.end()) return;  // its sender has given up
      const Sent letter = found->second;
      offered_.erase(found);
      if (!near(source) && begin_long(letter)) return;
      letter->other = head.other;
      outboxes_[static_cast<std::size_t>(source)].streams.push_back(letter);
      return;
    }
    case Head::part: {
      const auto found = accepted_.find(head.number);
      if (found == accepted_.end()) return;
      const Sent letter = found->second;
      if (head.bytes > letter->expected - letter->moved) return;
      copy(letter->at + letter->moved);
      letter->moved += head.bytes;
      if (letter->moved < letter->expected) return;
      accepted_.erase(found);
      return complete(letter, source);
    }
  }
}

// Takes an offer for a receive.
void Mailbox::meet(const Sent& letter, int source, const Head& head) {
  letter->source = source;
  letter->number = head.number;
  letter->from = reach({.allocation = head.allocation, .offset = head.other}, source, head.bytes);
  if (!letter->from) return accept(letter);
  copies_.push_back(letter);
  to_copy_ = true;
  if (letter.get() != own_ && door_->waiters > 0) host::ring(bell(rank_));
}

// Asks for a message in parts, or as a long one.
void Mailbox::accept(const Sent& letter) {
  letter->moved = 0;
  if (near(letter->source) || !begin_long(letter)) accepted_[++numbers_] = letter;
  outboxes_[static_cast<std::size_t>(letter->source)].answers.push_back(
      {Head::accept, letter->tag, 0, letter->number, numbers_, letter->dtype, Place::kNone});
}

void Mailbox::check(const Letter& letter, int source, DType dtype, std::uint64_t bytes) {
  const std::string message =
      "the message with tag " + std::to_string(letter.tag) + " of " + name(source) + " to " + name(rank_);
  if (bytes > letter.bytes)
    group_.fail(FailureKind::mismatch, message + " has " + std::to_string(bytes) +
                                           " bytes, but its receive has room for " +
                                           std::to_string(letter.bytes) + ": receive as much as is sent.");
  if (check_ && dtype != letter.dtype)
    group_.fail(FailureKind::mismatch, message + " is of " + std::string(name_of(dtype)) +
                                           ", but its receive is of " + std::string(name_of(letter.dtype)) +
                                           ": give both ends one dtype.");
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
  const Kept kept = std::move(*found);
  unexpected_.erase(found);
  check(*letter, kept.source, kept.head.dtype, kept.head.bytes);
  letter->expected = kept.head.bytes;
  if (kept.head.kind == Head::offer) {
    meet(letter, kept.source, kept.head);
    return push(kept.source);
  }
  if (!kept.data.empty()) std::memcpy(letter->at, kept.data.data(), kept.data.size());
  complete(letter, kept.source);
}

void Mailbox::progress() {
  Ring& own = ring(rank_, rank_);
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
  } while (own.written.load(std::memory_order_relaxed) != own.taken.load(std::memory_order_relaxed));
}

// Leaves a letter where it is. Nobody reaches its memory afterwards. Requires: this rank has left or failed,
// or nobody has heard of the letter.
void Mailbox::forget(Lock& lock, const Sent& letter) {
  copied_.wait(lock, [&] { return !letter->copied_now; });
  if (letter->sends && near(letter->peer)) {
    auto& copies = ring(letter->peer, rank_).copies;
    // an addition, not a load: a reader that counts itself later sees that this rank has given up
    while (copies.fetch_add(0, std::memory_order_acq_rel) != 0 && !group_.dead(number(letter->peer)))
      ::sched_yield();
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
