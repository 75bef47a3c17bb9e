// The symmetric allocations of a communicator: which of a caller's pointers every rank reaches, and where.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/bytes.hpp"
#include "core/request.hpp"
#include "host/segment.hpp"

namespace unisono {

// An allocation is dropped when every rank has released it: until then a peer may name it, and every rank
// must find it.
class Symmetric {
 public:
  // segments: of all ranks, in rank order. Requires: ranks add the same allocations in the same order.
  std::uint32_t add(std::vector<std::shared_ptr<Segment>> segments, int rank) {
    std::scoped_lock lock(mutex_);
    Allocation& made = allocations_[++made_];
    made.own = segments[static_cast<std::size_t>(rank)];
    made.segments = std::move(segments);
    return made_;
  }
  void release(std::uint32_t allocation) {
    std::scoped_lock lock(mutex_);
    // a forked child keeps all allocations: it may still use those that the parent has released
    if (allocations_.at(allocation).own->release()) ++pending_;
  }
  // Drops the allocations that every rank has released. For the begin of each call: costs nothing if this
  // rank has released none that a peer still holds.
  void drop_released() {
    if (pending_ == 0) return;
    std::scoped_lock lock(mutex_);
    pending_ -= std::erase_if(allocations_, [](const auto& allocation) {
      const auto& segments = allocation.second.segments;
      return std::all_of(segments.begin(), segments.end(),
                         [](const auto& segment) { return segment->released(); });
    });
  }
  // Returns whether there ever was an allocation: the same on every rank, unlike whether there still is one.
  bool ever() const { return made_ > 0; }

  Place find(const byte* at, std::size_t bytes) const {
    std::scoped_lock lock(mutex_);
    for (const auto& [number, a] : allocations_) {
      const byte* base = a.own->data();
      const std::size_t size = a.own->bytes();
      if (at >= base && at <= base + size && bytes <= size - static_cast<std::size_t>(at - base))
        return {.allocation = number, .offset = static_cast<std::uint64_t>(at - base)};
    }
    return {};
  }
  // Returns where rank `rank` has `place`. Returns null if this rank has no such allocation, or if the
  // allocation ends before `bytes`: a peer's place is checked like any message.
  byte* resolve(const Place& place, int rank, std::size_t bytes) const {
    std::scoped_lock lock(mutex_);
    const auto found = allocations_.find(place.allocation);
    if (found == allocations_.end()) return nullptr;
    const Segment& segment = *found->second.segments[static_cast<std::size_t>(rank)];
    if (place.offset > segment.bytes() || bytes > segment.bytes() - place.offset) return nullptr;
    return segment.data() + place.offset;
  }

 private:
  struct Allocation {
    std::shared_ptr<Segment> own;
    std::vector<std::shared_ptr<Segment>> segments;
  };
  mutable std::mutex mutex_;              // buffers are given back from any thread
  std::atomic<std::size_t> pending_ = 0;  // allocations that this rank has released
  std::map<std::uint32_t, Allocation> allocations_;
  std::uint32_t made_ = 0;
};

}  // namespace unisono
