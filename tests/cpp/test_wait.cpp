// Sleeping, waking and leaving a core, in a wait that has polled.
#include "host/wait.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

#include "base/deadline.hpp"

namespace unisono::host {
namespace {

cpu_set_t mask_of_this_thread() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  EXPECT_EQ(::sched_getaffinity(0, sizeof mask, &mask), 0);
  return mask;
}

TEST(Core, IsLeftForAnotherOne) {
  const cpu_set_t before = mask_of_this_thread();
  if (CPU_COUNT(&before) < 2) GTEST_SKIP() << "this process may run on one core only";
  bool moved = false;
  for (int i = 0; i < 100 && !moved; ++i) {  // the kernel may move it back at once
    const int core = current_core();
    leave_core(core);
    moved = current_core() != core;
    const cpu_set_t after = mask_of_this_thread();
    ASSERT_TRUE(CPU_EQUAL(&before, &after));
  }
  EXPECT_TRUE(moved);
}

TEST(Core, StaysWhereThereIsNoOther) {
  std::thread([] {
    const int core = current_core();
    ASSERT_GE(core, 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(core), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    leave_core(core);
    const cpu_set_t after = mask_of_this_thread();
    EXPECT_TRUE(CPU_EQUAL(&one, &after));
    EXPECT_EQ(current_core(), core);
  }).join();
}

TEST(Rest, EndsWhenTheLineIsRaised) {
  for (const bool sleeps : {false, true}) {
    Line line{};
    std::thread waiter([&] {
      const auto elapsed = sleeps ? kYieldingCrowded : std::chrono::microseconds(0);
      while (!reached(line, 1)) rest(line, 1, kYieldingCrowded, elapsed);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    raise(line, 1, true);
    waiter.join();
    EXPECT_EQ(line.sleepers.load(), 0U);
  }
}

// A rank that is stopped is stopped in its sleep, as a rule.
TEST(Wait, CountsLittleOfALongRest) {
  int looks = 0;
  const auto stopped = [](Clock::duration) { std::this_thread::sleep_for(kMostCounted * 5 / 4); };
  const auto late = [] { throw PeerLostError("late"); };
  const std::chrono::duration<double> timeout = kMostCounted * 5 / 2;
  EXPECT_THROW(wait_until([] { return false; }, timeout, stopped, [&] { ++looks; }, late), PeerLostError);
  EXPECT_GE(looks, 3);
}

}  // namespace
}  // namespace unisono::host
