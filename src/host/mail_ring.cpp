#include "host/mail_ring.hpp"

#include <algorithm>
#include <cstring>

#include "base/bytes.hpp"
#include "base/env.hpp"
#include "host/group.hpp"

namespace unisono {
namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMostRing = 2048 * kKiB, kLeastRing = 8 * kKiB;
constexpr std::size_t kRings = 4096 * kKiB;  // bytes of a rank, unless its rings are the least
constexpr std::size_t kMostEntries = 128;    // of a ring; they take at most a quarter of it
constexpr std::size_t kMostPiece = 32 * kKiB, kMostEager = 186 * kKiB;
constexpr std::size_t kLeastCells = 4;          // of a rank
constexpr std::size_t kFilled = 64 * kKiB;      // of a ring, that get memory at once
constexpr std::size_t kMostOwned = 128 * kKiB;  // lines that are asked for ahead
constexpr std::size_t kMostLetGo = 512;         // bytes of data (host::let_go)
constexpr std::size_t kLine = sizeof(host::Line);
constexpr std::size_t kBell = 2 * kLine;  // what lies behind it has lines of its own
constexpr std::size_t kFixed = offsetof(MailHead, number);
constexpr std::size_t kInEntry = kLine - kFixed - sizeof(std::uint32_t);  // bytes of a message
constexpr std::size_t kPagedRoom = 96 * kKiB;  // of a ring whose records begin pages (host::kPaged)

std::size_t ring_bytes(int ranks) {
  return std::clamp(kRings / static_cast<std::size_t>(ranks) / host::kPage * host::kPage, kLeastRing,
                    kMostRing);
}
std::size_t num_entries(int ranks) { return std::min(ring_bytes(ranks) / 4 / kLine, kMostEntries); }
std::size_t room_bytes(int ranks) { return ring_bytes(ranks) - num_entries(ranks) * kLine; }

std::size_t num_cells(int ranks) {
  return host::Cells::of_rank(static_cast<std::size_t>(ranks), kLeastCells);
}
std::size_t cell_bytes(int ranks) { return round_up(MailRing::piece_bytes(ranks), host::kPage); }

bool in_entry(const MailHead& head, std::size_t bytes) {
  return bytes == 0 || (head.kind == MailHead::eager && bytes <= kInEntry);
}

void copy_bytes(Dst to, const std::byte* from, std::size_t bytes, bool abreast = false) {
  if (bytes < host::kPaged) return void(std::memcpy(to.at, from, bytes));
  const host::Kernels& kernels = host::kernels();
  (abreast ? kernels.copy_abreast : kernels.copy)(&to, 1, from, bytes);
}

}  // namespace

void MailRecord::copy_to(std::byte* to) const {
  if (!data.empty()) copy_bytes({to}, data.data(), data.size(), abreast);
  if (!rest.empty()) copy_bytes({to + data.size()}, rest.data(), rest.size(), abreast);
}

std::size_t MailRing::head_bytes(int ranks) { return kBell + static_cast<std::size_t>(ranks) * sizeof(Gate); }
std::size_t MailRing::rings_bytes(int ranks) {
  return static_cast<std::size_t>(ranks) * ring_bytes(ranks) + num_cells(ranks) * cell_bytes(ranks);
}
std::size_t MailRing::piece_bytes(int ranks) {
  return std::min(room_bytes(ranks) / 4 / kLine * kLine, kMostPiece);
}
std::size_t MailRing::eager_bytes(int ranks) { return std::min(room_bytes(ranks) / 4 * 3, kMostEager); }

host::Line& MailRing::bell(const Group& group, int rank) {
  return *reinterpret_cast<host::Line*>(group.mail(rank));
}

