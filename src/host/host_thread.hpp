// The host lane: one thread of one rank, over memory that all ranks of the machine have mapped.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/deadline.hpp"
#include "host/cells.hpp"
#include "host/chunk_way.hpp"
#include "host/far.hpp"
#include "host/move.hpp"
#include "host/segment.hpp"
#include "host/wait.hpp"
#include "lane/lane.hpp"

namespace unisono {

class HostThread {
 public:
  static constexpr std::uint32_t kChunks = 8;     // pieces under way to a peer
  static constexpr std::uint32_t kPackets = 512;  // packets in the ring of a pair
  static constexpr bool kPulls = true;  // reading from a peer is as good as writing to it, or better
  static constexpr bool kMulticasts = false;
  static constexpr bool kLinked = false;
  static constexpr std::size_t kPacketBytes = 56;  // payload of a cache line beside its flag

  // A rank's segment: a header of `header_bytes` bytes, then signals, packets and chunks by peer, and cells.
  // Memory from `packets` on is taken as far as pieces have come.
  struct Layout {
    Layout(int ranks, std::size_t chunk_bytes, std::size_t header_bytes);
    // Uses as much of the rings as suits cores with a second-level cache of so many bytes. If a rank's rings
    // have less than twice as much in all, its peers overwrite lines that are still in its cache, which takes
    // up to four times as long; if they have much more, it takes longer too (docs/notes/host-rings.md).
    void fit_rings(std::size_t cache);
    static constexpr std::size_t kMostRings = std::size_t{2} << 20;  // bytes of a rank, if chunks are small
    int ranks;
    std::size_t chunk_bytes;
    std::size_t own_ring_bytes;         // of a rank's ring from itself
    std::size_t ring_room, ring_bytes;  // of one from a peer: its memory, and what is used of it
    std::size_t num_cells, cell_bytes;  // of a rank at first
    std::size_t lines, packets, chunks, cells, bytes;
  };

  // Functions that a wait calls while it lasts, and ends by their exceptions.
  struct Watch {
    std::function<void(int peer, const std::function<bool()>& arrived)> interrupted;
    std::function<void(int peer, Slot slot, std::uint32_t expected, std::uint32_t seen)> late;
    std::function<void(int peer)> differs;  // a piece of another call has come
    std::function<void(int owner, const byte* part, std::size_t bytes)> fill;  // Group::fill
    std::function<void(std::size_t bytes)> begin_ring;                         // Group::begin_ring
    std::function<void(int peer)>
        waits;  // once, when the polls were not enough; not beside a rank's own work
  };

  HostThread(int rank, const Layout& layout, std::vector<std::shared_ptr<Segment>> segments, host::Far far,
             const host::Patience& patience, Watch watch);

  // Sets the reduction of moves with several sources, for the next program.
  void prepare(DType dtype, Op op) {
    const auto& reduce = copy_ == kernels_.copy ? kernels_.reduce : kernels_.reduce_abreast;
    reduce_ = reduce[static_cast<int>(dtype)][static_cast<int>(op)];
  }

  // Sets what requantise does and element_bytes returns, for the next program.
  void prepare(DType dtype, Op op, Wire wire) {
    requantise_ = kernels_.requantise[static_cast<int>(dtype)][static_cast<int>(wire)];
    average_ = op == Op::avg;
    element_bytes_ = size_of(dtype);
  }

  // Sets the deadline of waits.
  void set_timeout(double timeout_s) { patience_.timeout = std::chrono::duration<double>(timeout_s); }

  // Sets whether the programs that follow run beside their rank's own work, in a thread without a core of its
  // own. Waits that poll take time from that work, while the peer's thread waits for a core too. So they only
  // yield, after a wait of many yields as many times as that helps, before they sleep. Pieces go ahead.
  void run_beside(bool beside);
  // Returns how many pieces a program may give before it takes the first of them. Each rank decides alone.
  std::uint32_t pieces_ahead() const { return beside_ ? kChunks / 2 : 0; }

  // Sets the mark, at most kMarks, that pieces of the next program carry and must carry.
  void mark(std::uint32_t mark) { mark_ = mark; }
  static constexpr int kMarkBits = 24;
  static constexpr std::uint32_t kMarks = (1u << kMarkBits) - 1;

