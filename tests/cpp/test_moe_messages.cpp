// Dispatch and combine by messages, over several nodes and over the fabric: against loops over the tokens of
// all ranks, and bit for bit against the ranks of one machine.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fabric_here.hpp"
#include "moe_world.hpp"
#include "ranks.hpp"
#include "reference.hpp"
#include "thread_transport.hpp"
#include "unisono/moe.hpp"

namespace unisono::test {
namespace {

// How the ranks reach each other: a letter for each rank names its node, or all are on the fabric.
struct Ranks {
  std::string nodes;
  bool fabric = false;
  bool check = false;

  void run(const std::function<void(Communicator&)>& body,
           const std::shared_ptr<Post>& post = std::make_shared<Post>()) const {
    const int n = static_cast<int>(nodes.size());
    const auto bootstraps = thread_bootstraps(n, std::chrono::seconds(60));
    auto rank = [&](int r) {
      try {
        Communicator::Options options{.timeout_s = 60, .check = check};
        if (fabric) {
          options.fabric = Communicator::Fabric{.provider = "shm"};
        } else {
          options.node = nodes.substr(static_cast<std::size_t>(r), 1);
          options.transport = [&post, r] { return std::make_shared<ThreadTransport>(post, r); };
        }
        Communicator comm(bootstraps[static_cast<std::size_t>(r)], options);
        body(comm);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << " of " << nodes << ": " << error.what();
      }
    };
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r) threads.emplace_back(rank, r);
    for (std::thread& thread : threads) thread.join();
  }
};

class MoeMessages : public testing::TestWithParam<Ranks> {
 protected:
  void SetUp() override {
    if (!ranks.fabric) return;
    if (const std::string why = no_fabric("shm"); !why.empty()) GTEST_SKIP() << why;
  }
  const Ranks ranks = GetParam();
  const int size = static_cast<int>(ranks.nodes.size());
};
INSTANTIATE_TEST_SUITE_P(Over, MoeMessages,
                         testing::Values(Ranks{"ab"}, Ranks{"aabb"}, Ranks{"abaab"},
                                         Ranks{.nodes = "abcab", .check = true},
                                         Ranks{.nodes = "aaa", .fabric = true},
                                         Ranks{.nodes = "aa", .fabric = true, .check = true}),
                         [](const auto& info) {
                           return info.param.nodes + (info.param.fabric ? "_fabric" : "") +
                                  (info.param.check ? "_checked" : "");
                         });

TEST_P(MoeMessages, BringTokensToTheirExpertsAndBack) {
  const MoeWorld world(size, 23, 3, 301);
  for (const MoeLayout layout : {MoeLayout::flat, MoeLayout::rank_major, MoeLayout::expert_major})
    ranks.run([&](Communicator& comm) {
      Moe moe(comm, world.shape(), {.layout = layout});
      for (int round = 0; round < 6; ++round) world.check(comm, moe, round);
    });
}

// The tokens that a rank sends in a round, and the rows that have come, with each byte that the contract
// says.
class Recorder {
 public:
  Recorder(Communicator& comm, Moe& moe) : moe_(moe), ranks_(comm.size()), rank_(comm.rank()) {}

  Bytes seen;

