// Which way large calls go, as ranks learn it (host/call_ways.hpp): times are made up, nothing is copied.
#include <gtest/gtest.h>

#include "host/call_ways.hpp"

namespace unisono {
namespace {

using host::CallWay;
using host::CallWays;
using std::chrono::microseconds;

// Times of a call by chunks, and by the kernel: after one that went through chunks, and after another by
// the kernel, whose input is then still in this rank's cache.
struct Costs {
  int chunks, kernel, kernel_again;
};
constexpr Costs kWritten{18, 25, 25}, kKept{17, 25, 12};

// Makes calls. Returns how many went through chunks.
int call(CallWay& way, bool& last, const Costs& costs, int calls) {
  int chunks = 0;
  for (int i = 0; i < calls; ++i) {
    const bool by_chunks = way.next() < 0;
    way.took(by_chunks, microseconds(by_chunks ? costs.chunks : last ? costs.kernel : costs.kernel_again));
    last = by_chunks;
    chunks += by_chunks;
  }
  return chunks;
}

TEST(CallWay, FindsTheFasterWayWithinSomeCalls) {
  CallWay written, kept;
  bool last = false;
  call(written, last, kWritten, 64);
  EXPECT_GE(call(written, last, kWritten, 1280), 1280 - 33);
  call(kept, last, kKept, 64);
  EXPECT_LE(call(kept, last, kKept, 1280), 33);
}

TEST(CallWay, ChangesWithTheCaller) {
  CallWay way;
  bool last = false;
  call(way, last, kKept, 1000);
  call(way, last, kWritten, 64);
  EXPECT_GE(call(way, last, kWritten, 256), 256 - 6);
  call(way, last, kKept, 512);
  EXPECT_LE(call(way, last, kKept, 256), 6);
}

TEST(CallWay, OneCallThatLostItsCoreChangesNothing) {
  CallWay way;
  bool last = false;
  call(way, last, kKept, 1000);
  call(way, last, {5000, 5000, 5000}, 1);
  EXPECT_LE(call(way, last, kKept, 128), 3);
}

// The first calls find rings that no cache has, and a rank may lose its core in its only try of a way.
TEST(CallWay, OfATryOnlyTheLastOneCounts) {
  CallWay cold, lost;
  bool last = false;
  call(cold, last, {55, 25, 25}, 16);
  call(cold, last, {22, 25, 25}, 48);
  EXPECT_GE(call(cold, last, {22, 25, 25}, 128), 128);
  last = false;
  call(lost, last, {18, 5000, 5000}, 16);
  call(lost, last, kKept, 48);
  EXPECT_EQ(call(lost, last, kKept, 128), 0);
}

// A program may make as many calls on symmetric memory, which go one way alone.
TEST(CallWay, CallsOfOneWayAloneUseUpNoTry) {
  CallWay way;
  int chunks = 0;
  for (int i = 0; i < 64; ++i) {
    const bool by_chunks = way.next() < 0;
    if (i / 4 % 2 == 0) {
      way.leave_out();
      continue;
    }
    way.took(by_chunks, microseconds(by_chunks ? 114 : 148));
    chunks += by_chunks;
  }
  EXPECT_GE(chunks, 20);  // of 32
}

// One in ten calls through chunks is faster than by the kernel: a way that most calls go has its least times
// more often.
TEST(CallWay, TimesThatAreSeldomReachedDoNotDecide) {
  CallWay way;
  constexpr int kCalls = 4096;
  int chunks = 0;
  for (int i = 0; i < kCalls; ++i) {
    const bool by_chunks = way.next() < 0;
    way.took(by_chunks, microseconds(!by_chunks ? 90 : i % 10 == 0 ? 80 : 100));
    chunks += by_chunks;
  }
  EXPECT_LE(chunks, kCalls / 8);
}

// One rank of two has found the kernel slow, once: the calls go through chunks while either says so.
TEST(CallWay, RanksThatDifferTryTheKernelAgain) {
  CallWay one, other;
  bool last = false;
  int chunks = 0;
  for (int i = 0; i < 2048; ++i) {
    const bool by_chunks = one.next() + other.next() < 0;
    const int time = by_chunks ? kKept.chunks : last ? kKept.kernel : kKept.kernel_again;
    one.took(by_chunks, microseconds(time));
    other.took(by_chunks, microseconds(i < 256 ? kWritten.kernel : time));
    last = by_chunks;
    chunks += i >= 1024 && by_chunks;
  }
  EXPECT_LE(chunks, 8 * 3);
}

// Makes calls of two ranks, whose times differ, which hold where they may. Returns how many were held.
int hold(CallWay& one, CallWay& other, const Costs& costs, int calls, bool symmetric = false,
         bool ever = false) {
  int held = 0;
  for (int i = 0; i < calls; ++i) {
    const bool holds = one.held();
    EXPECT_EQ(other.held(), holds);
    held += holds;
    if (holds) continue;
    const bool by_chunks = one.next() + other.next() < 0;
    for (CallWay* way : {&one, &other}) way->hold(symmetric, ever, by_chunks);
    one.took(by_chunks, microseconds(by_chunks ? costs.chunks : costs.kernel), microseconds(1));
    other.took(by_chunks, microseconds(by_chunks ? costs.chunks + 2 : costs.kernel - 2), microseconds(1));
  }
  return held;
}

TEST(CallWay, RanksHoldToChunksAlike) {
  CallWay one, other, direct, peer;
  hold(one, other, kWritten, 64);
  EXPECT_GE(hold(one, other, kWritten, 2560), 2560 - 10 * (3 + 8));
  hold(direct, peer, {25, 18, 18}, 64);
  EXPECT_EQ(hold(direct, peer, {25, 18, 18}, 2560), 0);
}

// Each rank's own times speak for another way: the sum decides.
TEST(CallWay, ASumOfTimesDecides) {
  CallWay root, reader;
  int chunks = 0;
  for (int i = 0; i < 1088; ++i) {
    const bool by_chunks = root.next() + reader.next() < 0;
    root.took(by_chunks, microseconds(by_chunks ? 5 : 6));
    reader.took(by_chunks, microseconds(by_chunks ? 9 : 6));
    chunks += i >= 64 && by_chunks;
  }
  EXPECT_LE(chunks, 4 * 3 + 3);
}

TEST(CallWay, WhatItTakesToAskCountsForChunks) {
  CallWay way;
  int chunks = 0;
  for (int i = 0; i < 1088; ++i) {
    const bool by_chunks = way.next() < 0;
    way.took(by_chunks, microseconds(by_chunks ? 20 : 18), microseconds(3));
    chunks += i >= 64 && by_chunks;
  }
  EXPECT_GE(chunks, 1024 - (4 * 3 + 3));
}

// Makes calls of one way, of a sender and of the receiver that waits for it. held: of a held call. Returns
// how many went through chunks.
int reduce(CallWay& sender, CallWay& root, const Costs& costs, int held, int calls) {
  int chunks = 0;
  for (int i = 0; i < calls; ++i) {
    const bool holds = root.held();
    EXPECT_EQ(sender.held(), holds);
    chunks += holds;
    if (holds) root.took_held(microseconds(held));
    if (holds) continue;
    sender.next();
    const bool by_chunks = root.next() < 0;
    for (CallWay* way : {&sender, &root}) way->hold(false, false, by_chunks, true);
    sender.took(by_chunks, microseconds(1), microseconds(9), false);
    root.took(by_chunks, microseconds(by_chunks ? costs.chunks : costs.kernel), microseconds(1));
    chunks += by_chunks;
  }
  return chunks;
}

// Calls back to back and calls whose ranks begin together are as fast when ranks ask, and not when they hold.
TEST(CallWay, HeldCallsOfOneWayTellWhetherSendersAreAhead) {
  CallWay sender, root;
  constexpr Costs kTogether{24, 20, 20};
  constexpr int kTries = 3 + 8, kPeriod = 256;
  reduce(sender, root, kTogether, 26, 64);
  EXPECT_LE(reduce(sender, root, kTogether, 26, 2 * kPeriod), 2 * kTries);
  reduce(sender, root, kTogether, 15, kPeriod);
  EXPECT_GE(reduce(sender, root, kTogether, 15, 2 * kPeriod), 2 * (kPeriod - 3));
  reduce(sender, root, kTogether, 26, 64);  // calls that are held now, and what follows them
  EXPECT_LE(reduce(sender, root, kTogether, 26, 2 * kPeriod), 2 * kTries);
}

// The first held call after a long pause changes nothing for long.
TEST(CallWay, OneHeldCallThatTookLongIsForgotten) {
  CallWay sender, root;
  constexpr Costs kTogether{24, 20, 20};
  reduce(sender, root, kTogether, 15, 320);
  root.took_held(microseconds(5000));
  EXPECT_GE(reduce(sender, root, kTogether, 15, 256), 256 - 3 - 32);
}

// Symmetric memory, in which calls had better not be held, ends that for a row of calls.
TEST(CallWay, RanksDoNotHoldWhereCallsAreSymmetric) {
  CallWay one, other;
  hold(one, other, kWritten, 64);
  EXPECT_EQ(hold(one, other, kWritten, 32, true, true), 0);
  EXPECT_EQ(hold(one, other, kWritten, 15, false, true), 0);
  EXPECT_GT(hold(one, other, kWritten, 64, false, true), 32);
}

TEST(CallWays, KeepCollectivesAndSizesApart) {
  CallWays ways;
  bool last = false;
  call(ways.of(Collective::all_gather, 100'000), last, kWritten, 1000);
  last = false;
  call(ways.of(Collective::all_gather, 1'000'000), last, kKept, 1000);
  EXPECT_LT(ways.of(Collective::all_gather, 70'000).next(), 0);
  EXPECT_GT(ways.of(Collective::all_gather, 1'000'000).next(), 0);
  EXPECT_NE(&ways.of(Collective::all_gather, 1000), &ways.of(Collective::broadcast, 1000));
}

}  // namespace
}  // namespace unisono