  int rank() const { return rank_; }
  int size() const { return layout_.ranks; }
  static constexpr int worker() { return 0; }
  static constexpr int workers() { return 1; }
  std::size_t chunk_bytes() const { return layout_.chunk_bytes; }
  std::size_t ring_bytes() const { return layout_.ring_bytes; }  // of chunks from a peer
  // Sets whether large pieces, of kLarge bytes or more, go around as little of a ring as keeps them apart, or
  // around all of it. Requires: the same on every rank, before the same piece.
  void confine_large(bool confined) {
    large_ring_bytes_ = confined ? std::min(paged_ring_bytes(), layout_.ring_bytes) : layout_.ring_bytes;
  }
  static constexpr std::size_t kLarge = host::kAbreastFrom;
  // Returns the most bytes of a piece of `bytes` that only go one way: half, where a half is worth its
  // signal.
  std::size_t one_way(std::size_t bytes) const {
    constexpr std::size_t kHalf = std::size_t{12} << 10;
    const std::size_t half = round_up(bytes / 2, host::kPage);
    return half < kHalf || usual_patience_.crowded ? layout_.chunk_bytes : half;
  }
  // Returns whether the piece that is written next goes into its chunk around the cache.
  bool streams_chunk(int peer, std::size_t) { return signals(peer).put.around; }
  // Sets the way of chunks that ranks have chosen together (Group::time_chunks).
  void stream_chunks(bool around) {
    around_ = around;
    for (host::ChunkWay& way : ways_) way = host::ChunkWay(around);
  }
  // Sets whether pieces go by cells where there is one. Each rank decides for its own.
  void use_cells(bool use) { cells_used_ = use; }
  // Sets whether this rank copies and sums large pieces abreast.
  void copy_abreast(bool abreast) { copy_ = abreast ? kernels_.copy_abreast : kernels_.copy; }
  // While it lasts, this rank alone chooses the way of its pieces, and begins with that one. For programs
  // that write a piece as soon as its chunk is reserved, and take it as soon as it has come.
  class OwnWays {
   public:
    OwnWays(HostThread& lane, bool own) : lane_(lane) {
      lane_.own_ways_ = own && !lane_.usual_patience_.crowded;
    }
    ~OwnWays() { lane_.own_ways_ = false; }
    OwnWays(const OwnWays&) = delete;

   private:
    HostThread& lane_;
  };
  static constexpr std::size_t piece_bytes() { return std::size_t{1} << 62; }
  static constexpr std::size_t tile_bytes() { return std::size_t{1} << 62; }

  // Sets whether the programs that follow move between far addresses.
  void reach_far(bool far) { far_operands_ = far; }
  bool copies_far() const { return far_operands_; }

  // Returns the bytes of a peer's block that the root of a gather reads itself; the peer writes the rest. The
  // kernel writes large far blocks so slowly that the root finishes its own block earlier.
  std::size_t root_reads(std::size_t block) const {
    if (!far_operands_ || block < kReadFrom) return 0;
    return block / (static_cast<std::size_t>(size()) + 1) / 4096 * 4096;
  }

  // As Far::near.
  const byte* near(int index, const byte* from, std::size_t bytes) { return far_.near(index, from, bytes); }
  static constexpr std::size_t kNearBytes = host::Far::kNearBytes;

  void move(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes) {
    if (bytes == 0) return;
    if (far_operands_ && any_far(dsts, n_dsts, srcs, n_srcs))
      far_.move(kernels_, reduce_, dsts, n_dsts, srcs, n_srcs, bytes);
    else if (n_srcs == 1) copy_(dsts, n_dsts, srcs[0], bytes);
    else reduce_(dsts, n_dsts, srcs, n_srcs, bytes);
  }

  void requantise(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, Plain plain,
                  std::size_t count) {
    requantise_(dsts, n_dsts, srcs, n_srcs, plain, average_, count);
  }
  std::size_t element_bytes() const { return element_bytes_; }

