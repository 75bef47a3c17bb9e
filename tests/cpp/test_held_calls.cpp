// Calls whose ranks hold to chunks without asking each other (host/call_ways.hpp). The kernel's copies are
// slow here, so that ranks do so after some calls of a kind.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "far_ranks.hpp"

namespace unisono::test {
namespace {

constexpr Collective kAll[] = {Collective::all_reduce, Collective::reduce,        Collective::broadcast,
                               Collective::all_gather, Collective::gather,        Collective::scatter,
                               Collective::all_to_all, Collective::reduce_scatter};
constexpr std::size_t kCounts[] = {501, 4099, 9001, 70001};  // of f32; of two sizes a call's pieces differ
constexpr unsigned kDelay = 300;                             // us; longer than chunks take

// Ranks whose copies by the kernel are slow.
void on_held(int size, const std::function<void(Rank&)>& body, bool check = false) {
  in_processes(size,
               [&](Rank& rank) {
                 delay_us = kDelay;
                 body(rank);
               },
               {.check = check});
}

// Makes as many calls of all ranks as said, of few kinds that follow each other by chance, in plain memory or
// in one that every rank reaches.
void mix(Rank& rank, std::mt19937& chance, int calls, std::byte* symmetric) {
  const auto below = [&](std::size_t most) { return static_cast<std::size_t>(chance()) % most; };
  std::vector<std::pair<Collective, std::size_t>> kinds;
  for (int i = 0; i < 5; ++i)
    kinds.emplace_back(kAll[below(std::size(kAll))], kCounts[below(std::size(kCounts))]);
  for (int i = 0; i < calls; ++i) {
    const auto [collective, count] = kinds[below(kinds.size())];
    const int root = static_cast<int>(below(static_cast<std::size_t>(rank.comm.size())));
    const bool in_place = below(4) == 0, in_symmetric = symmetric && below(2) == 0;
    const Case c{collective, "", count, DType::f32, Op::sum, root, in_place, chance()};
    run_checked(rank.comm, c, in_symmetric ? symmetric : rank.room(), kRoom);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(HeldCalls, OfMixedKindsAreRight) {
  for (const int n : {2, 3})
    for (const bool check : {false, true})
      on_held(
          n,
          [](Rank& rank) {
            std::mt19937 chance(7);
            mix(rank, chance, UNISONO_SANITIZED ? 100 : 250, nullptr);
          },
          check);
}

// Symmetric memory is made while ranks hold, and given back.
TEST(HeldCalls, GoOnWithSymmetricMemory) {
  on_held(2, [](Rank& rank) {
    std::mt19937 chance(11);
    mix(rank, chance, 100, nullptr);
    {
      const auto symmetric = rank.comm.empty(kRoom);
      mix(rank, chance, 200, static_cast<std::byte*>(symmetric.data()));
    }
    mix(rank, chance, 100, nullptr);
  });
}

// Ranks hold, except from calls in symmetric memory, which all go by no copies at all.
TEST(HeldCalls, LeaveMostKernelCopiesOut) {
  on_held(2, [](Rank& rank) {
    if (!rank.learns()) return;
    delay_us = 5000;
    const Case c{Collective::all_gather, "", 5000, DType::f32, Op::sum, 0, false, 3};
    const auto call = [&] { run_checked(rank.comm, c, rank.room(), kRoom); };
    for (int i = 0; i < 64; ++i) call();
    // the other way is tried three times in 256 calls
    EXPECT_LE(rank.copied([&] {
      for (int i = 0; i < 192; ++i) call();
    }),
              2 * 3);
  });
}

// Messages of many sizes, by other calls at both ends and in place: each has a way of its own.
TEST(HeldMessages, OfMixedCallsAreRight) {
  on_held(2, [](Rank& rank) {
    std::mt19937 chance(5);
    const int me = rank.comm.rank(), peer = 1 - me;
    for (int i = 0; i < 600; ++i) {
      constexpr std::size_t kBytes[] = {16385, 40000, 65537, 131072, 300000};
      const std::size_t bytes = kBytes[chance() % 5];
      switch (const auto kind = i < 200 ? 0 : chance() % 5) {
        case 0: rank.message(peer, peer, bytes); break;
        case 1: rank.message(peer, peer, bytes, true); break;
        case 2:
        case 3: {  // one way
          const bool sends = (kind == 2) == (me == 0);
          rank.message(sends ? peer : -1, sends ? -1 : peer, bytes);
          break;
        }
        default:  // one rank does both at once
          if (me == 0) {
            rank.message(peer, peer, bytes);
          } else {
            rank.message(-1, peer, bytes);
            rank.message(peer, -1, bytes);
          }
      }
      if (testing::Test::HasFailure()) return;
    }
  });
}

TEST(HeldMessages, GoAroundARingOfThree) {
  on_held(3, [](Rank& rank) {
    const int n = rank.comm.size(), me = rank.comm.rank();
    for (int i = 0; i < 100; ++i) rank.message((me + 1) % n, (me + n - 1) % n, 20000 + 9000 * (i % 3));
  });
}

// Makes calls of one kind until ranks hold, then one that differs. Expects the same error of both ranks.
void expect_mismatch(const std::function<void(Rank&)>& usual, const std::function<void(Rank&)>& other) {
  on_held(2, [&](Rank& rank) {
    for (int i = 0; i < 40; ++i) usual(rank);
    const bool differs = rank.comm.rank() == 1;
    std::string text;
    try {
      differs ? other(rank) : usual(rank);
      usual(rank);  // a rank that only sends may learn of it here
    } catch (const MismatchError& error) { text = error.what(); }
    EXPECT_NE(text.find("call"), std::string::npos) << text;
  });
}

TEST(HeldCalls, OtherCallsOfOneRankAreAMismatch) {
  const auto gathers = [](Rank& rank) {
    rank.comm.all_gather({.in = rank.room(), .out = rank.room() + kRoom / 2, .count = 5000});
  };
  expect_mismatch(gathers, [](Rank& rank) {
    rank.comm.all_gather({.in = rank.room(), .out = rank.room() + kRoom / 2, .count = 50000});
  });
  expect_mismatch(gathers, [](Rank& rank) {
    rank.comm.all_reduce({.in = rank.room(), .out = rank.room() + kRoom / 2, .count = 10000});
  });
}

TEST(HeldMessages, OtherMessagesOfOneRankAreAMismatch) {
  const auto exchanges = [](std::size_t count) {
    return [count](Rank& rank) {
      const int peer = 1 - rank.comm.rank();
      rank.comm.send_recv({.in = rank.room(), .out = rank.room() + kRoom / 2, .count = count}, peer, peer);
    };
  };
  expect_mismatch(exchanges(5000), exchanges(20000));
}

}  // namespace
}  // namespace unisono::test
