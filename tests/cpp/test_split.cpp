// Communicators of some of a communicator's ranks.
#include <gtest/gtest.h>

#include <latch>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "fabric_here.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

// Returns the numbers in the whole that the ranks of a communicator give, in rank order.
std::vector<std::int32_t> everyone(Communicator& comm, int mine) {
  const std::int32_t in = mine;
  std::vector<std::int32_t> out(static_cast<std::size_t>(comm.size()));
  comm.all_gather({.in = &in, .out = out.data(), .count = 1, .dtype = DType::i32});
  return out;
}

class Split : public testing::TestWithParam<int> {};

TEST_P(Split, ByColorAndKey) {
  const int n = GetParam();
  on_ranks(n, [n](Communicator& comm) {
    const int me = comm.rank();
    for (int colors = 1; colors <= 3; ++colors) {
      std::vector<std::int32_t> expected;  // downwards: the keys are negative
      for (int r = n - 1; r >= 0; --r)
        if (r % colors == me % colors) expected.push_back(r);
      auto some = comm.split(me % colors, -me);
      ASSERT_TRUE(some);
      EXPECT_EQ(everyone(*some, me), expected);
      auto odd = some->split(some->rank() % 2 == 0 ? -1 : 5);
      EXPECT_EQ(odd.has_value(), some->rank() % 2 == 1);
      if (!odd) continue;
      some.reset();  // a communicator outlives the one that it is of
      const auto of_odd = everyone(*odd, me);
      for (std::size_t i = 0; i < of_odd.size(); ++i) EXPECT_EQ(of_odd[i], expected[2 * i + 1]);
    }
    std::vector<std::int32_t> all(static_cast<std::size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(everyone(comm, me), all);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Split, testing::Values(1, 2, 3, 5, 8));

TEST(Splits, DozensAreInUseAtOnce) {
  constexpr int kMany = 40;
  on_ranks(3, [](Communicator& comm) {
    std::vector<std::optional<Communicator>> all;
    for (int i = 0; i < kMany; ++i) all.push_back(comm.split(comm.rank() == i % 4 ? -1 : i, 0));
    std::vector<Work> works;
    std::vector<Words> words(kMany);
    for (int i = kMany - 1; i >= 0; --i) {
      auto& one = all[static_cast<std::size_t>(i)];
      if (!one) continue;
      Words& mine = words[static_cast<std::size_t>(i)];
      mine.in[0] = static_cast<float>(i);
      works.push_back(one->begin(Collective::all_reduce, mine.call()));
    }
    for (const Work& work : works) work.wait();
    for (int i = 0; i < kMany; ++i) {
      const auto& one = all[static_cast<std::size_t>(i)];
      if (!one) continue;
      EXPECT_EQ(words[static_cast<std::size_t>(i)].out[0], static_cast<float>(i * one->size()));
    }
    comm.barrier();
  });
}

TEST(Splits, TheOptionsGoAlong) {
  std::latch over(2);
  on_ranks(3, {.timeout_s = 0.2, .check = true}, [&](Communicator& comm) {
    auto some = comm.split(0);
    EXPECT_TRUE(some->check());
    if (comm.rank() == 1) return over.wait();
    const std::string text = text_of<TimeoutError>([&] { some->barrier(); });
    EXPECT_TRUE(has(text, "has waited 0.2 s for rank 1")) << text;
    over.count_down();
  });
}

TEST(Splits, ARankThatNeverComesIsNamed) {
  std::latch over(2);
  on_ranks(3, {.timeout_s = 0.2}, [&](Communicator& comm) {
    if (comm.rank() == 2) return over.wait();
    const std::string text = text_of<TimeoutError>([&] { comm.split(comm.rank()); });
    EXPECT_TRUE(has(text, "split (call 1 of rank ") && has(text, "has waited 0.2 s for rank 2")) << text;
    over.count_down();
  });
}

TEST(Splits, OnTheFabric) {
  if (const std::string why = no_fabric("tcp"); !why.empty()) GTEST_SKIP() << why;
  on_ranks(3, {.timeout_s = 120, .fabric = Communicator::Fabric{.provider = "tcp"}}, [](Communicator& comm) {
    auto some = comm.split(comm.rank() / 2);
    EXPECT_EQ(everyone(*some, comm.rank()),
              comm.rank() < 2 ? (std::vector<std::int32_t>{0, 1}) : (std::vector<std::int32_t>{2}));
  });
}

}  // namespace
}  // namespace unisono::test
