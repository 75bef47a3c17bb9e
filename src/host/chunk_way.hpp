// Which way a rank's pieces go into the ring of one peer: through the cache or around it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/deadline.hpp"

namespace unisono::host {

// Around must be so many times as fast, since times vary.
inline constexpr double kAroundPays = 1.5;
// The bytes from which a piece may go around, and from which it may be timed.
inline constexpr std::size_t kStreamFrom = 3072, kTimedFrom = 8192;

// The time that a reader's copy of a piece took. Units: of times in this file, seconds a byte.
struct Taken {
  std::uint32_t piece = 0;
  float time = 0;
};

// A copy that is timed.
class Stopwatch {
 public:
  explicit Stopwatch(std::size_t bytes) : bytes_(static_cast<double>(bytes)) {}
  float ended() const {
    return static_cast<float>(std::chrono::duration<double>(Clock::now() - began_).count() / bytes_);
  }

 private:
  double bytes_;
  Clock::time_point began_ = Clock::now();
};

// Learns the way of pieces to one peer from the times of some, and changes it when the cores have come nearer
// or gone apart. So a writer decides alone, also in calls that ranks do not count alike. Writer and reader
// number pieces alike, and each times its own copy.
class ChunkWay {
 public:
  static bool timed(std::uint32_t piece) { return piece % 8 == 0; }

  explicit ChunkWay(bool around = false) : around_(around) {}
  bool around() const { return around_; }

  // Returns how a timed piece goes: some go the other way.
  bool begin(std::uint32_t piece) {
    constexpr std::uint32_t kTries = 64;  // timed pieces, of which one goes the other way; an early one too
    piece_ = piece;
    goes_around_ = around_ != (++timed_ % kTries == 2);
    return goes_around_;
  }
  void wrote(double time) { written_ = time; }
  // Counts the piece that was begun last if its reader tells the time.
  void learn(const Taken& taken) {
    if (piece_ == 0 || taken.piece != piece_) return;
    double& usual = goes_around_ ? of_around_ : of_through_;
    const double time = written_ + taken.time;
    // A try replaces what is known of its way, which is as old as the last try. Times of the other way are
    // limited: a thread that loses its core takes many times as long.
    const bool anew = usual == 0 || goes_around_ != around_;
    usual = anew ? time : usual + 0.25 * (std::min(time, 2 * usual) - usual);
    if (of_around_ > 0 && of_through_ > 0) around_ = of_through_ > kAroundPays * of_around_;
  }

 private:
  bool around_, goes_around_ = false;
  std::uint32_t piece_ = 0, timed_ = 0;
  double written_ = 0, of_through_ = 0, of_around_ = 0;
};

}  // namespace unisono::host
