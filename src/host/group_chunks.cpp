// How a group's pieces go: whether there is memory for chunks, whether they pay through the cache or around,
// whether large ones are copied abreast, and whether the kernel's copies take less.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "base/deadline.hpp"
#include "core/allocation.hpp"
#include "host/chunk_way.hpp"
#include "host/group.hpp"
#include "lane/channel.hpp"

namespace unisono {
namespace {

constexpr std::size_t kMeasuredBytes = 16 << 10;  // of a piece when chunks are measured
constexpr std::size_t kFarBytes = 64 << 10;       // of a copy by the kernel when that is measured
constexpr int kManyRounds = 20, kFewRounds = 7;
// A small part of a ring stays in the caches between calls that use these for other things. On some
// processors large pieces take twice as long there (docs/notes/host-rings.md).
constexpr double kConfinedPays = 1.1;
// Calls gain more from cells than pieces that are timed (docs/notes/host-rings.md).
constexpr double kCellsPay = 1.3;
// A later group first times them when its calls have taken about as long as the timing takes.
constexpr std::size_t kFirstTimedAfter = std::size_t{16} << 20;

}  // namespace

std::atomic<CacheWay> Group::measured_ = CacheWay::unknown;
std::atomic<bool> Group::measured_cells_ = true;
std::atomic<KernelCopies> Group::found_ = KernelCopies::unknown;
std::atomic<bool> Group::abreast_ = false;

void Group::see_to_chunks(Algorithm by) {
  const bool first = timing_ == Timing::due && !is_packets(by) && moved_ >= kFirstTimedAfter;
  if (ring_bytes_ > 0 && (first || !(is_packets(by) || is_direct(by)))) {
    AllocationAgreement agreement(*this, ring_bytes_, "memory of rings");
    agreement.attempt([&] { check_room(ring_bytes_, size_); });
    agreement.meet();
    ring_bytes_ = 0;
  }
  if (first || (timing_ == Timing::done && moved_ >= kTimedFor && !patience_.crowded)) choose_chunks(first);
}

// All ranks choose alike, since plans depend on the choice: the sums over the ranks decide.
void Group::choose_chunks(bool first, bool looks_at_kernel) {
  moved_ = 0;
  const bool in_full = first && !patience_.crowded;
  PieceTimes mine = time_chunks(in_full ? kManyRounds : kFewRounds);
  if (looks_at_kernel) mine.kernel = time_kernel();
  PieceTimes all{};
  for (const PieceTimes& one : exchange(mine))
    all.through += one.through, all.around += one.around, all.cells += one.cells, all.kernel += one.kernel;
  if (timing_ != Timing::fixed) {
    cached_ = all.through <= host::kAroundPays * all.around;
    timing_ = Timing::done;
    cells_ = all.cells < kCellsPay * std::min(all.through, all.around);
    measured_ = cached_ ? CacheWay::through : CacheWay::around;
    measured_cells_ = uses_cells();
  }
  if (in_full || (cached_ && !large_chosen_ && !patience_.crowded)) choose_large();
  lane_->stream_chunks(!cached_);
  lane_->use_cells(uses_cells());
  if (!looks_at_kernel) return;
  // An Intel Xeon has 1.3 to 2.4 times the kernel's time, a Zen 5 0.4 to 0.5 (measured;
  // docs/notes/host-kernel.md). Near 1 it does not matter: calls learn which way is the faster one.
  const bool fast = all.kernel < std::min({all.through, all.around, all.cells});
  found_ = kernel_copies_ = fast ? KernelCopies::fast : KernelCopies::slow;
}

std::size_t Group::measured_bytes() const { return std::min(lane_->chunk_bytes(), kMeasuredBytes); }

// Times pieces by rings, written through the cache and around it, and by cells. Stores into the cache first
// fetch the lines from the other core's cache. Only a measurement tells how that compares with the trip
// through memory. Before the way through the cache is timed, pieces go once around the ring by it, unless
// they have gone that way so far: the ring must be in the caches that it will be in.
Group::PieceTimes Group::time_chunks(int rounds) {
  int before = 0;
  if (timing_ == Timing::due || !cached_)
    before = patience_.crowded ? kFewRounds : static_cast<int>(lane_->ring_bytes() / measured_bytes());
  PieceTimes times;
  lane_->use_cells(false);
  lane_->stream_chunks(false);
  times.through = time_pieces(measured_bytes(), rounds, before);
  lane_->stream_chunks(true);
  times.around = time_pieces(measured_bytes(), rounds, 0);
  lane_->use_cells(true);
  times.cells = time_pieces(measured_bytes(), rounds, kFewRounds);
  return times;
}

// Chooses how large pieces go through the cache: abreast, of which peers need not know, and in a part of the
// ring. Between far cores, where chunks go around the cache, the part takes as long as the whole: so that is
// chosen when the cores have come near, and the copies are timed again.
void Group::choose_large() {
  if (lane_->chunk_bytes() < HostThread::kLarge) return;
  lane_->use_cells(uses_cells());
  const auto copies = time_large([this](bool abreast) { lane_->copy_abreast(abreast); }, 1);
  abreast_ = copies[true] < copies[false];
  lane_->copy_abreast(abreast_);
  large_chosen_ = cached_;
  if (!cached_) return;
  lane_->use_cells(false);
  const auto mine = time_large([this](bool confined) { lane_->confine_large(confined); },
                               static_cast<int>(lane_->ring_bytes() / lane_->chunk_bytes()));
  double whole = 0, confined = 0;
  for (const auto& one : exchange(mine)) whole += one[false], confined += one[true];
  lane_->confine_large(confined < kConfinedPays * whole);
}

// Returns the times of the largest pieces without and with what `set` sets: of two medians each, since times
// vary. before: as of time_pieces.
std::array<double, 2> Group::time_large(const std::function<void(bool)>& set, int before) {
  lane_->stream_chunks(false);
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::array<double, 2> least{kNone, kNone};
  for (int turn = 0; turn < 2; ++turn)
    for (const bool with : {false, true}) {
      set(with);
      least[with] = std::min(least[with], time_pieces(lane_->chunk_bytes(), kFewRounds, before));
    }
  return least;
}

// Returns the median time in microseconds that a piece to a peer and one from a peer take, after some that
// are not timed. Only a rank's own copies are timed: its waits may begin on one core, and waking a sleeper
// takes longer than a piece.
double Group::time_pieces(std::size_t bytes, int rounds, int before) {
  ChunkChannel channel(*lane_);
  const int next = peer_at(*lane_, 1), last = peer_at(*lane_, size_ - 1);
  const std::vector<byte> sent(bytes);
  std::vector<byte> received(bytes);
  auto copy = [&](Dst to, const byte* from) {
    const auto began = Clock::now();
    lane_->move(&to, 1, &from, 1, bytes);
    return std::chrono::duration<double, std::micro>(Clock::now() - began).count();
  };
  std::vector<double> took;
  for (int round = -before; round < rounds; ++round) {
    const double put = copy(channel.reserve(next, bytes), sent.data());
    channel.commit(next, bytes);
    const double take = copy({received.data()}, channel.arrived(last, bytes));
    channel.release(last);
    if (round >= 0) took.push_back(put + take);
  }
  std::nth_element(took.begin(), took.begin() + rounds / 2, took.end());
  return took[static_cast<std::size_t>(rounds / 2)];
}

// Times the kernel's copy of what a peer has in small pages, and returns a piece's share. The memory is
// always the same: what the kernel adds to a copy tells machines apart, and not where the peer's lines lie.
double Group::time_kernel() {
  void* const own = ::mmap(nullptr, kFarBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own == MAP_FAILED)
    fail(FailureKind::resource, name(rank_) + " has no memory to time copies: free memory.");
  const std::unique_ptr<void, void (*)(void*)> kept(own, [](void* at) { ::munmap(at, kFarBytes); });
  ::madvise(own, kFarBytes, MADV_NOHUGEPAGE);
  std::memset(own, 1, kFarBytes);
  std::vector<byte> received(kFarBytes);
  const int next = peer_at(*lane_, 1);
  const auto places = exchange(reinterpret_cast<std::uint64_t>(own));
  const byte* const from = reach(next, places[static_cast<std::size_t>(next)]);
  std::vector<double> took;  // a copy that fails: forever, and the call that needs it says why
  for (int round = -1; round < kFewRounds; ++round) {
    const auto began = Clock::now();
    const bool copied = copy(received.data(), from, kFarBytes);
    const std::chrono::duration<double, std::micro> time = Clock::now() - began;
    if (round >= 0) took.push_back(copied ? time.count() : std::numeric_limits<double>::infinity());
  }
  exchange(0);  // all have copied what this rank gives back
  std::nth_element(took.begin(), took.begin() + kFewRounds / 2, took.end());
  return took[kFewRounds / 2] * static_cast<double>(measured_bytes()) / kFarBytes;
}

}  // namespace unisono