  void signal(int peer, Slot slot) {
    host::Line& theirs = *line(peer, slot, rank_);
    std::uint32_t& sent = signals(peer).signalled[static_cast<int>(slot)];
    if (slot == Slot::chunk) {
      const Placed& piece = signals(peer).put;
      mark_of(theirs, sent) = mark_ | std::uint32_t{piece.cell} << kMarkBits;
      if (lets_go_ && piece.bytes <= kMostLetGo) host::let_go(piece.at, piece.bytes);
      if (writing_.peer == peer) end_writing();
    }
    if (slot == Slot::chunk_credit && taking_.peer == peer) end_taking();
    host::raise(theirs, ++sent, patience_.crowded);
    if (slot == Slot::chunk) own_next(peer);
  }
  void wait(int peer, Slot slot) {
    const std::uint32_t expected = ++signals(peer).awaited[static_cast<int>(slot)];
    host::Line& mine = *line(rank_, slot, peer);
    if (!host::reached(mine, expected)) await(mine, expected, peer, slot);
    host::own(line(peer, slot, rank_));  // ranks signal each other in turn
    if (slot != Slot::chunk) return;
    const std::uint32_t mark = mark_of(mine, expected - 1);
    signals(peer).taken.cell = static_cast<std::uint8_t>(mark >> kMarkBits);
    if ((mark & kMarks) != mark_) watch_.differs(peer);
  }
  // Returns whether the next wait returns at once.
  bool reached(int peer, Slot slot) {
    return host::reached(*line(rank_, slot, peer), signals(peer).awaited[static_cast<int>(slot)] + 1);
  }
  // Waits until the next signal of either peer has come. Returns whether that of the first has.
  bool comes_first(int peer, Slot slot, int other, Slot others);
  // Waits until the next packet or the next chunk of the peer has come. Returns whether it is the packet.
  bool packet_comes(int peer);
  // Wakes a peer that sleeps in `packet_comes`, where a chunk would wake it, once a packet is there.
  void wake(int peer) { host::wake(*line(peer, Slot::chunk, rank_)); }
  // Signals with a note of at most kPacketBytes bytes, readable until the next note in that slot.
  template <class Note>
  void signal_note(int peer, Slot slot, const Note& note) {
    static_assert(sizeof(Note) <= kPacketBytes);
    std::memcpy(line(peer, slot, rank_)->payload, &note, sizeof note);
    signal(peer, slot);
  }
  template <class Note>
  Note wait_note(int peer, Slot slot) {
    wait(peer, slot);
    Note note;
    std::memcpy(&note, line(rank_, slot, peer)->payload, sizeof note);
    return note;
  }
  std::uint32_t signalled(int peer, Slot slot) { return signals(peer).signalled[static_cast<int>(slot)]; }
  std::uint32_t awaited(int peer, Slot slot) { return signals(peer).awaited[static_cast<int>(slot)]; }

  void put_packets(int peer, const byte* src, std::size_t bytes);
  void take_packets(int peer, byte* dst, std::size_t bytes);
  std::uint64_t packets_sent(int peer) { return signals(peer).packets_sent; }
  std::uint64_t packets_taken(int peer) { return signals(peer).packets_taken; }

  // Packets as operands of a move pass through scratch of this rank, but for a single one from a peer.
  Dst packets_to(int peer, std::size_t) { return {scratch(2 * peer)}; }
  void commit_packets(int peer, std::size_t bytes) { put_packets(peer, scratch(2 * peer), bytes); }
  // A single packet is read where it lies: it stays until the program releases it.
  const byte* packets_from(int peer, std::size_t bytes) {
    if (bytes > 0 && bytes <= kPacketBytes) return take_packet(peer).payload;
    take_packets(peer, scratch(2 * peer + 1), bytes);
    return scratch(2 * peer + 1);
  }

  // Return the place of piece `index` to the peer, and of that from the peer: a cell, or a part of the ring
  // to the peer (in its memory) or from it (in this rank's), where each piece begins behind the one before.
  byte* chunk_at(int peer, std::uint32_t index, std::size_t bytes) {
    Counters& c = signals(peer);
    host::own(line(peer, Slot::chunk, rank_));
    if (c.put.index != index) choose_way(peer, c.put, bytes);
    c.put.bytes = bytes;
    if (c.put.cell != host::Cells::kNone) {
      c.put.index = index;
      return c.put.at = cells_.room(c.put.cell, bytes);
    }
    c.put.at = chunk(peer, rank_, c.put, index, bytes);
    if (c.put.end > c.ring_filled) fill_ring(peer, c);
    return c.put.at;
  }
  const byte* chunk_from(int peer, std::uint32_t index, std::size_t bytes) {
    if (own_ways_ && bytes >= host::kTimedFrom && host::ChunkWay::timed(awaited(peer, Slot::chunk)))
      taking_ = {.peer = peer, .watch = host::Stopwatch(bytes)};
    Placed& taken = signals(peer).taken;
    if (taken.cell == host::Cells::kNone) return chunk(rank_, peer, taken, index, bytes);
    taken.index = index;
    return cells_.at(taken.cell);
  }
  // Keeps the cell of the last piece from the peer, which has been taken.
  void chunk_released(int peer) {
    if (const std::uint8_t cell = signals(peer).taken.cell; cell != host::Cells::kNone) cells_.keep(cell);
  }

