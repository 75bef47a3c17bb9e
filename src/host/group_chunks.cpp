// How a group's chunks go: whether there is memory for them, and whether they pay through the cache or
// around.
#include <algorithm>
#include <chrono>
#include <vector>

#include "base/deadline.hpp"
#include "core/allocation.hpp"
#include "host/chunk_way.hpp"
#include "host/group.hpp"
#include "lane/channel.hpp"

namespace unisono {
namespace {

constexpr std::size_t kMeasuredBytes = 16 << 10;  // of a piece when chunks are measured
constexpr int kManyRounds = 20, kFewRounds = 7;
// Chunks are timed again after so many bytes: a virtual machine's cores may have come nearer, or gone apart.
// Large calls count more while chunks go through the cache. Between cores that have gone apart they take up
// to five times as long so, and to time the way takes less than around the cache.
constexpr std::size_t kTimedFor = std::size_t{256} << 20, kOfACall = 4096;
constexpr std::size_t kLarge = std::size_t{64} << 10, kSooner = 4;
// A later group first times them when its calls have taken about as long as the timing takes.
constexpr std::size_t kFirstTimedAfter = std::size_t{16} << 20;

}  // namespace

std::atomic<CacheWay> Group::measured_ = CacheWay::unknown;

void Group::will_move(std::size_t bytes, Algorithm by) {
  moved_ += kOfACall + bytes * (cached_ && bytes >= kLarge ? kSooner : 1);
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
void Group::choose_chunks(bool first) {
  moved_ = 0;
  const ChunkTimes times = time_chunks(first && !patience_.crowded ? kManyRounds : kFewRounds);
  double through = 0, around = 0;
  for (const ChunkTimes& one : exchange(times)) through += one.through, around += one.around;
  cached_ = through <= host::kAroundPays * around;
  lane_->stream_chunks(!cached_);
  timing_ = Timing::done;
  measured_ = cached_ ? CacheWay::through : CacheWay::around;
}

// Times a piece to a peer and one from a peer, by chunks written through the cache and around it. Stores into
// the cache first fetch the lines from the other core's cache. Only a measurement tells how that compares
// with the trip through memory. Only a rank's own copies are timed: its waits may begin on one core, and
// waking a sleeper takes longer than a piece. Before the way through the cache is timed, pieces go once
// around the ring by it, unless they have gone that way so far: the ring must be in the caches that it will
// be in.
Group::ChunkTimes Group::time_chunks(int rounds) {
  ChunkChannel channel(*lane_);
  const int next = peer_at(*lane_, 1), last = peer_at(*lane_, size_ - 1);
  const std::vector<byte> sent(std::min(lane_->chunk_bytes(), kMeasuredBytes));
  std::vector<byte> received(sent.size());
  auto copy = [&](Dst to, const byte* from) {
    const auto began = Clock::now();
    lane_->move(&to, 1, &from, 1, sent.size());
    return std::chrono::duration<double, std::micro>(Clock::now() - began).count();
  };
  auto median = [&](bool around, int before) {
    lane_->stream_chunks(around);
    std::vector<double> took;
    for (int round = -before; round < rounds; ++round) {
      const double put = copy(channel.reserve(next, sent.size()), sent.data());
      channel.commit(next, sent.size());
      const double take = copy({received.data()}, channel.arrived(last, received.size()));
      channel.release(last);
      if (round >= 0) took.push_back(put + take);
    }
    std::nth_element(took.begin(), took.begin() + rounds / 2, took.end());
    return took[static_cast<std::size_t>(rounds / 2)];
  };
  const auto lap = static_cast<int>(lane_->ring_bytes() / sent.size());
  const bool laps = timing_ == Timing::due || !cached_;
  const double through = median(false, !laps ? 0 : patience_.crowded ? kFewRounds : lap);
  return {through, median(true, 0)};
}

}  // namespace unisono
