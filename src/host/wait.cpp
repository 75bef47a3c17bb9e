#include "host/wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace unisono::host {
namespace {

// The longest sleep. A missed wake costs no more.
constexpr auto kNap = std::chrono::microseconds(500);

}  // namespace

void wake(Line& line) {
  if (line.sleepers.load(std::memory_order_seq_cst) != 0)
    ::syscall(SYS_futex, &line.flag, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The futex is shared (no FUTEX_PRIVATE_FLAG): the word lies in memory of several processes.
void nap(Line& line, std::uint32_t expected, const std::function<bool()>& news) {
  line.sleepers.store(1, std::memory_order_seq_cst);
  const std::uint32_t seen = line.flag.load(std::memory_order_seq_cst);
  if (static_cast<std::int32_t>(seen - expected) < 0 && !(news && news())) {
    const timespec most{0, std::chrono::nanoseconds(kNap).count()};
    ::syscall(SYS_futex, &line.flag, FUTEX_WAIT, seen, &most, nullptr, 0);
  }
  line.sleepers.store(0, std::memory_order_relaxed);
}

void rest(Line& line, std::uint32_t expected, std::chrono::microseconds yielding,
          std::chrono::nanoseconds elapsed) {
  if (elapsed < yielding) ::sched_yield();
  else nap(line, expected);
}

int current_core() { return ::sched_getcpu(); }

// The kernel moves a thread at once that may no longer run where it is.
void leave_core(int core) {
  cpu_set_t allowed, others;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  others = allowed;
  CPU_CLR(static_cast<std::size_t>(core), &others);
  if (CPU_COUNT(&others) == 0 || ::sched_setaffinity(0, sizeof others, &others) != 0) return;
  ::sched_setaffinity(0, sizeof allowed, &allowed);
}

void ring(Line& line) {
  line.flag.fetch_add(1, std::memory_order_seq_cst);
  wake(line);
}

void nudge(Line& line) {
  if (line.sleepers.load(std::memory_order_seq_cst) != 0) ring(line);
}

void raise(Line& line, std::uint32_t value, bool crowded) {
  publish(line.flag, value, crowded);
  wake(line);
}

}  // namespace unisono::host
