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

// Rows of 5 bytes in a Moe of 2 floats, to every rank, also to the caller's memory and by the routing again.
TEST(Moe, RowsOfTheCallersWidthTravelAsTheyAre) {
  static constexpr std::size_t kWidth = 5, kTokens = 3;
  for (const MoeLayout layout : {MoeLayout::flat, MoeLayout::rank_major, MoeLayout::expert_major})
    on_ranks(3, [&](Communicator& comm) {
      Moe moe(comm, {.experts = 3, .top_k = 3, .hidden = 2, .max_tokens = kTokens, .dtype = DType::f32},
              {.layout = layout});
      const std::int32_t idx[9] = {0, 1, 2, 2, 1, 0, 1, 0, 2};
      const auto rows_of = [](int rank) {
        std::vector<unsigned char> rows(kTokens * kWidth);
        for (std::size_t i = 0; i < rows.size(); ++i)
          rows[i] = static_cast<unsigned char>(100 * rank + static_cast<int>(i));
        return rows;
      };
      const auto mine = rows_of(comm.rank());
      std::vector<unsigned char> out(moe.rows_held() * kWidth + 1, 0xee);
      MoeTokens tokens{
          .x = mine.data(), .tokens = kTokens, .topk_idx = idx, .index = DType::i32, .row_bytes = kWidth};
      std::optional<MoeHandle> handle;
      for (void* const to : {static_cast<void*>(nullptr), static_cast<void*>(out.data())}) {
        tokens.out = to;
        const MoeReceived d = moe.dispatch(tokens, handle);
        handle = d.handle;
        for (int r = 0; r < 3; ++r) {
          const auto sent = rows_of(r);
          EXPECT_EQ(std::memcmp(static_cast<unsigned char*>(d.x) + static_cast<std::size_t>(r) * sent.size(),
                                sent.data(), sent.size()),
                    0);
        }
      }
      EXPECT_EQ(out.back(), 0xee);
    });
}

TEST(Moe, RowsTooWideOrToBeQuantisedAreRefused) {
  on_ranks(2, [](Communicator& comm) {
    const MoeShape shape{.experts = 2, .top_k = 1, .hidden = 4, .max_tokens = 1, .dtype = DType::f32};
    const float x[5] = {};
    const std::int64_t idx = 1;
    MoeTokens tokens{.x = x, .tokens = 1, .topk_idx = &idx, .row_bytes = 17};
    Moe plain(comm, shape), scaled(comm, shape, {.scales = MoeScales::mx});
    EXPECT_EQ(text_of<UsageError>([&] { plain.dispatch(tokens); }),
              "a row of x has 17 bytes, but the moe is made for 16: give rows of at most as many.");
    tokens.row_bytes = 16;
    EXPECT_EQ(
        text_of<UsageError>([&] { scaled.dispatch(tokens); }),
        "x has rows of its own width, but this moe quantises rows of f32: leave row_bytes out, or make a "
        "moe without scales.");
    EXPECT_EQ(plain.dispatch(tokens).rows_now, comm.rank() == 1 ? 2u : 0u);
    tokens.row_bytes = 0;
    EXPECT_EQ(scaled.dispatch(tokens).rows_now, comm.rank() == 1 ? 2u : 0u);
    tokens.row_bytes = comm.rank() == 0 ? 3 : 7;
    EXPECT_TRUE(has(text_of<MismatchError>([&] { plain.dispatch(tokens); }),
                    "rank 0 dispatches rows of 3 bytes by a new routing of at most 1 tokens, without "
                    "weights, but rank 1 rows of "
                    "7 bytes"));
  });
}

TEST(Moe, ACallSaysTheMostTokensOfARank) {
  on_ranks(2, [](Communicator& comm) {
    const MoeShape shape{.experts = 2, .top_k = 1, .hidden = 1, .max_tokens = 4, .dtype = DType::f32};
    const float x[2] = {1, 2};
    const std::int64_t idx[2] = {1, 0};
    Moe moe(comm, shape);
    MoeTokens tokens{.x = x, .tokens = 2, .topk_idx = idx, .max_tokens = 1};
    EXPECT_EQ(text_of<UsageError>([&] { moe.dispatch(tokens); }),
              "there are 2 tokens, but this call's max_tokens is 1: give the most tokens of any rank.");
    tokens.max_tokens = 5;
    EXPECT_EQ(text_of<UsageError>([&] { moe.dispatch(tokens); }),
              "this call's max_tokens is 5, the moe's 4: give at most that, or make the moe for more.");
    tokens.max_tokens = 2;
    const MoeReceived received = moe.dispatch(tokens);
    EXPECT_EQ(received.rows_now, 2u);
    EXPECT_EQ(static_cast<const float*>(received.x)[1], comm.rank() == 0 ? 2 : 1);
    tokens.max_tokens = comm.rank() == 0 ? 2 : 3;
    EXPECT_TRUE(
        has(text_of<MismatchError>([&] { moe.dispatch(tokens); }),
            "by a new routing of at most 2 tokens, without weights, but rank 1 rows of 4 bytes by a new "
            "routing of at most 3 tokens"));
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
    EXPECT_TRUE(
        has(text_of<MismatchError>(
                [&] { moe.dispatch({.x = x, .tokens = 1, .topk_idx = &idx, .more = {&more, 1}}); }),
            "further rows of 4 bytes, but rank 1 rows of 16 bytes by a new routing of at most 1 tokens"));
  });
}

}  // namespace
}  // namespace unisono::test
