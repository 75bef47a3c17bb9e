// Messages with tags to and from ranks of other nodes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "host/mailbox.hpp"

namespace unisono {

// Returns whether there was room.
bool Mailbox::put_abroad(int peer, const Head& head, std::span<const std::byte> data) {
  const bool room = abroad_->send(peer, std::as_bytes(std::span(&head, 1)), data);
  if (room) ++outboxes_[static_cast<std::size_t>(peer)].records;
  return room;
}

// Completes the letters whose records the transport has sent: it sends them in order.
void Mailbox::complete_those_that_left(int peer) {
  Outbox& out = outboxes_[static_cast<std::size_t>(peer)];
  if (out.leaving.empty()) return;
  const std::uint64_t left = out.records - abroad_->under_way(peer);
  while (!out.leaving.empty() && out.leaving.front().first <= left) {
    const Sent letter = out.leaving.front().second;
    out.leaving.pop_front();
    complete(letter, rank_);
  }
}

// Begins an offer that has been accepted. Both ends do so in the order of the acceptances: the sender as they
// come, the receiver as it sends them. Returns false if the transport has only records.
bool Mailbox::begin_long(const Sent& letter) {
  auto begun = letter->sends ? abroad_->send_long({letter->at, letter->bytes, letter->peer})
                             : abroad_->receive_long({letter->at, letter->expected, letter->source});
  if (!begun) return false;
  long_.emplace_back(letter, std::move(begun));
  return true;
}

void Mailbox::complete_long_ones() {
  for (auto at = long_.begin(); at != long_.end();) {
    if (!abroad_->test(*at->second)) {
      ++at;
      continue;
    }
    const Sent letter = at->first;
    at = long_.erase(at);
    complete(letter, letter->sends ? rank_ : letter->source.load());
  }
}

// Every field comes from outside and is checked. An offer's place means nothing here (`reach`).
void Mailbox::take_records_from_abroad() {
  while (const auto source = abroad_->take(record_)) {
    Head head;
    if (*source < 0 || *source >= size_ || near(*source) || record_.size() < sizeof head)
      no_message(std::clamp(*source, 0, size_ - 1));
    std::memcpy(&head, record_.data(), sizeof head);
    const std::span<const std::byte> data(record_.data() + sizeof head, record_.size() - sizeof head);
    const std::size_t bytes = head.carries() ? head.bytes : 0;
    if (head.kind > Head::part || head.kind == Head::more || data.size() != bytes) no_message(*source);
    take(*source, {head, data});
  }
}

}  // namespace unisono
