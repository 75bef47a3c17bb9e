#include "host/host_thread.hpp"

#include <algorithm>

#include "base/deadline.hpp"

namespace unisono {

namespace {

// Returns the least bytes of a ring. A piece more than are under way has room, since none goes around the
// end.
std::size_t least_ring(std::size_t chunk) { return (HostThread::kChunks + 1) * chunk; }

// Returns the bytes of a peer's ring in which a rank's rings have `of_a_rank` bytes in all.
std::size_t ring_from_peer(std::size_t of_a_rank, std::size_t ranks, std::size_t chunk) {
  const std::size_t peers = std::max<std::size_t>(ranks - 1, 1);
  return std::max(least_ring(chunk), round_up(of_a_rank / peers, 4096));
}

constexpr std::size_t kFewestCells = 2;  // of a rank

std::vector<byte*> bases_of(const std::vector<std::shared_ptr<Segment>>& segments) {
  std::vector<byte*> bases;
  for (const auto& segment : segments) bases.push_back(segment->data());
  return bases;
}

// Returns where each rank's cells lie.
std::vector<byte*> cells_in(std::vector<byte*> bases, const HostThread::Layout& layout) {
  for (byte*& base : bases) base += layout.cells;
  return bases;
}

}  // namespace

HostThread::Layout::Layout(int n, std::size_t chunk, std::size_t header_bytes)
    : ranks(n),
      chunk_bytes(chunk),
      own_ring_bytes(least_ring(chunk)),
      ring_room(ring_from_peer(kMostRings, static_cast<std::size_t>(n), chunk)),
      ring_bytes(ring_room),
      num_cells(host::Cells::of_rank(static_cast<std::size_t>(n), kFewestCells)),
      cell_bytes(round_up(chunk, host::kPage)),
      lines(round_up(header_bytes, 2 * sizeof(host::Line))) {
  const auto peers = static_cast<std::size_t>(n);
  packets = round_up(lines + peers * kSlots * sizeof(host::Line), 4096);
  chunks = packets + peers * kPackets * sizeof(host::Line);
  cells = round_up(chunks + own_ring_bytes + (peers - 1) * ring_room, host::kPage);
  bytes = cells + num_cells * cell_bytes;
}

void HostThread::Layout::fit_rings(std::size_t cache) {
  ring_bytes =
      ring_from_peer(2 * std::min(cache, kMostRings / 2), static_cast<std::size_t>(ranks), chunk_bytes);
}

HostThread::HostThread(int rank, const Layout& layout, std::vector<std::shared_ptr<Segment>> segments,
                       host::Far far, const host::Patience& patience, Watch watch)
    : rank_(rank),
      layout_(layout),
      segments_(std::move(segments)),
      far_(std::move(far)),
      ways_(segments_.size()),
      usual_patience_(patience),
      watch_(std::move(watch)),
      kernels_(host::kernels()),
      bases_(bases_of(segments_)),
      counters_(segments_.size()),
      cells_(rank, cells_in(bases_, layout), layout.num_cells, layout.cell_bytes,
             [this](int owner, const byte* part, std::size_t bytes) {
               watch_.begin_ring(bytes);
               watch_.fill(owner, part, bytes);
             }),
      scratch_(new byte[2 * segments_.size() * kScratch]),
      sources_(segments_.size()),
      destinations_(segments_.size()) {
  for (int peer = 0; peer < size(); ++peer) {
    signals(peer).packets_to = packets(peer, rank_);
    signals(peer).packets_from = packets(rank_, peer);
  }
}

void HostThread::fill_packets(int owner, host::Line* ring, std::uint64_t& filled) {
  constexpr std::size_t kPage = 4096;
  watch_.fill(owner, reinterpret_cast<const byte*>(&packet(ring, filled)), kPage);
  filled += kPage / sizeof(host::Line);
  if (filled == kPackets) filled = kNone;
}

void HostThread::fill_ring(int peer, Counters& c) {
  constexpr std::size_t kAtOnce = std::size_t{16} << 10;
  const std::size_t whole = ring_bytes(peer, rank_, 0), before = c.ring_filled;
  if (before == 0) watch_.begin_ring(whole);
  c.ring_filled = std::min(whole, round_up(c.put.end, kAtOnce));
  watch_.fill(peer, ring(peer, rank_) + before, c.ring_filled - before);
}

// The credit for a timed piece, which says how long its reader took, has come before the next timed one.
bool HostThread::own_way(int peer, std::size_t bytes) {
  host::ChunkWay& way = ways_[static_cast<std::size_t>(peer)];
  const std::uint32_t piece = signalled(peer, Slot::chunk) + 1;
  if (!host::ChunkWay::timed(piece)) return way.around();
  host::Taken taken;
  std::memcpy(&taken, line(rank_, Slot::chunk_credit, peer)->payload, sizeof taken);
  way.learn(taken);
  writing_ = {.peer = peer, .watch = host::Stopwatch(bytes)};
  return way.begin(piece);
}

void HostThread::end_writing() {
  host::ChunkWay& way = ways_[static_cast<std::size_t>(writing_.peer)];
  way.wrote(writing_.ended());
}

void HostThread::end_taking() {
  const int peer = taking_.peer;
  const host::Taken taken{awaited(peer, Slot::chunk), taking_.ended()};
  std::memcpy(line(peer, Slot::chunk_credit, rank_)->payload, &taken, sizeof taken);
}

void HostThread::put_packets(int peer, const byte* src, std::size_t bytes) {
  Counters& c = signals(peer);
  const std::uint64_t first = c.packets_sent;
  for (; bytes > 0; ++c.packets_sent) {
    if (c.packets_sent == c.filled_to) fill_packets(peer, c.packets_to, c.filled_to);
    host::Line& line = packet(c.packets_to, c.packets_sent);
    const std::size_t length = std::min(bytes, kPacketBytes);
    if (length == kPacketBytes) std::memcpy(line.payload, src, kPacketBytes);
    else std::memcpy(line.payload, src, length);
    host::raise(line, lap_of(c.packets_sent) | mark_, patience_.crowded);
    src += length;
    bytes -= length;
  }
  for (std::uint64_t next = c.packets_sent; next < 2 * c.packets_sent - first; ++next)
    host::own(&packet(c.packets_to, next));
}

host::Line& HostThread::take_packet(int peer) {
  Counters& c = signals(peer);
  if (c.packets_taken == c.filled_from) fill_packets(rank_, c.packets_from, c.filled_from);
  host::Line& line = packet(c.packets_from, c.packets_taken);
  const std::uint32_t lap = lap_of(c.packets_taken);
  if (!host::reached(line, lap)) await(line, lap, peer, Slot::packet_credit, kMarks + 1);
  if ((line.flag.load(std::memory_order_relaxed) & kMarks) != mark_) watch_.differs(peer);
  ++c.packets_taken;
  return line;
}

void HostThread::take_packets(int peer, byte* dst, std::size_t bytes) {
  while (bytes > 0) {
    const host::Line& line = take_packet(peer);
    const std::size_t length = std::min(bytes, kPacketBytes);
    if (length == kPacketBytes) std::memcpy(dst, line.payload, kPacketBytes);
    else std::memcpy(dst, line.payload, length);
    dst += length;
    bytes -= length;
  }
}

template <class Come>
bool HostThread::polled(int peer, const Come& come) {
  for (int i = 0; i < patience_.spins; ++i) {
    if (come()) return true;
    host::pause();
  }
  if (!beside_) watch_.waits(peer);
  return false;
}

template <class Come>
void HostThread::await_either(int peer, Slot slot, const Come& come) {
  host::Line& line = *this->line(rank_, slot, peer);
  const std::uint32_t expected = awaited(peer, slot) + 1;
  int rests = 0;
  if (!polled(peer, come))
    wait_until(
        come, patience_.timeout, [&](Clock::duration elapsed) { rest(line, expected, elapsed, rests); },
        [&] { watch_.interrupted(peer, come); },
        [&] { watch_.late(peer, slot, expected, awaited(peer, slot)); });
}

bool HostThread::comes_first(int peer, Slot slot, int other, Slot others) {
  await_either(peer, slot, [&] { return reached(peer, slot) || reached(other, others); });
  return reached(peer, slot);
}

bool HostThread::packet_comes(int peer) {
  await_either(peer, Slot::chunk, [&] { return reached(peer, Slot::chunk) || has_packet(peer); });
  return !reached(peer, Slot::chunk);
}

bool HostThread::has_packet(int peer) {
  Counters& c = signals(peer);
  if (c.packets_taken == c.filled_from) fill_packets(rank_, c.packets_from, c.filled_from);
  return host::reached(packet(c.packets_from, c.packets_taken), lap_of(c.packets_taken));
}

// Ranks of one call agree on which of both comes first from a peer. What it puts there later is seen later.
bool HostThread::missed(int peer, Slot slot, std::uint32_t unit) {
  if (slot == Slot::packet_credit && unit > 1) return reached(peer, Slot::chunk);
  return slot == Slot::chunk && has_packet(peer);
}

void HostThread::await(host::Line& line, std::uint32_t expected, int peer, Slot slot, std::uint32_t unit) {
  const auto come = [&] { return host::reached(line, expected); };
  if (polled(peer, come)) return;
  int rests = 0;
  wait_until(
      come, patience_.timeout, [&](Clock::duration elapsed) { rest(line, expected, elapsed, rests); },
      [&] {
        if (missed(peer, slot, unit) && !come()) watch_.differs(peer);
        watch_.interrupted(peer, come);
      },
      [&] { watch_.late(peer, slot, expected / unit, line.flag.load(std::memory_order_relaxed) / unit); });
  if (!beside_) return;
  // A yield lasts a slice of the rank's own work. A wait has many of them where there is no work, and where
  // the kernel runs this thread again at once.
  if (patience_.yielding.count() == 0)
    yields_ = rests > yields_ ? std::max(yields_ / 2, 1) : std::min(2 * yields_, kMostYields);
  else if (rests > kMostYields) patience_.yielding = {};
}

void HostThread::rest(host::Line& line, std::uint32_t expected, Clock::duration elapsed, int& rests) {
  const bool yields = beside_ && rests++ < yields_;
  host::rest(line, expected, yields ? host::kYielding : patience_.yielding,
             yields ? Clock::duration{} : elapsed);
}

void HostThread::run_beside(bool beside) {
  beside_ = beside;
  patience_.spins = beside ? 0 : usual_patience_.spins;
  patience_.yielding = usual_patience_.yielding;
  patience_.crowded = usual_patience_.crowded || beside;
}

}  // namespace unisono
