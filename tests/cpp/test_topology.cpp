// The nodes of ranks, the greetings by which they find them, and the algorithm that follows from the nodes.
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "base/process.hpp"
#include "nodes/sums.hpp"
#include "nodes/topology.hpp"
#include "ranks.hpp"

namespace unisono::nodes {
namespace {

using test::has;
using test::text_of;

std::vector<std::string> letters(const std::string& layout) {
  std::vector<std::string> names;
  for (const char one : layout) names.emplace_back(1, one);
  return names;
}

using Nodes = std::vector<std::vector<int>>;

TEST(Topology, OfRanks) {
  const Topology place(2, {"1/a", "1/a", "2/a", "2/a"});
  EXPECT_EQ(place.nodes, (Nodes{{0, 1}, {2, 3}}));
  EXPECT_EQ(place.node, 1);
  EXPECT_EQ(place.local(), (std::vector{2, 3}));
  EXPECT_EQ(place.local_rank, 0);
  EXPECT_EQ(place.size(), 4);
  EXPECT_EQ(place.others, std::vector{0});
  EXPECT_EQ(place.peers, (std::vector{0, 1, 3}));
  EXPECT_EQ(place.counterpart(0), 0);
  EXPECT_EQ(place.local_number(3), 1);
  EXPECT_EQ(place.local_number(0), -1);
  EXPECT_TRUE(place.in_order && place.uniform() && place.together && !place.apart());
  EXPECT_EQ(place.who(2), "rank 2 (node 1)");

  const Topology middle(1, letters("abcd"));
  EXPECT_EQ(middle.others, (std::vector{2, 3, 0})) << "from the next one on";
  EXPECT_TRUE(middle.apart());

  const Topology round_robin(0, letters("abab"));
  EXPECT_EQ(round_robin.nodes, (Nodes{{0, 2}, {1, 3}}));
  EXPECT_TRUE(round_robin.even && !round_robin.in_order && !round_robin.together && !round_robin.uniform());

  const Topology uneven(2, letters("aaab"));
  EXPECT_TRUE(uneven.in_order && !uneven.even && !uneven.uniform());
  EXPECT_EQ(uneven.counterpart(1), 3) << "a smaller node's ranks serve several";
}

// A rank's greeting, in the words that `meet` sends.
struct Words {
  enum Place : std::size_t { kMagic, kVersion, kRank, kCheck, kBoot, kCores, kNode = kCores + 16 };
  std::vector<std::string> all;
  // Makes another rank's greeting of this one's text.
  Words(const std::string& text, int rank) {
    std::istringstream in(text);
    for (std::string word; in >> word;) all.push_back(word);
    all[kRank] = std::to_string(rank);
  }
  std::string text() const {
    std::string whole;
    for (const std::string& word : all) whole += (whole.empty() ? "" : " ") + word;
    return whole;
  }
  // boot: 0 keeps this machine's.
  Words& on(std::uint64_t boot, std::uint64_t cores) {
    if (boot) all[kBoot] = std::to_string(boot);
    for (std::size_t i = kCores; i < kNode; ++i) all[i] = std::to_string(i == kCores ? cores : 0);
    return *this;
  }
};

// The bootstrap of a rank alone. `change` makes the others' greetings of the rank's own.
class Alone final : public Bootstrap {
 public:
  using Change = std::function<std::string(int rank, const std::string& greeting)>;
  Alone(int rank, int size, Change change) : rank_(rank), size_(size), change_(std::move(change)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& data) override {
    std::vector<std::string> all;
    for (int r = 0; r < size_; ++r) all.push_back(change_(r, data));
    return all;
  }

