// The tokens of all ranks, their experts, and what dispatch and combine must bring, by loops.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "unisono/moe.hpp"

namespace unisono::test {

class MoeWorld {
 public:
  // Ranks have different numbers of tokens, the second one none. An eighth of the experts is masked.
  MoeWorld(int ranks, int most_tokens, int top_k, std::size_t hidden)
      : ranks_(ranks), experts_(4 * ranks), top_k_(top_k), most_(most_tokens), hidden_(hidden) {}

  MoeShape shape() const {
    return {.experts = experts_,
            .top_k = top_k_,
            .hidden = hidden_,
            .max_tokens = static_cast<std::size_t>(most_),
            .dtype = DType::f32};
  }

  // Runs a dispatch and a combine, and compares every row. Experts add their number to a token.
  void check(Communicator& comm, Moe& moe, int round) const {
    std::vector<Tokens> all;
    for (int r = 0; r < ranks_; ++r) all.push_back(tokens_of(r, round));
    const Tokens& mine = all[static_cast<std::size_t>(comm.rank())];
    const bool pairs = moe.options().layout == MoeLayout::expert_major;
    const MoeReceived d = moe.dispatch(
        {.x = mine.x.data(), .tokens = mine.n, .topk_idx = mine.idx.data(), .weights = mine.weights.data()});
    std::vector<float> y(moe.rows_held() * hidden_);
    std::vector<int> expected_counts(static_cast<std::size_t>(moe.local_experts()), 0);
    std::size_t row = 0;
    const auto compare = [&](const float* x) {
      ASSERT_EQ(std::memcmp(static_cast<float*>(d.x) + row * hidden_, x, hidden_ * sizeof(float)), 0)
          << "row " << row << " of rank " << comm.rank() << ", round " << round;
    };
    const int first = comm.rank() * moe.local_experts(), end = first + moe.local_experts();
    if (pairs) {
      for (int e = first; e < end; ++e)
        for (const Tokens& source : all)
          for (std::size_t t = 0; t < source.n; ++t)
            for (int k = 0; k < top_k_; ++k)
              if (source.expert(t, k) == e) {
                compare(source.row(t));
                EXPECT_EQ(d.row_expert[row], e - first);
                EXPECT_EQ(d.weights[row], source.weight(t, k));
                for (std::size_t h = 0; h < hidden_; ++h)
                  y[row * hidden_ + h] = source.row(t)[h] + static_cast<float>(e);
                ++row;
              }
    } else {
      for (int s = 0; s < ranks_; ++s) {
        const Tokens& source = all[static_cast<std::size_t>(s)];
        if (moe.options().layout == MoeLayout::rank_major) row = static_cast<std::size_t>(s * most_);
        for (std::size_t t = 0; t < source.n; ++t) {
          if (!source.goes_to(t, first, end)) continue;
          compare(source.row(t));
          for (int k = 0; k < top_k_; ++k) {
            const int e = source.expert(t, k), local = e >= first && e < end ? e - first : -1;
            EXPECT_EQ(d.topk_idx[row * static_cast<std::size_t>(top_k_) + static_cast<std::size_t>(k)],
                      local);
          }
          for (std::size_t h = 0; h < hidden_; ++h) y[row * hidden_ + h] = source.sum(t, first, end, h);
          ++row;
        }
      }
    }
    EXPECT_EQ(d.rows_now, static_cast<std::size_t>(*d.rows));
    std::vector<float> out(mine.n * hidden_ + 1, -1.0F);
    moe.combine({.y = y.data(), .row_bytes = hidden_ * sizeof(float), .dtype = DType::f32, .out = out.data()},
                d.handle);
    for (std::size_t t = 0; t < mine.n; ++t)
      for (std::size_t h = 0; h < hidden_; ++h) {
        float sum = 0;
        bool any = false;
        for (int r = 0; r < ranks_; ++r) {
          const int from = r * moe.local_experts(), to = from + moe.local_experts();
          if (!mine.goes_to(t, from, to)) continue;
          const float part = mine.sum(t, from, to, h);
          sum = any ? sum + part : part;
          any = true;
        }
        ASSERT_EQ(out[t * hidden_ + h], sum) << "token " << t << " of rank " << comm.rank();
      }
    EXPECT_EQ(out.back(), -1.0F);
  }

 private:
  struct Tokens {
    std::size_t n = 0, hidden = 0;
    int top_k = 0;
    std::vector<float> x, weights;
    std::vector<std::int64_t> idx;
    const float* row(std::size_t t) const { return x.data() + t * hidden; }
    int expert(std::size_t t, int k) const { return static_cast<int>(idx[at(t, k)]); }
    float weight(std::size_t t, int k) const { return weights[at(t, k)]; }
    bool goes_to(std::size_t t, int first, int end) const {
      for (int k = 0; k < top_k; ++k)
        if (expert(t, k) >= first && expert(t, k) < end) return true;
      return false;
    }
    // The weighted sum over the experts from `first` to `end`, in the order of the top-k.
    float sum(std::size_t t, int first, int end, std::size_t h) const {
      float all = 0;
      bool any = false;
      for (int k = 0; k < top_k; ++k) {
        const int e = expert(t, k);
        if (e < first || e >= end) continue;
        const float part = weight(t, k) * (row(t)[h] + static_cast<float>(e));
        all = any ? all + part : part;
        any = true;
      }
      return all;
    }
    std::size_t at(std::size_t t, int k) const {
      return t * static_cast<std::size_t>(top_k) + static_cast<std::size_t>(k);
    }
  };

  Tokens tokens_of(int rank, int round) const {
    std::mt19937 random(static_cast<unsigned>(rank * 1000 + round));
    Tokens made;
    made.n = rank == 1 ? 0 : random() % static_cast<unsigned>(most_ + 1);
    made.hidden = hidden_;
    made.top_k = top_k_;
    std::uniform_real_distribution<float> value(-1, 1);
    for (std::size_t i = 0; i < made.n * hidden_; ++i) made.x.push_back(value(random));
    for (std::size_t i = 0; i < made.n * static_cast<std::size_t>(top_k_); ++i) {
      made.idx.push_back(random() % 8 == 0 ? -1
                                           : static_cast<int>(random() % static_cast<unsigned>(experts_)));
      made.weights.push_back(value(random));
    }
    return made;
  }

  int ranks_, experts_, top_k_, most_;
  std::size_t hidden_;
};

}  // namespace unisono::test