// A rank's cells lie behind its rings.
host::Cells MailRing::cells_of(Group& group) {
  const int ranks = group.size();
  std::vector<std::byte*> firsts;
  for (int r = 0; r < ranks; ++r)
    firsts.push_back(group.mail_data(r) + static_cast<std::size_t>(ranks) * ring_bytes(ranks));
  return {group.rank(), firsts, num_cells(ranks), cell_bytes(ranks),
          [&group](int owner, const std::byte* part, std::size_t bytes) { group.fill(owner, part, bytes); }};
}

MailRing::MailRing(Group& group, host::Cells& cells, int reader, int writer)
    : group_(group),
      cells_(cells),
      reader_(reader),
      gate_(reinterpret_cast<Gate*>(group.mail(reader) + kBell)[writer]),
      entries_(reinterpret_cast<Entry*>(group.mail_data(reader) +
                                        static_cast<std::size_t>(writer) * ring_bytes(group.size()))),
      num_entries_(num_entries(group.size())),
      data_bytes_(room_bytes(group.size())) {}

std::uint64_t MailRing::begin_of(std::size_t bytes) const {
  return bytes >= host::kPaged && data_bytes_ >= kPagedRoom ? host::behind(placed_, bytes) : placed_;
}

void MailRing::reach(std::size_t bytes) {
  const std::size_t whole = entries_bytes() + data_bytes_;
  for (bytes = std::min(bytes, whole); reached_ < bytes; reached_ += kFilled)
    group_.fill(reader_, reinterpret_cast<std::byte*>(entries_) + reached_,
                std::min(kFilled, whole - reached_));
}

bool MailWriter::has_cell() const { return group_.uses_cells() && !cells_.empty(); }

bool MailWriter::has_room(std::uint64_t end) {
  const auto fits = [&] { return next_ - taken_entries_ < num_entries_ && end - taken_ <= data_bytes_; };
  if (fits()) return true;
  taken_entries_ = gate_.entries.load(std::memory_order_acquire);
  taken_ = gate_.placed.load(std::memory_order_acquire);
  return fits();
}

bool MailWriter::begins_around() const { return !group_.cached(); }

// A writer may be many records ahead of the reader, which tells the time of the one that was timed last.
bool MailWriter::goes_around(std::size_t bytes) {
  if (bytes < host::kStreamFrom) return false;
  const auto number = static_cast<std::uint32_t>(next_);
  const bool learns = bytes >= host::kTimedFrom && number != 0 && host::ChunkWay::timed(number) &&
                      !group_.patience().crowded && !env().stream_chunks;
  const host::Taken taken = learns ? gate_.taken.load(std::memory_order_relaxed) : host::Taken{};
  if (!learns || taken.piece != timed_) return way_.around();
  way_.learn(taken);
  timed_ = number;
  return way_.begin(number);
}

void MailWriter::write(Dst to, const std::byte* data, std::size_t bytes) const {
  copy_bytes(to, data, bytes);
  if (lets_go_ && bytes <= kMostLetGo) host::let_go(to.at, bytes);
}

void MailWriter::write_to_ring(const std::byte* data, std::size_t bytes) {
  const bool around = goes_around(bytes);
  const bool timed = timed_ != 0 && timed_ == static_cast<std::uint32_t>(next_);
  entry(next_).rest[0] = std::byte{host::Cells::kNone};
  entry(next_).rest[1] = std::byte{timed};
  const std::size_t at = begin_of(bytes) % data_bytes_, first = std::min(bytes, data_bytes_ - at);
  const auto copy = [&] {
    write({this->data() + at, around}, data, first);
    if (bytes > first) write({this->data(), around}, data + first, bytes - first);
  };
  if (!timed) return copy();
  const host::Stopwatch watch(bytes);
  copy();
  way_.wrote(watch.ended());
}

