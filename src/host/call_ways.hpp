// Which way large calls go: by the kernel's copies, or through chunks.
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
// from the writer's (docs/notes/host-kernel.md). A rank learns from its own calls, and tells its peers what
// it would rather do. To ask each other takes a fifth as long as a call of 16 KiB through chunks. So ranks
// that have agreed on chunks hold to them for some calls, without asking.
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
    const double saved = of_held_ > 0 ? of_held_ - of_asked_ : of_chunks_ - of_kernel_ - of_asking_;
    return static_cast<std::int32_t>(std::clamp(saved, -kMost, kMost));
  }
  // Does not count the call that has begun: it could go one way alone, as with symmetric memory, and would
  // use up a try.
  void leave_out() { --calls_; }
  // Learns from a call that has ended: its time since its ranks met, and how long they have asked before.
  // waits: the rank waits for data. Else the call is counted, and its time tells nothing.
  void took(bool by_chunks, Clock::duration time, Clock::duration asking = {}, bool waits = true) {
    went(by_chunks);
    if (!tries_) usual_by_chunks_ = by_chunks;
    if (!waits) return;
    learn(of_asking_, asking);
    if (alike_ < kUnlike) return;
    const bool anew = tries_ && alike_ == kUnlike;  // what is known of that way is as old as the last try
    learn(by_chunks ? of_chunks_ : of_kernel_, time, anew);
    if (!by_chunks) learn(of_asked_, asking + time, anew);
  }
  // Learns from a held call whose data goes one way, to this rank. Its pieces may lie there before it begins:
  // the faster way of calls back to back is not always that of calls whose ranks begin together. The time
  // that is kept follows both up and down, since a caller changes from one to the other.
  void took_held(Clock::duration time) {
    if (alike_ < 2 * kUnlike) return;  // the receiver has waited since the ranks asked each other
    const auto now = static_cast<double>(time.count());
    of_held_ =
        2 * now < of_held_ || of_held_ == 0 ? now : of_held_ + (std::min(now, 2 * of_held_) - of_held_) / 4;
  }

  // Returns for how many calls ranks may hold to chunks, if the call that has begun goes through them.
  // one_way: data goes to one rank, which learns from held calls. So ranks also hold for some when they have
  // tried chunks.
  std::uint32_t holds(bool one_way = false) const {
    constexpr std::uint32_t kMost = 31, kTried = 8;
    if (one_way && tries_ && calls_ > kEarly && calls_ % period() == kUnlike) return kTried;
    return tries_ ? 0 : std::min(kMost, (period() - calls_ % period()) % period());
  }
  void hold(std::uint32_t calls) { held_ = calls; }
  // Holds to chunks if a call of all ranks, which have asked, goes through them. symmetric: all its buffers
  // that peers reach are symmetric memory. ever: the communicator has such memory. A held call would not use
  // it, so that ranks then hold after a row of calls without it alone. one_way: as of `holds`.
  void hold(bool symmetric, bool ever, bool by_chunks, bool one_way = false) {
    constexpr std::uint32_t kRow = 16;
    plain_ = symmetric ? 0 : plain_ + 1;
    held_ = by_chunks && plain_ >= (ever ? kRow : 1) ? holds(one_way) : 0;
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
    constexpr std::uint32_t kTries = 256, kEarlyTries = 16;  // calls from try to try; at first
    return calls_ < kEarly ? kEarlyTries : kTries;
  }
  void went(bool by_chunks) {
    alike_ = by_chunks == last_by_chunks_ ? alike_ + 1 : 1;
    last_by_chunks_ = by_chunks;
  }
  // Follows times down fast and up slowly, to about the fastest fifth: a rank that is delayed takes longer,
  // many times if its thread loses the core. Not the least: of the way that most calls go, that would be of
  // more calls.
  static void learn(double& usual, Clock::duration time, bool anew = false) {
    const auto now = static_cast<double>(time.count());
    if (usual == 0 || anew) usual = now;
    usual += now < usual ? (now - usual) / 2 : (std::min(now, 1.5 * usual) - usual) / 8;
  }

  // The first calls of a way are unlike those that follow: nothing that they touch is in the cache yet.
  static constexpr std::uint32_t kUnlike = 3;
  static constexpr std::uint32_t kEarly = 64;  // calls in which all is new

  std::uint32_t calls_ = 0, alike_ = 0, held_ = 0, plain_ = 0;
  // The same on every rank in calls of all ranks, and at both ends that exchange with each other alone. Of
  // messages with tags the receiver alone has them.
  bool tries_ = false, last_by_chunks_ = false, usual_by_chunks_ = false;
  double of_chunks_ = 0, of_kernel_ = 0, of_asking_ = 0;  // nanoseconds
  double of_held_ = 0, of_asked_ = 0;                     // of whole calls: held, and by the kernel
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
