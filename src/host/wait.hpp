// Waiting for a word of shared memory to reach a value, and waking those who wait.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

namespace unisono::host {

// A cache line that one rank writes and one rank polls: a signal, whose flag counts, or a packet, whose flag
// has the lap in its upper bits.
struct alignas(64) Line {
  std::atomic<std::uint32_t> flag;
  std::atomic<std::uint32_t> sleepers;
  std::byte payload[56];
};
static_assert(sizeof(Line) == 64);

inline bool reached(const Line& line, std::uint32_t expected) {
  return static_cast<std::int32_t>(line.flag.load(std::memory_order_acquire) - expected) >= 0;
}

struct Patience {
  int spins = 0;         // polls before the core is given away
  bool yields = true;    // for kYielding, before it sleeps
  bool crowded = false;  // more threads than cores: a sleeper must be woken at once
  std::chrono::duration<double> timeout{};
};

// How long a wait yields before it sleeps.
inline constexpr std::chrono::microseconds kYielding(50);

// Leaves the core to others for a moment, within a wait.
void pause();
// Sleeps until the line may have reached `expected`, for at most 500 us.
void nap(Line& line, std::uint32_t expected);
// Counts a line up that several threads write, and wakes those who sleep on it.
void ring(Line& line);

// Publishes everything written before, then wakes those who sleep on the line.
void raise(Line& line, std::uint32_t value, bool crowded);

// Waits until the line has reached `expected`: polls, then yields, then sleeps on a futex. Returns whether
// the polls were enough. Calls `interrupted` every few milliseconds, which throws if waiting on is pointless.
// Calls `late` at the timeout, which throws.
bool await(Line& line, std::uint32_t expected, const Patience& patience,
           const std::function<void()>& interrupted, const std::function<void(std::uint32_t seen)>& late);

}  // namespace unisono::host
