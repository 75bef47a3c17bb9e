// Dispatch and combine of C++ programs on the host lane, compared with loops over the tokens of all ranks.
#include "unisono/moe.hpp"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "moe_world.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

void runs(int ranks, MoeLayout layout, int rounds) {
  const MoeWorld world(ranks, 11 * ranks, 3, 301);
  on_ranks(ranks, [&](Communicator& comm) {
    Moe moe(comm, world.shape(), {.layout = layout});
    for (int round = 0; round < rounds; ++round) world.check(comm, moe, round);
  });
}

class MoeOnHost : public testing::TestWithParam<std::tuple<int, MoeLayout>> {};

TEST_P(MoeOnHost, BringsTokensToTheirExpertsAndBack) {
  runs(std::get<0>(GetParam()), std::get<1>(GetParam()), 8);
}

INSTANTIATE_TEST_SUITE_P(Ranks, MoeOnHost,
                         testing::Combine(testing::Values(1, 2, 3, 5),
                                          testing::Values(MoeLayout::flat, MoeLayout::rank_major,
                                                          MoeLayout::expert_major)));

TEST(Moe, RoundsUnderPressureDoNotMix) { runs(4, MoeLayout::flat, 200); }

TEST(Moe, RowsLongerThanAChunkGoInSlices) {
  const MoeWorld world(2, 9, 2, 70'001);
  for (const MoeLayout layout : {MoeLayout::flat, MoeLayout::expert_major})
    on_ranks(2, [&](Communicator& comm) {
      Moe moe(comm, world.shape(), {.layout = layout});
      world.check(comm, moe, 0);
    });
}

TEST(Moe, AWrongIndexSendsNothing) {
  on_ranks(2, [](Communicator& comm) {
    Moe moe(comm, {.experts = 4, .top_k = 1, .hidden = 2, .max_tokens = 3, .dtype = DType::f32});
    const float x[6] = {1, 2, 3, 4, 5, 6};
    std::int64_t idx[3] = {0, 3, 4};
    const MoeTokens tokens{.x = x, .tokens = 3, .topk_idx = idx};
    EXPECT_EQ(text_of<UsageError>([&] { moe.dispatch(tokens); }),
              "topk_idx names expert 4 for token 2, but there are 4: give 0 to 3, or -1 for none.");
    idx[2] = -1;
    const MoeReceived received = moe.dispatch(tokens);  // by the same communicator
    EXPECT_EQ(received.rows_now, 2u);
  });
}

TEST(Moe, TooManyRowsAreAnErrorOnEveryRank) {
  on_ranks(3, [](Communicator& comm) {
    Moe moe(comm, {.experts = 3, .top_k = 1, .hidden = 1, .max_tokens = 4, .dtype = DType::f32},
            {.capacity = 5});
    const float x[4] = {};
    const std::int64_t crowded[4] = {1, 1, 1, 1}, spread[4] = {0, 1, 2, -1};
    const MoeTokens tokens{.x = x, .tokens = 4, .topk_idx = crowded};
    EXPECT_EQ(
        text_of<ResourceError>([&] { moe.dispatch(tokens); }),
        "rank 1 would receive 12 rows in this dispatch, but there is room for 5: give capacity=12 or more, "
        "or drop=True.");
    EXPECT_EQ(moe.dispatch({.x = x, .tokens = 4, .topk_idx = spread}).rows_now, 3u);
  });
}

TEST(Moe, RanksThatDifferAreTold) {
  on_ranks(2, [](Communicator& comm) {
    MoeShape shape{.experts = 2, .top_k = 1, .hidden = 4, .max_tokens = 1, .dtype = DType::f32};
    if (comm.rank() == 1) shape.hidden = 5;
    EXPECT_TRUE(has(text_of<UsageError>([&] { Moe(comm, shape); }), "rank 1 makes another moe than rank 0"));
    shape.hidden = 4;
    Moe moe(comm, shape, {.more_bytes = 8});
    const float x[4] = {};
    const std::int64_t idx = 0;
    const MoePayload more{.data = x, .row_bytes = comm.rank() == 0 ? 4u : 8u};
    EXPECT_TRUE(has(text_of<MismatchError>(
                        [&] { moe.dispatch({.x = x, .tokens = 1, .topk_idx = &idx, .more = {&more, 1}}); }),
                    "further rows of 4 bytes, but rank 1 by a new routing"));
  });
}

}  // namespace
}  // namespace unisono::test