 private:
  int rank_, size_;
  Change change_;
};

// Compares the ranks of one boot with the cores of all of them, however each is bound.
TEST(Topology, OfACrowdedMachine) {
  const auto crowded = [](int rank, const std::vector<std::uint64_t>& cores) {
    Alone bootstrap(rank, 4, [&](int r, const std::string& greeting) {
      const std::uint64_t other_boot = this_boot() + 1;
      return Words(greeting, r).on(r == 3 ? other_boot : 0, cores[static_cast<std::size_t>(r)]).text();
    });
    return meet(bootstrap, "", false).crowded;
  };
  EXPECT_FALSE(crowded(0, {0b001, 0b010, 0b100, 0b1}));
  EXPECT_TRUE(crowded(0, {0b001, 0b010, 0b011, 0b1}));
  EXPECT_FALSE(crowded(0, {0b111, 0b111, 0b111, 0b1}));
  EXPECT_TRUE(crowded(0, {0b011, 0b011, 0b011, 0b111})) << "another boot's cores do not count";
}

TEST(Topology, OfNames) {
  const auto bootstraps = thread_bootstraps(4, std::chrono::seconds(60));
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r)
    threads.emplace_back([&, r] {
      const Topology place = meet(*bootstraps[static_cast<std::size_t>(r)],
                                  r < 2    ? ""
                                  : r == 2 ? "left"
                                           : "right",
                                  false);
      EXPECT_EQ(place.nodes, (Nodes{{0, 1}, {2}, {3}}));
    });
  for (std::thread& thread : threads) thread.join();
  Alone bootstrap(0, 1, [](int, const std::string& greeting) { return greeting; });
  EXPECT_TRUE(has(text_of<UsageError>([&] { meet(bootstrap, std::string(65, 'x'), false); }),
                  "is too long: name the node in 64 letters"));
  meet(bootstrap, std::string(64, 'x'), false);
}

TEST(Topology, OfGreetingsThatAreRefused) {
  const auto refused = [](const std::function<void(Words&)>& change) {
    Alone bootstrap(0, 3, [&](int r, const std::string& greeting) {
      Words words(greeting, r);
      if (r == 1) change(words);
      return words.text();
    });
    return text_of<UsageError>([&] { meet(bootstrap, "a", false); });
  };
  EXPECT_TRUE(has(refused([](Words& words) { words.all[Words::kVersion] = "0.0.1"; }),
                  "rank 1 runs Unisono 0.0.1, this rank Unisono "));
  EXPECT_TRUE(has(refused([](Words& words) { words.all[Words::kMagic] = "GET"; }),
                  "rank 1 runs another program, or another version of Unisono, this rank"));
  EXPECT_TRUE(has(refused([](Words& words) { words.all.clear(); }), "rank 1 runs another program"));
  const std::string unreadable = "rank 1 sent a greeting that cannot be read: start every rank";
  EXPECT_TRUE(has(refused([](Words& words) { words.all.resize(2); }), unreadable));
  EXPECT_TRUE(has(refused([](Words& words) { words.all.pop_back(); }), unreadable));
  EXPECT_TRUE(has(refused([](Words& words) { words.all[Words::kCores] = "-x"; }), unreadable));
  EXPECT_TRUE(has(refused([](Words& words) { words.all[Words::kCheck] = "1"; }),
                  "of all ranks only 1 check their calls: give"));
  EXPECT_TRUE(
      has(refused([](Words& words) { words.all[Words::kRank] = "0"; }), "two ranks are numbered 0: give"));

  class Short final : public Bootstrap {
    int rank() const override { return 0; }
    int size() const override { return 2; }
    std::vector<std::string> all_gather(const std::string& data) override { return {data}; }
  } bootstrap;
  EXPECT_TRUE(has(text_of<UsageError>([&] { meet(bootstrap, "a", false); }),
                  "gave 1 greetings for 2 ranks: return one entry for each rank."));
}

// Returns the algorithm, which is the same on every rank.
Algorithm chosen(const std::string& layout, Collective collective, double wide = 1, int root = 0,
                 std::size_t bytes = std::size_t{1} << 30) {
  const auto on = [&](int rank) {
    return choose(collective, Topology(rank, letters(layout)), Limits{}, bytes, wide, root);
  };
  for (int rank = 1; rank < static_cast<int>(layout.size()); ++rank)
    EXPECT_EQ(on(rank), on(0)) << layout << " on rank " << rank;
  return on(0);
}

// The comments compare two_shot with chain, by the traffic of the busiest node in multiples of an input.
TEST(Topology, ChoosesTheAlgorithm) {
  using enum Algorithm;
  using enum Collective;
  const struct {
    const char* layout;
    Collective collective;
    double wide;
    int root;
    Algorithm algorithm;
  } rows[] = {
      {"ab", all_reduce, 1, 0, one_shot},
      {"abc", all_reduce, 1, 0, two_shot},
      {"aabb", all_reduce, 1, 0, chain},      // 1.5 against 1
      {"aabb", all_reduce, 2, 0, two_shot},   // 1.5 against 2
      {"aabbcc", all_reduce, 1, 0, chain},    // 2 against 2
      {"aaaabbbb", all_reduce, 2, 0, chain},  // 2.5 against 2
      {"ab", reduce, 1, 0, one_shot},
      {"abc", reduce, 1, 0, chain},                   // 1.33 against 1
      {"aabb", reduce, 1, 0, chain},                  // 1.5 against 1
      {"aabb", reduce, 2, 0, two_shot},               // 1.5 against 2
      {"aaaabbbb", reduce, 2, 7, chain},              // 2.5 against 2
      {"aabbcc", reduce, 1, 2, two_shot},             // 2 against 2: the root's node is within the chain
      {"aabbcc", reduce, 1, 5, chain},                // 2 against 1
      {"aabb", reduce_scatter, 1, 0, two_shot},       // 1 against 1
      {"aaabbb", reduce_scatter, 1, 0, chain},        // 1.5 against 1
      {"aabbcc", reduce_scatter, 1, 0, two_shot},     // 1.33 against 1.33
      {"aaaabbbbcccc", reduce_scatter, 2, 0, chain},  // 2.67 against 2.33
      {"ababab", reduce, 1, 0, two_shot},
      {"aaaabbb", reduce_scatter, 1, 0, two_shot},
  };
  for (const auto& row : rows)
    EXPECT_EQ(chosen(row.layout, row.collective, row.wide, row.root), row.algorithm)
        << row.layout << " " << name_of(row.collective) << " wide " << row.wide << " to " << row.root;
  const Limits limits{};
  for (const Collective collective : {all_reduce, reduce}) {
    EXPECT_EQ(chosen("abc", collective, 1, 0, limits.one_shot / 3), one_shot);
    EXPECT_EQ(chosen("abc", collective, 1, 0, limits.one_shot / 3 + 1), two_shot);
  }
  EXPECT_EQ(chosen("aaaabbbb", reduce, 1, 0, limits.chain - 1), two_shot);
  EXPECT_EQ(chosen("aabb", reduce, 1, 0, limits.chain), two_shot) << "4 blocks take as long as 6";
  EXPECT_EQ(chosen("aaaabbbb", reduce, 1, 0, limits.chain), chain);
}

}  // namespace
}  // namespace unisono::nodes
