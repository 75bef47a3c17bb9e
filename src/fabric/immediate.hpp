// The 32 bits that travel with a write, and a receiver's account of them. No order of arrival is assumed:
// writes from one rank to another are numbered by kind, and a receiver knows the numbers that it waits for.
#pragma once

#include <bitset>
#include <cstdint>

namespace unisono::fabric {

enum class Kind : std::uint8_t { meet, piece, credit, bulk, probe, failure, departed };
inline constexpr int kKinds = 7;
inline constexpr int kMostRanks = 1024;

// 10 bits of the writer's rank, 3 of the kind, 19 of the number.
struct Immediate {
  static constexpr int kNumberBits = 19;
  static constexpr std::uint32_t kNumbers = std::uint32_t{1} << kNumberBits;
  int rank;
  Kind kind;
  std::uint32_t number;  // modulo kNumbers

  std::uint32_t word() const {
    return static_cast<std::uint32_t>(rank) << 22 | static_cast<std::uint32_t>(kind) << kNumberBits |
           number % kNumbers;
  }
  static Immediate of(std::uint32_t word) {
    return {static_cast<int>(word >> 22), static_cast<Kind>(word >> kNumberBits & 7), word % kNumbers};
  }
};

// The numbers that have come from one rank in one kind: all below `base_`, and others in the window above.
class Arrivals {
 public:
  static constexpr std::uint32_t kWindow = 4096;

  // Counts a number that is new and within the window. Returns false for any other: a duplicate, or stale.
  bool accept(std::uint32_t number) {
    const std::uint32_t ahead = (number - static_cast<std::uint32_t>(base_)) % Immediate::kNumbers;
    if (ahead >= kWindow || above_[(base_ + ahead) % kWindow]) return false;
    above_[(base_ + ahead) % kWindow] = true;
    ++count_;
    for (; above_[base_ % kWindow]; ++base_) above_[base_ % kWindow] = false;
    return true;
  }
  // Returns whether all of [first, end) have come.
  bool has(std::uint64_t first, std::uint64_t end) const {
    for (std::uint64_t number = first < base_ ? base_ : first; number < end; ++number)
      if (number >= base_ + kWindow || !above_[number % kWindow]) return false;
    return true;
  }
  std::uint64_t count() const { return count_; }

 private:
  std::uint64_t base_ = 0, count_ = 0;
  std::bitset<kWindow> above_;
};

}  // namespace unisono::fabric
