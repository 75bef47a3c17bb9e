// The ring of messages with tags from one rank of a node to another. It lies in the reader's memory, and has
// entries of a cache line, which the reader polls, and room for the data that does not fit into them, if the
// writer has no cell for it.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "host/cells.hpp"
#include "host/chunk_way.hpp"
#include "host/move.hpp"
#include "host/portions.hpp"
#include "host/wait.hpp"
#include "unisono/types.hpp"

namespace unisono {

class Group;

// The head of a record. Records go to other nodes too, over a transport.
struct MailHead {
  // eager, more: a message, which begins at once. offer, taken: one that its receiver copies; share, wrote:
  // and its sender too. accept, part: one that its sender writes when its receive is there.
  enum Kind : std::uint16_t { eager, more, offer, taken, accept, part, share, wrote };
  Kind kind;
  DType dtype;
  std::int32_t tag;
  std::uint64_t bytes;       // eager, offer, share: of the message; more, part, wrote: of this piece of it
  std::uint32_t allocation;  // offer, share: Place::allocation of the memory of who writes this
  // The data of a small message lies from here on.
  std::uint64_t number;  // part: the receiver's; of all others the sender's
  std::uint64_t other;   // accept: the receiver's; offer, share: Place::offset; wrote: whether all is written
  bool carries() const { return kind == eager || kind == more || kind == part; }
};

// A record and its data, in one or two places.
struct MailRecord {
  MailHead head;
  std::span<const std::byte> data{}, rest{};
  std::uint8_t cell = host::Cells::kNone;  // that the data lies in
  bool abreast = false;                    // copies of much go abreast (Kernels::copy_abreast)
  std::optional<host::Stopwatch> timed{};  // the writer learns how long the reader has it
  std::size_t bytes() const { return data.size() + rest.size(); }
  void copy_to(std::byte* to) const;
};

class MailRing {
 public:
  // Return the bytes of shared memory that a rank of so many gives: what all ranks look at, and the rings,
  // which have no memory until a pair of ranks uses them.
  static std::size_t head_bytes(int ranks);
  static std::size_t rings_bytes(int ranks);
  // Returns the cells of messages that a rank has, and those that come from its peers.
  static host::Cells cells_of(Group& group);
  // Returns the most bytes of a record's data: some records have room in any ring.
  static std::size_t piece_bytes(int ranks);
  // Returns the most bytes of a message that is sent before its receiver has asked for it.
  static std::size_t eager_bytes(int ranks);

  // The line on which a rank sleeps.
  static host::Line& bell(const Group& group, int rank);

  // Threads of either end that may copy between the memory of both.
  std::atomic<std::uint32_t>& copies() const { return gate_.copies; }
  // The portions of the message that both ends copy.
  host::Portions& portions() const { return gate_.portions; }
  // Returns whether the reader would rather have messages of about that size in pieces than copy them.
  bool wants_pieces(std::size_t bytes) const {
    return (gate_.sizes.load(std::memory_order_relaxed) & bit_of(bytes)) != 0;
  }

 protected:
  // Counts never go back.
  struct Gate {
    alignas(64) std::atomic<std::uint32_t> opened;           // by the writer: the entries have memory
    alignas(64) std::atomic<std::uint64_t> entries, placed;  // that the reader has taken; bytes of data
    std::atomic<std::uint32_t> blocked;                      // the writer waits for room
    std::atomic<std::uint64_t> sizes;  // a bit for each number of bits of a size: `wants_pieces`
    std::atomic<host::Taken> taken;    // the last record that was timed
    alignas(64) std::atomic<std::uint32_t> copies;
    host::Portions portions;
  };
  struct Entry {
    MailHead head;
    // The end of a small message, whose data begins within the head; else the cell, and whether it is timed.
    std::byte rest[20];
    std::atomic<std::uint32_t> stamp;  // counts laps: this lap's says that the record is there
  };
  static_assert(sizeof(Entry) == sizeof(host::Line));

  static std::uint64_t bit_of(std::size_t bytes) { return std::uint64_t{1} << std::bit_width(bytes) % 64; }

  MailRing(Group& group, host::Cells& cells, int reader, int writer);
  Entry& entry(std::uint64_t number) const { return entries_[number % num_entries_]; }
  std::uint32_t lap(std::uint64_t number) const {
    return static_cast<std::uint32_t>(number / num_entries_) + 1;
  }
  // Returns where the next record's data begins if it lies outside the entry, in the ring.
  std::uint64_t begin_of(std::size_t bytes) const;
  // Takes memory for the ring's first `bytes` bytes, if this end has not yet.
  void reach(std::size_t bytes);
  std::size_t entries_bytes() const { return num_entries_ * sizeof(Entry); }
  std::byte* data() const { return reinterpret_cast<std::byte*>(entries_) + entries_bytes(); }

  Group& group_;
  host::Cells& cells_;
  const int reader_;
  Gate& gate_;
  Entry* const entries_;
  const std::size_t num_entries_, data_bytes_;
  std::size_t reached_ = 0;
  std::uint64_t placed_ = 0;  // bytes of data, by this end
};

// Used by one thread at a time.
class MailWriter : public MailRing {
 public:
  MailWriter(Group& group, host::Cells& cells, int reader, int writer)
      : MailRing(group, cells, reader, writer) {}
  // Writes a record. Returns whether there was room; the reader tells when there is.
  bool put(const MailHead& head, const std::byte* data, std::size_t bytes);
  // Asks for the lines of the next records, which often have as many bytes of data as the last, while this
  // rank has nothing else to do.
  void own_next(std::size_t bytes) const;

 private:
  bool has_cell() const;
  bool has_room(std::uint64_t end);
  bool begins_around() const;
  // Returns whether the next record's data goes into the ring around the cache, which is timed now and then.
  bool goes_around(std::size_t bytes);
  void write(Dst to, const std::byte* data, std::size_t bytes) const;
  void write_to_ring(const std::byte* data, std::size_t bytes);
  std::uint64_t next_ = 0;                       // entry
  std::uint64_t taken_entries_ = 0, taken_ = 0;  // when this end has last looked
  host::ChunkWay way_{begins_around()};          // of data in the ring
  std::uint32_t timed_ = 0;                      // the record whose time the reader tells; 0: none
  const bool lets_go_ = host::lets_go();
};

// Used by one thread at a time, except `ready`.
class MailReader : public MailRing {
 public:
  MailReader(Group& group, host::Cells& cells, int reader, int writer)
      : MailRing(group, cells, reader, writer) {}
  // Returns whether there is a record.
  bool ready() const {
    const std::uint64_t next = next_.load(std::memory_order_relaxed);
    return gate_.opened.load(std::memory_order_acquire) != 0 &&
           entry(next).stamp.load(std::memory_order_acquire) == lap(next);
  }
  // Returns the record that is there, or none if it is no record of this version.
  std::optional<MailRecord> look();
  // Gives its place back. Returns whether the writer waits for room.
  bool pop(const MailRecord& record);
  // Says whether messages of about that size had better come in pieces.
  void want_pieces(std::size_t bytes, bool pieces);

 private:
  std::atomic<std::uint64_t> next_ = 0;  // entry
};

}  // namespace unisono