  // Return arrays of size() operands, for the next move.
  const byte** sources() { return sources_.data(); }
  Dst* destinations() { return destinations_.data(); }

 private:
  struct Placed {                            // the last piece to a peer or from it
    std::uint32_t index = ~0u;               // there was none
    std::size_t begin = 0, end = 0;          // of the last one in the ring
    std::uint8_t cell = host::Cells::kNone;  // that it lies in
    // The others are of pieces to a peer.
    bool around = false;  // the cache
    byte* at = nullptr;
    std::size_t bytes = 0;
  };
  struct Counters {
    host::Line *packets_to, *packets_from;  // rings: the peer's of this rank's packets, and the other one
    Placed put, taken;
    std::size_t ring_filled = 0;  // bytes of the ring to the peer that have memory
    std::uint32_t signalled[kSlots] = {}, awaited[kSlots] = {};
    std::uint64_t packets_sent = 0, packets_taken = 0;
    // The next packets to and from the peer whose places have no memory; kNone: all have.
    std::uint64_t filled_to = 0, filled_from = 0;
  };
  struct Timed {  // the piece that is written or taken now, if it is timed
    int peer = -1;
    host::Stopwatch watch{0};
    float ended() {
      peer = -1;
      return watch.ended();
    }
  };
  static constexpr std::size_t kMostOwned = std::size_t{16} << 10, kMostLetGo = 1024;
  static constexpr std::size_t kReadFrom = std::size_t{4} << 20;
  static constexpr int kMostYields = 64;
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  static constexpr std::size_t kScratch = kPackets / 2 * kPacketBytes;

