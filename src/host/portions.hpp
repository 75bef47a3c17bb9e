// A message that both ends copy: its receiver from the first byte on, its sender from the last.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"

namespace unisono::host {

struct Portion {
  std::size_t begin = 0, end = 0;
  std::size_t bytes() const { return end - begin; }
};

// Lies in memory that both ends share. Who copies takes a portion first, so that neither waits for the other
// to begin, and both end at about the same time.
class Portions {
 public:
  static constexpr std::size_t kLeast = std::size_t{64} << 10;  // bytes of a portion, except the last
  static constexpr std::size_t kMost = std::size_t{1} << 20;    // except of messages beyond 64 GiB

  // Lets both ends take portions of a message. Its number tells it from those before.
  void open(std::uint32_t number, std::size_t bytes) {
    const std::size_t piece = piece_of(bytes);
    word_.store(word(number, 0, divide_up(bytes, piece)), std::memory_order_release);
  }
  // Lets nobody take any more.
  void close() { word_.exchange(0, std::memory_order_acq_rel); }

  // Takes a portion: half of what is left, so that there are few, or all if the other end has taken none
  // while this one copied. Returns an empty one if nothing is left, or if another message is open.
  Portion take(bool from_end, std::uint32_t number, std::size_t bytes) {
    const std::size_t piece = piece_of(bytes), most = std::max<std::size_t>(kMost / piece, 1);
    const std::size_t whole = divide_up(bytes, piece);
    std::uint64_t seen = word_.load(std::memory_order_acquire);
    for (;;) {
      const std::size_t begin = seen >> 16 & 0xffff, end = seen & 0xffff;
      if (seen >> 32 != number || begin >= end) return {};
      const std::size_t mine = from_end ? whole - end : begin, theirs = from_end ? begin : whole - end;
      const std::size_t share = mine > 0 && theirs == 0 ? end - begin : (end - begin) / 2;
      const std::size_t pieces = std::clamp<std::size_t>(share, 1, most);
      const std::uint64_t left =
          from_end ? word(number, begin, end - pieces) : word(number, begin + pieces, end);
      if (!word_.compare_exchange_weak(seen, left, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      const std::size_t first = from_end ? end - pieces : begin;
      return {first * piece, std::min((first + pieces) * piece, bytes)};
    }
  }

 private:
  static constexpr std::size_t kMostPieces = 0xffff;
  static std::size_t piece_of(std::size_t bytes) { return round_up(bytes / kMostPieces + 1, kLeast); }
  static std::uint64_t word(std::uint32_t number, std::size_t begin, std::size_t end) {
    return std::uint64_t{number} << 32 | begin << 16 | end;
  }

  std::atomic<std::uint64_t> word_;  // the number, and the pieces that are left: from begin to end
};

}  // namespace unisono::host
