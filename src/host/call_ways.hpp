// Which way large calls go where the kernel's copies are fast: by these copies, or through chunks.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "base/deadline.hpp"
#include "unisono/types.hpp"

namespace unisono::host {

// Learns the faster way of the calls of a kind from the times of both. It is the caller who decides which one
// that is: a peer reads an input that it has read before from its own cache, and one that was written since
// from the writer's (docs/notes/host.md). A rank learns from its own calls, and tells its peers what it would
// rather do. To ask each other takes a fifth as long as a call of 16 KiB through chunks. So ranks that have
// agreed on chunks hold to them for some calls, without asking.
class CallWay {
 public:
  // Returns the nanoseconds that the kernel's copies save this rank in the next call. The call had better go
  // through chunks if the sum over its ranks is negative. Now and then all ranks try the way that the last
  // calls have not gone.
  std::int32_t next() {
    constexpr double kMost = 1e9;
    tries_ = calls_ % period() < kUnlike;
    ++calls_;
    if (tries_) return usual_by_chunks_ ? 1 : -1;
    if (of_chunks_ == 0 || of_kernel_ == 0) return 0;
    return static_cast<std::int32_t>(std::clamp(of_chunks_ - of_kernel_ - of_asking_, -kMost, kMost));
  }
  // Learns from a call that has ended: its time since its ranks met, and how long they have asked before.
  void took(bool by_chunks, Clock::duration time, Clock::duration asking = {}) {
    went(by_chunks);
    if (!tries_) usual_by_chunks_ = by_chunks;
    learn(of_asking_, asking);
    if (alike_ >= kUnlike) learn(by_chunks ? of_chunks_ : of_kernel_, time);
  }

  // Returns for how many calls ranks may hold to chunks, if the call that has begun goes through them.
  std::uint32_t holds() const {
    constexpr std::uint32_t kMost = 31;
    return tries_ ? 0 : std::min(kMost, (period() - calls_ % period()) % period());
  }
  void hold(std::uint32_t calls) { held_ = calls; }
  // Holds to chunks if a call of all ranks, which have asked, goes through them. symmetric: all its buffers
  // that peers reach are symmetric memory. ever: the communicator has such memory. A held call would not use
  // it, so that ranks then hold after a row of calls without it alone.
  void hold(bool symmetric, bool ever, bool by_chunks) {
    constexpr std::uint32_t kRow = 16;
    plain_ = symmetric ? 0 : plain_ + 1;
    held_ = by_chunks && plain_ >= (ever ? kRow : 1) ? holds() : 0;
  }
  // Returns whether the next call goes through chunks as agreed before, and counts it.
  bool held() {
    if (held_ == 0) return false;
    --held_;
    ++calls_;
    went(true);
    return true;
  }

 private:
  std::uint32_t period() const {
    constexpr std::uint32_t kTries = 256, kEarly = 64, kEarlyTries = 16;  // calls from try to try; at first
    return calls_ < kEarly ? kEarlyTries : kTries;
  }
  void went(bool by_chunks) {
    alike_ = by_chunks == last_by_chunks_ ? alike_ + 1 : 1;
    last_by_chunks_ = by_chunks;
  }
  // A delay of a rank adds to a time, and nothing takes from it. A thread that loses its core takes many
  // times as long.
  static void learn(double& usual, Clock::duration time) {
    const auto now = static_cast<double>(time.count());
    usual = usual == 0 || now < usual ? now : usual + (std::min(now, 2 * usual) - usual) / 16;
  }

  // The first calls of a way are unlike those that follow: nothing that they touch is in the cache yet.
  static constexpr std::uint32_t kUnlike = 3;

  std::uint32_t calls_ = 0, alike_ = 0, held_ = 0, plain_ = 0;
  // The same on every rank in calls of all ranks, and at both ends that exchange with each other alone. Of
  // messages with tags the receiver alone has them.
  bool tries_ = false, last_by_chunks_ = false, usual_by_chunks_ = false;
  double of_chunks_ = 0, of_kernel_ = 0, of_asking_ = 0;
};

class CallWays {
 public:
  // Returns that of calls of a collective whose bytes have as many bits.
  CallWay& of(Collective collective, std::size_t bytes) {
    const std::size_t kind = static_cast<std::size_t>(collective) * kSizes + size_of_kind(bytes);
    if (kind >= ways_.size()) ways_.resize(kind + 1);
    return ways_[kind];
  }
  static constexpr std::size_t kSizes = 64;
  static std::size_t size_of_kind(std::size_t bytes) { return std::bit_width(bytes) % kSizes; }

 private:
  std::vector<CallWay> ways_;
};

// The ways of messages without tags between this rank and another. Both ends count them alike.
class PairWays {
 public:
  // Returns that of the messages of an all_to_all_v between both, of which the larger one has those bytes.
  CallWay& both(std::size_t bytes) { return from_.of(Collective::all_to_all_v, bytes); }
  // Returns that of messages of about that size from the other rank.
  CallWay& from(std::size_t bytes) { return from_.of(Collective::recv, bytes); }
  // Returns how many messages of about that size go to the other rank through chunks, before it is asked.
  std::uint32_t& held_to(std::size_t bytes) { return held_to_[CallWays::size_of_kind(bytes)]; }

 private:
  CallWays from_;
  std::array<std::uint32_t, CallWays::kSizes> held_to_{};
};

}  // namespace unisono::host
