#include "host/wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "base/deadline.hpp"

namespace unisono::host {
namespace {

// The longest sleep. A missed wake costs no more.
constexpr auto kNap = std::chrono::microseconds(500);

void wake(Line& line) {
  if (line.sleepers.load(std::memory_order_seq_cst) != 0)
    ::syscall(SYS_futex, &line.flag, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps on a shared futex (no FUTEX_PRIVATE_FLAG): the word lies in memory of several processes.
void nap(Line& line, std::uint32_t expected) {
  line.sleepers.store(1, std::memory_order_seq_cst);
  const std::uint32_t seen = line.flag.load(std::memory_order_seq_cst);
  if (static_cast<std::int32_t>(seen - expected) < 0) {
    const timespec most{0, std::chrono::nanoseconds(kNap).count()};
    ::syscall(SYS_futex, &line.flag, FUTEX_WAIT, seen, &most, nullptr, 0);
  }
  line.sleepers.store(0, std::memory_order_relaxed);
}

void ring(Line& line) {
  line.flag.fetch_add(1, std::memory_order_seq_cst);
  wake(line);
}

void raise(Line& line, std::uint32_t value, bool crowded) {
  // The load of `sleepers` may overtake a plain store: a wake is then missed until the nap ends. No load
  // overtakes an exchange, which pays only if cores are scarce and a rank sleeps.
  if (crowded) line.flag.exchange(value, std::memory_order_seq_cst);
  else line.flag.store(value, std::memory_order_release);
  wake(line);
}

bool await(Line& line, std::uint32_t expected, const Patience& patience,
           const std::function<void()>& interrupted, const std::function<void(std::uint32_t seen)>& late) {
  for (int i = 0; i < patience.spins; ++i) {
    if (reached(line, expected)) return true;
    pause();
  }
  wait_until([&] { return reached(line, expected); }, patience.timeout,
             [&](Clock::duration elapsed) {
               if (patience.yields && elapsed < kYielding) ::sched_yield();
               else nap(line, expected);
             },
             interrupted, [&] { late(line.flag.load(std::memory_order_relaxed)); });
  return false;
}

}  // namespace unisono::host