  void round(int number) {
    const MoeShape& shape = moe_.shape();
    std::mt19937 random(static_cast<unsigned>(number * 100 + rank_));
    const std::size_t tokens = (number + rank_) % 4 == 3 ? 0 : random() % (shape.max_tokens + 1);
    const auto k = static_cast<std::size_t>(shape.top_k);
    std::vector<std::int32_t> idx(tokens * k);
    for (std::int32_t& one : idx)
      one =
          random() % 6 == 0 ? -1 : static_cast<std::int32_t>(random() % static_cast<unsigned>(shape.experts));
    const std::vector<float> weights = values(random, tokens * k);
    const Bytes bytes = random_bytes(tokens * 47, random());
    const MoePayload more[] = {{bytes.data(), 7}, {bytes.data() + tokens * 7, 40}};
    const bool weighted = number % 3 != 2;
    MoeTokens sent{.tokens = tokens, .topk_idx = idx.data(), .index = DType::i32, .more = more};
    if (weighted) sent.weights = weights.data();
    const Bytes first = elements(random, tokens * shape.hidden),
                second = elements(random, tokens * shape.hidden);
    sent.x = first.data();
    const MoeReceived received = moe_.dispatch(sent);
    record(received, {7, 40}, weighted);
    combine(random, received, tokens, number % 2 == 1);
    // the same routing again, to the caller's memory
    Bytes out(moe_.rows_held() * x_bytes());
    const std::size_t own = moe_.options().scales == MoeScales::none && number % 2 == 0 ? 21 : 0;
    sent = {.x = second.data(), .tokens = tokens, .row_bytes = own, .out = out.data()};
    const MoeReceived again = moe_.dispatch(sent, received.handle);
    EXPECT_EQ(again.x, out.data());
    record(again, {}, false, own);
    combine(random, again, tokens, false);
  }

 private:
  static std::vector<float> values(std::mt19937& random, std::size_t count) {
    std::vector<float> made(count);
    for (float& one : made) one = static_cast<float>(random() % 4096) / 1024 - 2;
    return made;
  }
  Bytes elements(std::mt19937& random, std::size_t count) const {
    const DType dtype = moe_.shape().dtype;
    Bytes made(count * size_of(dtype));
    for (std::size_t i = 0; i < count; ++i) {
      const float value =
          std::ldexp(static_cast<float>(random() % 4096) / 2048 - 1, static_cast<int>(random() % 9));
      if (dtype == DType::f32) put(made.data(), i, value);
      else put(made.data(), i, static_cast<std::uint16_t>(encode(*format_of(dtype), value)));
    }
    return made;
  }
  std::size_t x_bytes() const {
    const MoeShape& shape = moe_.shape();
    return moe_.options().scales == MoeScales::none ? shape.hidden * size_of(shape.dtype) : shape.hidden;
  }

  void add(const void* from, std::size_t bytes) {
    const auto* at = static_cast<const std::byte*>(from);
    seen.insert(seen.end(), at, at + bytes);
  }
  // own: bytes of a row of x that are not the Moe's.
  void record(const MoeReceived& got, const std::vector<std::size_t>& widths, bool weighted,
              std::size_t own = 0) {
    const auto local = static_cast<std::size_t>(moe_.local_experts());
    const auto k = static_cast<std::size_t>(moe_.shape().top_k), rows = static_cast<std::size_t>(*got.rows);
    const MoeLayout layout = moe_.options().layout;
    add(got.rows, 4);
    add(got.dropped, 4);
    add(got.counts, local * 4);
    add(got.offsets, local * 4 + 4);
    add(got.source_rows, static_cast<std::size_t>(ranks_) * 4);
    EXPECT_EQ(got.rows_now, rows);
    EXPECT_EQ(got.weights != nullptr, weighted);
    ASSERT_EQ(got.more.size(), widths.size());
    const auto add_rows = [&](const void* array, std::size_t width) {
      const auto* at = static_cast<const std::byte*>(array);
      if (layout != MoeLayout::rank_major) return add(at, rows * width);
      for (int r = 0; r < ranks_; ++r)
        add(at + static_cast<std::size_t>(r) * moe_.shape().max_tokens * width,
            static_cast<std::size_t>(got.source_rows[r]) * width);
    };
    add_rows(got.x, own > 0 ? own : x_bytes());
    add_rows(got.scales, moe_.scale_bytes());
    for (std::size_t m = 0; m < widths.size(); ++m) add_rows(got.more[m], widths[m]);
    const std::size_t described = layout == MoeLayout::rank_major ? got.rows_held : rows;
    if (layout == MoeLayout::expert_major) {
      add(got.row_expert, got.rows_held * 4);
      if (weighted) add(got.weights, rows * 4);
    } else {
      add(got.topk_idx, described * k * 4);
      add(got.expert_rows, static_cast<std::size_t>(got.offsets[local]) * 4);
      if (weighted) add(got.weights, described * k * 4);
    }
  }
  void combine(std::mt19937& random, const MoeReceived& got, std::size_t tokens, bool biased) {
    const MoeShape& shape = moe_.shape();
    const Bytes y = elements(random, got.rows_held * shape.hidden),
                bias = elements(random, tokens * shape.hidden);
    Bytes out(tokens * shape.hidden * size_of(shape.dtype));
    moe_.combine({.y = y.data(),
                  .row_bytes = shape.hidden * size_of(shape.dtype),
                  .dtype = shape.dtype,
                  .bias = biased ? bias.data() : nullptr,
                  .out = out.data()},
                 got.handle);
    add(out.data(), out.size());
  }

