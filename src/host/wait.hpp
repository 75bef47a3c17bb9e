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

// How long a wait yields before it sleeps: where ranks have a core each, and where they have not. Waking a
// sleeper may take 2 ms on a virtual machine. With less patience than that, a rank that has slept makes its
// peer sleep, which then makes it sleep again (docs/notes/host.md).
inline constexpr std::chrono::microseconds kYielding(5000), kYieldingCrowded(50);

struct Patience {
  int spins = 0;  // polls before the core is given away
  std::chrono::microseconds yielding = kYielding;
  bool crowded = false;  // more threads than cores: a sleeper must be woken at once
  std::chrono::duration<double> timeout{};
};

// Leaves the core to others for a moment, within a wait.
void pause();
// Sleeps for at most 500 us, until the line may have reached `expected`, or not at all if there is news: of
// what others write before they look whether someone sleeps (nudge).
void nap(Line& line, std::uint32_t expected, const std::function<bool()>& news = {});
// Gives the core away, in a wait that has lasted `elapsed`: to threads that are ready, or from `yielding` on
// in a nap.
void rest(Line& line, std::uint32_t expected, std::chrono::microseconds yielding,
          std::chrono::nanoseconds elapsed);
// Returns the core that this thread runs on, or -1.
int current_core();
// Moves this thread to another core that it may run on, if there is one.
void leave_core(int core);
// Wakes those who sleep on a line.
void wake(Line& line);
// Counts a line up that several threads write, and wakes those who sleep on it.
void ring(Line& line);
// Does so if someone sleeps on it.
void nudge(Line& line);

// Publishes everything written before. crowded: no later load overtakes it, such as that of whether a rank
// sleeps, whose wake is else missed until its nap ends. That pays only if cores are scarce.
template <class T>
void publish(std::atomic<T>& at, T value, bool crowded) {
  if (crowded) at.exchange(value, std::memory_order_seq_cst);
  else at.store(value, std::memory_order_release);
}

// Publishes everything written before, then wakes those who sleep on the line.
void raise(Line& line, std::uint32_t value, bool crowded);

}  // namespace unisono::host