  Counters& signals(int peer) { return counters_[static_cast<std::size_t>(peer)]; }
  host::Line* lines(int owner) {
    return reinterpret_cast<host::Line*>(bases_[static_cast<std::size_t>(owner)] + layout_.lines);
  }
  host::Line* line(int owner, Slot slot, int writer) {
    return lines(owner) + static_cast<std::ptrdiff_t>(slot) * size() + writer;
  }
  host::Line* packets(int owner, int writer) {
    return reinterpret_cast<host::Line*>(bases_[static_cast<std::size_t>(owner)] + layout_.packets) +
           static_cast<std::ptrdiff_t>(writer) * kPackets;
  }
  static host::Line& packet(host::Line* ring, std::uint64_t number) { return ring[number % kPackets]; }
  // Waits for the next packet of the peer. It stays until the peer has credit for its place.
  host::Line& take_packet(int peer);
  // Take memory for what comes next. The reader of a ring has it from its writer: to map pages that are there
  // as they are read costs less than to ask for them.
  void fill_packets(int owner, host::Line* ring, std::uint64_t& filled);
  void fill_ring(int peer, Counters& c);
  // Chooses how the next piece to the peer goes, and where.
  void choose_way(int peer, Placed& next, std::size_t bytes) {
    next.around = false;
    next.cell = host::Cells::kNone;
    if (cells_used_ && !cells_.empty() && peer != rank_) next.cell = cells_.take();
    else if (bytes >= host::kStreamFrom)
      next.around = own_ways_ && bytes >= host::kTimedFrom ? own_way(peer, bytes) : around_;
  }
  // Asks for the lines of the next piece to the peer, if it is like the last one: the reader has given them
  // up by then. Those of a large piece would leave the first-level cache again.
  void own_next(int peer) {
    const Placed& last = signals(peer).put;
    if (last.bytes > kMostOwned || last.around || last.cell != host::Cells::kNone) return;
    const std::size_t bytes = last.end - last.begin;
    const std::size_t whole = ring_bytes(peer, rank_, bytes), begin = after(last, bytes, whole);
    byte* const next = ring(peer, rank_) + (begin + bytes > whole ? 0 : begin);
    for (std::size_t at = 0; at < bytes; at += sizeof(host::Line)) host::own(next + at);
  }
  // Returns the fewest bytes of a ring in which pieces begin pages.
  std::size_t paged_ring_bytes() const { return (kChunks + 1) * (layout_.chunk_bytes + host::kPage); }
  // Returns where a piece begins that comes after another in a ring of `whole` bytes: on a page of its own
  // (host::kPaged), if the ring still has room for all pieces that may be under way.
  std::size_t after(const Placed& last, std::size_t bytes, std::size_t whole) const {
    const bool paged = bytes >= host::kPaged && whole >= paged_ring_bytes();
    return paged ? host::behind(last.end, bytes) : last.end;
  }
  // Returns the bytes of a ring that a piece of `bytes` goes around. Eight pieces may be under way, and to go
  // around takes nine of the largest at least: so none meets another, whatever their sizes.
  std::size_t ring_bytes(int owner, int writer, std::size_t bytes) const {
    if (owner == writer) return layout_.own_ring_bytes;
    return bytes >= kLarge ? large_ring_bytes_ : layout_.ring_bytes;
  }
  // The owner's ring from itself is the first one.
  byte* ring(int owner, int writer) {
    byte* const first = bases_[static_cast<std::size_t>(owner)] + layout_.chunks;
    if (writer == owner) return first;
    const auto before = static_cast<std::size_t>(writer < owner ? writer : writer - 1);
    return first + layout_.own_ring_bytes + before * layout_.ring_room;
  }
  byte* chunk(int owner, int writer, Placed& last, std::uint32_t index, std::size_t bytes) {
    byte* const ring = this->ring(owner, writer);
    const std::size_t whole = ring_bytes(owner, writer, bytes);
    if (last.index != index) last.index = index, last.begin = after(last, bytes, whole);
    if (last.begin + bytes > whole) last.begin = 0;
    last.end = round_up(last.begin + bytes, sizeof(host::Line));
    return ring + last.begin;
  }
  static bool any_far(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs) {
    for (int d = 0; d < n_dsts; ++d)
      if (host::is_far(dsts[d].at)) return true;
    for (int s = 0; s < n_srcs; ++s)
      if (host::is_far(srcs[s])) return true;
    return false;
  }
  bool own_way(int peer, std::size_t bytes);
  void end_writing();
  void end_taking();
  byte* scratch(int index) { return scratch_.get() + static_cast<std::size_t>(index) * kScratch; }
  // Returns the upper bits of a packet's flag, its lap around the ring. The lower bits are its mark.
  static std::uint32_t lap_of(std::uint64_t packet) {
    return static_cast<std::uint32_t>(packet / kPackets + 1) * (kMarks + 1);
  }
  // Returns the place of a chunk's mark. Marks lie with the signal, one for each chunk of the ring.
  static std::uint32_t& mark_of(host::Line& line, std::uint32_t chunk) {
    static_assert(kChunks * sizeof(std::uint32_t) <= kPacketBytes);
    return reinterpret_cast<std::uint32_t*>(line.payload)[chunk % kChunks];
  }
  // Polls. Returns whether `come` has become true; else this rank may have moved from the peer's core.
  template <class Come>
  bool polled(int peer, const Come& come);
  // Waits for the peer's next signal in a slot, or for something else that ends the wait too.
  template <class Come>
  void await_either(int peer, Slot slot, const Come& come);
  // Returns whether the next packet of the peer has come.
  bool has_packet(int peer);
  // Gives the core away within a wait, and counts that.
  void rest(host::Line& line, std::uint32_t expected, Clock::duration elapsed, int& rests);
  // Returns whether a wait for a chunk skips a packet of the peer's, or the other way around: the peer makes
  // another call.
  bool missed(int peer, Slot slot, std::uint32_t unit);
  // unit: the flag's increase for one epoch, in errors.
  void await(host::Line& line, std::uint32_t expected, int peer, Slot slot, std::uint32_t unit = 1);

  int rank_;
  Layout layout_;
  std::vector<std::shared_ptr<Segment>> segments_;
  host::Far far_;
  bool far_operands_ = false;
  std::size_t large_ring_bytes_ = layout_.ring_bytes;  // of large pieces
  const bool lets_go_ = host::lets_go();
  bool around_ = true, own_ways_ = false, cells_used_ = true;
  std::vector<host::ChunkWay> ways_;  // by peer
  Timed writing_, taking_;
  const host::Patience usual_patience_;
  host::Patience patience_ = usual_patience_;
  bool beside_ = false;
  int yields_ = kMostYields;  // of a wait beside it that may follow a long one
  Watch watch_;
  const host::Kernels& kernels_;
  host::Copy copy_ = kernels_.copy;
  host::Reduce reduce_ = nullptr;
  host::Requantise requantise_ = nullptr;
  bool average_ = false;
  std::size_t element_bytes_ = 1;
  std::uint32_t mark_ = 0;
  std::vector<byte*> bases_;
  std::vector<Counters> counters_;
  host::Cells cells_;
  std::unique_ptr<byte[]> scratch_;  // has no pages until packets are operands of a move
  std::vector<const byte*> sources_;
  std::vector<Dst> destinations_;
};

}  // namespace unisono