  Moe& moe_;
  int ranks_, rank_;
};

std::vector<Bytes> seen_by(const Ranks& ranks, const MoeShape& shape, const MoeOptions& options) {
  std::vector<Bytes> seen(ranks.nodes.size());
  ranks.run([&](Communicator& comm) {
    Moe moe(comm, shape, options);
    Recorder recorder(comm, moe);
    for (int round = 0; round < (UNISONO_SANITIZED ? 3 : 6); ++round) recorder.round(round);
    seen[static_cast<std::size_t>(comm.rank())] = std::move(recorder.seen);
  });
  return seen;
}

TEST_P(MoeMessages, GiveTheBitsOfOneMachine) {
  const Ranks machine{std::string(ranks.nodes.size(), 'a')};
  int cases = 0;
  for (const MoeLayout layout : {MoeLayout::flat, MoeLayout::rank_major, MoeLayout::expert_major})
    for (const MoeScales scales : {MoeScales::none, MoeScales::e4m3_128, MoeScales::mx})
      for (const bool drops : {false, true}) {
        if (drops && layout == MoeLayout::rank_major) continue;
        MoeOptions options{.layout = layout, .scales = scales, .drop = drops, .more_bytes = 47};
        if (drops) options.capacity = 19;
        if (layout == MoeLayout::expert_major) options.alignment = drops ? 1 : 4;
        const MoeShape shape{.experts = 3 * size,
                             .top_k = 3,
                             .hidden = 133,
                             .max_tokens = 17,
                             .dtype = cases++ % 2 ? DType::bf16 : DType::f32};
        const auto expected = seen_by(machine, shape, options), got = seen_by(ranks, shape, options);
        for (std::size_t r = 0; r < expected.size(); ++r) {
          EXPECT_FALSE(expected[r].empty());
          EXPECT_TRUE(expected[r] == got[r])
              << "rank " << r << ", layout " << static_cast<int>(layout) << ", scales "
              << static_cast<int>(scales) << ", drops " << drops;
        }
      }
}

// Both phases send all that they send at their begin.
TEST(MoeAcrossNodes, SendsATokenOnceToEachOtherNodeAndASumForEachRank) {
  for (const std::string nodes : {"aabb", "abb", "abaabc", "aaabbbb"}) {
    const auto post = std::make_shared<Post>();
    const auto body = [&](Communicator& comm) {
      const MoeShape shape{
          .experts = 2 * comm.size(), .top_k = 4, .hidden = 37, .max_tokens = 29, .dtype = DType::f32};
      const std::size_t row = shape.hidden * sizeof(float),
                        tokens = 29 - static_cast<std::size_t>(comm.rank());
      std::mt19937 random(static_cast<unsigned>(comm.rank()));
      std::vector<std::int64_t> idx(tokens * 4);
      std::size_t copies = 0, sums = 0;
      for (std::size_t t = 0; t < tokens; ++t) {
        std::set<char> others;
        for (std::size_t i = t * 4; i < t * 4 + 4; ++i) {
          idx[i] = static_cast<int>(random() % static_cast<unsigned>(shape.experts + 1)) - 1;
          if (idx[i] >= 0) others.insert(nodes[static_cast<std::size_t>(idx[i] / 2)]);
        }
        others.erase(nodes[static_cast<std::size_t>(comm.rank())]);
        copies += others.size();
      }
      const std::vector<std::int64_t> masked(idx.size(), -1);
      const std::vector<float> x(tokens * shape.hidden), weights(idx.size());
      Moe moe(comm, shape);
      MoeReceived received;
      // Returns the bytes of a dispatch.
      const auto bytes = [&](const std::vector<std::int64_t>& experts,
                             const std::optional<MoeHandle>& handle = {}) {
        const std::size_t before = post->bytes_of(comm.rank());
        moe.dispatch_begin(
            {.x = x.data(), .tokens = tokens, .topk_idx = experts.data(), .weights = weights.data()}, handle);
        const std::size_t begun = post->bytes_of(comm.rank());
        received = moe.dispatch_end();
        EXPECT_EQ(post->bytes_of(comm.rank()), begun);
        return begun - before;
      };
      const std::size_t told = bytes(masked);  // what the ranks tell each other
      EXPECT_EQ(bytes(idx) - told, copies * (row + 4 * (sizeof(std::int32_t) + sizeof(float)))) << nodes;
      EXPECT_EQ(bytes(idx, received.handle) - told, copies * (row + 4 * sizeof(float))) << nodes;
      for (std::size_t r = 0; r < nodes.size(); ++r)
        if (nodes[r] != nodes[static_cast<std::size_t>(comm.rank())])
          sums += static_cast<std::size_t>(received.source_rows[r]);
      const std::size_t before = post->bytes_of(comm.rank());
      const std::vector<float> y(moe.rows_held() * shape.hidden);
      std::vector<float> out(x.size());
      moe.combine_begin({.y = y.data(), .row_bytes = row, .dtype = DType::f32, .out = out.data()},
                        received.handle);
      EXPECT_EQ(post->bytes_of(comm.rank()) - before, sums * row);
      moe.combine_end();
      EXPECT_EQ(post->bytes_of(comm.rank()) - before, sums * row);
    };
    Ranks{nodes}.run(body, post);
  }
}

TEST_P(MoeMessages, AreNotSentForRowsWithoutRoom) {
  ranks.run([&](Communicator& comm) {
    const int n = comm.size();
    Moe moe(comm, {.experts = n, .top_k = 1, .hidden = 1, .max_tokens = 4, .dtype = DType::f32},
            {.capacity = 5});
    const float x[4] = {};
    const std::int64_t crowded[4] = {1, 1, 1, 1}, spread[4] = {0, 1, -1, -1};
    EXPECT_TRUE(has(text_of<ResourceError>([&] { moe.dispatch({.x = x, .tokens = 4, .topk_idx = crowded}); }),
                    "rank 1 would receive " + std::to_string(4 * n) + " rows"));
    const MoeReceived received = moe.dispatch({.x = x, .tokens = 4, .topk_idx = spread});
    EXPECT_EQ(received.rows_now, comm.rank() < 2 ? static_cast<std::size_t>(n) : 0u);
  });
}

TEST_P(MoeMessages, OfRanksThatDifferFail) {
  ranks.run([&](Communicator& comm) {
    Moe moe(comm, {.experts = comm.size(), .top_k = 1, .hidden = 4, .max_tokens = 1, .dtype = DType::f32},
            {.more_bytes = 8});
    const float x[4] = {};
    const std::int64_t idx = 0;
    const MoePayload more{.data = x, .row_bytes = comm.rank() == 1 ? 8u : 4u};
    const MoeTokens tokens{.x = x, .tokens = 1, .topk_idx = &idx, .more = {&more, 1}};
    EXPECT_TRUE(has(text_of<MismatchError>([&] { moe.dispatch(tokens); }), "further rows of 4 bytes"));
    EXPECT_TRUE(has(text_of<MismatchError>([&] { moe.dispatch(tokens); }), "further rows of 4 bytes"));
  });
}

}  // namespace
}  // namespace unisono::test
