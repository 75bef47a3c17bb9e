// Which way large calls go where the kernel's copies are fast: by these copies, or through chunks.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "base/deadline.hpp"
#include "unisono/types.hpp"

namespace unisono::host {

// Learns the faster way of the calls of a kind from the times of both. It is the caller who decides which one
// that is: a peer reads an input that it has read before from its own cache, and one that was written since
// from the writer's (docs/notes/host.md). A rank learns from its own calls, and tells its peers what it would
// rather do.
class CallWay {
 public:
  // Returns whether the next call had better go through chunks. Now and then all ranks try the way that the
  // last calls have not gone.
  bool next() {
    constexpr std::uint32_t kTries = 128, kEarly = 64, kEarlyTries = 16;  // calls from try to try; at first
    tries_ = calls_ % (calls_ < kEarly ? kEarlyTries : kTries) < kUnlike;
    ++calls_;
    return tries_ ? !usual_by_chunks_ : of_chunks_ > 0 && of_chunks_ < of_kernel_;
  }
  // Learns from a call that has ended: its time since its ranks met.
  void took(bool by_chunks, Clock::duration time) {
    alike_ = by_chunks == last_by_chunks_ ? alike_ + 1 : 1;
    last_by_chunks_ = by_chunks;
    if (!tries_) usual_by_chunks_ = by_chunks;
    if (alike_ < kUnlike) return;
    const auto now = static_cast<double>(time.count());
    double& usual = by_chunks ? of_chunks_ : of_kernel_;
    // what delays a rank adds to a time, and nothing takes from it; a thread that loses its core takes many
    // times as long
    usual = usual == 0 || now < usual ? now : usual + (std::min(now, 2 * usual) - usual) / 16;
  }

 private:
  // The first calls of a way are unlike those that follow: nothing that they touch is in the cache yet.
  static constexpr std::uint32_t kUnlike = 3;

  std::uint32_t calls_ = 0, alike_ = 0;
  // The same on every rank in calls of all ranks, and at both ends that exchange with each other alone. Of
  // messages with tags the receiver alone has them.
  bool tries_ = false, last_by_chunks_ = false, usual_by_chunks_ = false;
  double of_chunks_ = 0, of_kernel_ = 0;
};

class CallWays {
 public:
  // Returns that of calls of a collective whose bytes have as many bits.
  CallWay& of(Collective collective, std::size_t bytes) {
    constexpr std::size_t kSizes = 64;
    const std::size_t kind = static_cast<std::size_t>(collective) * kSizes + std::bit_width(bytes) % kSizes;
    if (kind >= ways_.size()) ways_.resize(kind + 1);
    return ways_[kind];
  }

 private:
  std::vector<CallWay> ways_;
};

}  // namespace unisono::host