bool MailWriter::put(const MailHead& head, const std::byte* data, std::size_t bytes) {
  const bool small = in_entry(head, bytes);
  const bool by_cell = !small && has_cell();
  const std::uint64_t end = small || by_cell ? placed_ : begin_of(bytes) + round_up(bytes, kLine);
  if (!has_room(end)) {
    gate_.blocked.store(1, std::memory_order_seq_cst);
    if (!has_room(end)) return false;
  }
  reach(entries_bytes() + end);
  auto* const line = reinterpret_cast<std::byte*>(&entry(next_));
  std::memcpy(line, &head, sizeof head);
  if (small) {
    if (bytes > 0) std::memcpy(line + kFixed, data, bytes);
  } else if (by_cell) {
    const std::uint8_t cell = cells_.take();
    entry(next_).rest[0] = std::byte{cell};
    write({cells_.room(cell, bytes)}, data, bytes);
  } else {
    write_to_ring(data, bytes);
    placed_ = end;
  }
  if (next_ == 0) gate_.opened.store(1, std::memory_order_release);
  host::publish(entry(next_).stamp, lap(next_), group_.patience().crowded);
  ++next_;
  return true;
}

void MailWriter::own_next(std::size_t bytes) const {
  host::own(&entry(next_));
  const std::size_t at = begin_of(bytes) % data_bytes_;
  const std::size_t end = std::min(at + std::min(bytes, kMostOwned), data_bytes_);
  if (bytes <= kInEntry || has_cell() || way_.around() || entries_bytes() + end > reached_) return;
  for (std::size_t line = at; line < end; line += kLine) host::own(data() + line);
}

std::optional<MailRecord> MailReader::look() {
  const Entry& entry = this->entry(next_.load(std::memory_order_relaxed));
  const auto* const line = reinterpret_cast<const std::byte*>(&entry);
  MailRecord record{};
  MailHead& head = record.head;
  std::memcpy(&head, line, sizeof head);
  const std::size_t most = piece_bytes(group_.size());
  const std::size_t bytes = head.kind == MailHead::eager ? std::min<std::size_t>(head.bytes, most)
                            : head.carries()             ? head.bytes
                                                         : 0;
  if (head.kind > MailHead::wrote || bytes > most) return std::nullopt;
  if (in_entry(head, bytes)) {
    record.data = {line + kFixed, bytes};
    return record;
  }
  record.abreast = group_.copies_abreast();
  record.cell = std::to_integer<std::uint8_t>(entry.rest[0]);
  if (!cells_.has(record.cell)) return std::nullopt;
  if (record.cell != host::Cells::kNone) {
    record.data = {cells_.at(record.cell), bytes};
    return record;
  }
  if (entry.rest[1] != std::byte{0}) record.timed.emplace(bytes);
  reach(entries_bytes() + begin_of(bytes) + bytes);
  const std::size_t at = begin_of(bytes) % data_bytes_, first = std::min(bytes, data_bytes_ - at);
  record.data = {data() + at, first};
  record.rest = {data(), bytes - first};
  return record;
}

bool MailReader::pop(const MailRecord& record) {
  const std::uint64_t next = next_.load(std::memory_order_relaxed) + 1;
  if (record.timed)
    gate_.taken.store({static_cast<std::uint32_t>(next - 1), record.timed->ended()},
                      std::memory_order_relaxed);
  next_.store(next, std::memory_order_relaxed);
  const std::size_t bytes = record.bytes();
  if (record.cell != host::Cells::kNone) cells_.keep(record.cell);
  else if (!in_entry(record.head, bytes)) placed_ = begin_of(bytes) + round_up(bytes, kLine);
  gate_.placed.store(placed_, std::memory_order_release);
  host::publish(gate_.entries, next, group_.patience().crowded);
  if (gate_.blocked.load(std::memory_order_seq_cst) == 0) return false;
  gate_.blocked.store(0, std::memory_order_relaxed);
  return true;
}

void MailReader::want_pieces(std::size_t bytes, bool pieces) {
  const std::uint64_t all = gate_.sizes.load(std::memory_order_relaxed), bit = bit_of(bytes);
  if (((all & bit) != 0) != pieces) gate_.sizes.store(all ^ bit, std::memory_order_relaxed);
}

}  // namespace unisono
