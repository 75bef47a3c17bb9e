// Tests collectives across nodes, over a transport between threads: every layout and algorithm against a
// reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "nodes_world.hpp"

namespace unisono::test {
namespace {

class Layout : public testing::TestWithParam<const char*> {};

TEST_P(Layout, Moves) {
  World{GetParam()}.run([](Communicator::Impl& comm) {
    const int n = comm.size(), me = comm.rank();
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{37}, std::size_t{70000}}) {
      const auto all = count * static_cast<std::size_t>(n);
      std::vector<Bytes> inputs;
      for (int r = 0; r < n; ++r) inputs.push_back(rank_bytes(r, all));
      const Bytes& mine = inputs[static_cast<std::size_t>(me)];
      auto block = [&](const Bytes& all_blocks, int index) {
        return all_blocks.data() + count * static_cast<std::size_t>(index);
      };
      auto same = [&](const byte* a, const byte* b, std::size_t bytes, const char* what) {
        EXPECT_TRUE(bytes == 0 || std::memcmp(a, b, bytes) == 0)
            << what << " of " << count << " on rank " << me;
      };
      Bytes out(all + 1);
      comm.run(request(comm, Collective::all_gather,
                       {.in = mine.data(), .out = out.data(), .count = count, .dtype = DType::u8}));
      for (int r = 0; r < n; ++r)
        same(block(out, r), inputs[static_cast<std::size_t>(r)].data(), count, "all_gather");
      for (const bool in_place : {false, true}) {
        Bytes x = mine, y(all + 1);
        byte* to = in_place ? x.data() : y.data();
        comm.run(request(comm, Collective::all_to_all,
                         {.in = x.data(), .out = to, .count = count, .dtype = DType::u8}));
        for (int r = 0; r < n; ++r)
          same(to + count * static_cast<std::size_t>(r), block(inputs[static_cast<std::size_t>(r)], me),
               count, "all_to_all");
      }
      for (int root = 0; root < n; ++root) {
        const Bytes& at_root = inputs[static_cast<std::size_t>(root)];
        Call call{.in = mine.data(), .out = out.data(), .count = count, .dtype = DType::u8, .root = root};
        comm.run(request(comm, Collective::broadcast, call));
        same(out.data(), at_root.data(), count, "broadcast");
        comm.run(request(comm, Collective::scatter, call));
        same(out.data(), block(at_root, me), count, "scatter");
        comm.run(request(comm, Collective::gather, call));
        for (int r = 0; me == root && r < n; ++r)
          same(block(out, r), inputs[static_cast<std::size_t>(r)].data(), count, "gather");
      }
      // parts of all lengths, some of them empty
      std::vector<std::size_t> sends, receives;
      for (int r = 0; r < n; ++r) {
        sends.push_back(static_cast<std::size_t>((me * 3 + r * 5) % 4) * count / 3);
        receives.push_back(static_cast<std::size_t>((r * 3 + me * 5) % 4) * count / 3);
      }
      const Bytes x = rank_bytes(me, std::accumulate(sends.begin(), sends.end(), std::size_t{0}));
      Bytes y(std::accumulate(receives.begin(), receives.end(), std::size_t{0}) + 1);
      const Call call{.in = x.data(), .out = y.data(), .dtype = DType::u8};
      comm.run({call, me, n, sends, receives});
      std::size_t at = 0;
      for (int r = 0; r < n; ++r) {
        std::size_t from = 0;
        for (int q = 0; q < me; ++q) from += static_cast<std::size_t>((r * 3 + q * 5) % 4) * count / 3;
        const std::size_t length = receives[static_cast<std::size_t>(r)];
        const Bytes sent = rank_bytes(r, from + length);
        same(y.data() + at, sent.data() + from, length, "all_to_all_v");
        at += length;
      }
      const int ahead = (me + 1) % n, behind = (me + n - 1) % n;
      const Call ring{.in = mine.data(), .out = out.data(), .count = count, .dtype = DType::u8};
      comm.run_pair({Collective::send_recv, ring, me, n, ahead, behind}, ahead, behind);
      same(out.data(), inputs[static_cast<std::size_t>(behind)].data(), count, "send_recv");
      comm.barrier();
    }
  });
}

TEST_P(Layout, Sums) {
  World{GetParam(), kSmall}.run([](Communicator::Impl& comm) {
    const int n = comm.size(), me = comm.rank();
    const bool uniform = [&] {
      const auto all = comm.nodes();
      for (const auto& ranks : all)
        if (ranks.size() != all[0].size() ||
            ranks.back() - ranks.front() + 1 != static_cast<int>(ranks.size()))
          return false;
      return true;
    }();
    for (const auto& [dtype, op] : {std::pair(DType::f32, Op::sum),
                                    {DType::bf16, Op::avg},
                                    {DType::f16, Op::prod},
                                    {DType::i32, Op::max},
                                    {DType::u8, Op::avg},
                                    {DType::i8, Op::band},
                                    {DType::i32, Op::bor},
                                    {DType::i64, Op::bxor},
                                    {DType::f8e4m3, Op::sum}}) {
      for (const std::size_t count : {std::size_t{1}, std::size_t{33}, std::size_t{1001}}) {
        const std::size_t bytes = count * size_of(dtype), all = bytes * static_cast<std::size_t>(n);
        std::vector<Bytes> inputs;
        std::vector<const byte*> sources;
        for (int r = 0; r < n; ++r) inputs.push_back(rank_bytes(r, all));
        for (const Bytes& one : inputs) sources.push_back(one.data());
        const Bytes whole = reduced(dtype, op, sources, count * static_cast<std::size_t>(n));
        auto right = [&, d = dtype](const byte* got, const byte* expected, const char* what,
                                    std::string_view how) {
          EXPECT_EQ(first_difference(d, expected, got, count), -1)
              << what << " " << how << " of " << count << " " << name_of(d) << " on rank " << me;
        };
        std::vector<std::string_view> ways{"", "one_shot", "two_shot"};
        if (uniform) ways.push_back("chain");
        for (const std::string_view how : ways) {
          for (const bool in_place : {false, true}) {
            Bytes x = inputs[static_cast<std::size_t>(me)], y(all);
            byte* to = in_place ? x.data() : y.data();
            comm.run(request(
                comm, Collective::all_reduce,
                {.in = x.data(), .out = to, .count = count, .dtype = dtype, .op = op, .algorithm = how}));
            right(to, whole.data(), "all_reduce", how);
            for (int root = 0; root < n; ++root) {
              Bytes z = inputs[static_cast<std::size_t>(me)];
              byte* at = in_place ? z.data() : y.data();
              comm.run(request(comm, Collective::reduce,
                               {.in = z.data(),
                                .out = at,
                                .count = count,
                                .dtype = dtype,
                                .op = op,
                                .root = root,
                                .algorithm = how}));
              if (me == root) right(at, whole.data(), "reduce", how);
              else EXPECT_EQ(z, inputs[static_cast<std::size_t>(me)]) << "reduce has changed an input";
            }
            if (how == "one_shot") continue;
            Bytes z = inputs[static_cast<std::size_t>(me)];
            byte* at = in_place ? z.data() + bytes * static_cast<std::size_t>(me) : y.data();
            comm.run(request(
                comm, Collective::reduce_scatter,
                {.in = z.data(), .out = at, .count = count, .dtype = dtype, .op = op, .algorithm = how}));
            right(at, whole.data() + bytes * static_cast<std::size_t>(me), "reduce_scatter", how);
          }
        }
      }
    }
  });
}

// Each rank has a factor of its own, and inputs beside the output stay as they were.
TEST_P(Layout, ScaledSums) {
  for (const bool check : {false, true})
    World{.layout = GetParam(), .limits = kSmall, .check = check}.run([check](Communicator::Impl& comm) {
      constexpr double kFactors[] = {0.1, 1, -2.5, 1.0 / 3, 3e-5, 0};
      const int n = comm.size(), me = comm.rank();
      const auto ranks = static_cast<std::size_t>(n), mine = static_cast<std::size_t>(me);
      for (const DType dtype : {check ? DType::f16 : DType::f32, check ? DType::f64 : DType::bf16})
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1001}})
          for (const bool in_place : {false, true}) {
            const std::size_t bytes = count * size_of(dtype), all = bytes * ranks;
            std::vector<Bytes> inputs;
            std::vector<const byte*> sources;
            for (int r = 0; r < n; ++r) inputs.push_back(scaled(dtype, rank_bytes(r, all), kFactors[r]));
            for (const Bytes& one : inputs) sources.push_back(one.data());
            const Bytes whole = reduced(dtype, Op::sum, sources, count * ranks), kept = rank_bytes(me, all);
            const auto check_sum = [&](Collective collective, int root) {
              const bool scatters = collective == Collective::reduce_scatter;
              Bytes x = kept, y(all + 1);
              byte* const to = !in_place ? y.data() : scatters ? x.data() + bytes * mine : x.data();
              comm.run(request(comm, collective,
                               {.in = x.data(),
                                .out = to,
                                .count = count,
                                .dtype = dtype,
                                .root = root,
                                .factor = kFactors[me]}));
              const bool gets = collective != Collective::reduce || me == root;
              if (gets) {
                EXPECT_EQ(first_difference(dtype, to, whole.data() + (scatters ? bytes * mine : 0), count),
                          -1)
                    << name_of(collective) << " of " << count << ' ' << name_of(dtype) << " on rank " << me;
              }
              if (gets && in_place) std::copy_n(kept.data() + (to - x.data()), bytes, to);
              EXPECT_EQ(x, kept) << name_of(collective) << " has changed an input";
            };
            check_sum(Collective::all_reduce, 0);
            check_sum(Collective::reduce_scatter, 0);
            for (const int root : {0, n - 1}) check_sum(Collective::reduce, root);
          }
    });
}

// An algorithm that these nodes cannot run is refused when the call's turn has come.
TEST(NodesScaled, ARefusedCallLeavesItsBuffers) {
  World{"abb"}.run([](Communicator::Impl& comm) {
    std::vector<float> x(5, 3), y(5, -1);
    Call call{.in = x.data(), .out = x.data(), .count = 5, .algorithm = "chain", .factor = 0.5};
    EXPECT_TRUE(has(text_of<UsageError>([&] { comm.run(request(comm, Collective::all_reduce, call)); }),
                    "chain needs as many ranks on every node"));
    EXPECT_EQ(x, std::vector<float>(5, 3));
    call.out = y.data();
    EXPECT_THROW(comm.run(request(comm, Collective::all_reduce, call)), UsageError);
    EXPECT_EQ(y, std::vector<float>(5, -1));
    call.out = x.data();
    call.algorithm = "two_shot";
    comm.run(request(comm, Collective::all_reduce, call));
    EXPECT_EQ(x, std::vector<float>(5, 4.5));
  });
}

// Quantised sums across nodes have the bits of those on one node.
TEST_P(Layout, QuantisedSums) {
  const std::string layout = GetParam();
  constexpr std::size_t kCount = 5003;
  auto quantise = [&](Communicator::Impl& comm, Wire wire, DType dtype, Op op) {
    Bytes x(kCount * size_of(dtype) + 8), y = x;
    for (std::size_t i = 0; i < kCount; ++i) {
      const float value = static_cast<float>(std::sin(static_cast<double>(i + 1) * (comm.rank() + 2))) * 9;
      if (dtype == DType::f32) put(x.data(), i, value);
      else put(x.data(), i, static_cast<std::uint16_t>(encode(kBF16, value)));
    }
    comm.run(
        request(comm, Collective::all_reduce,
                {.in = x.data(), .out = y.data(), .count = kCount, .dtype = dtype, .op = op, .wire = wire}));
    return y;
  };
  for (const auto& [wire, dtype, op] :
       {std::tuple(Wire::fp8, DType::f32, Op::sum), {Wire::int8, DType::bf16, Op::avg}}) {
    Bytes expected;
    World{std::string(layout.size(), 'a')}.run(
        [&, wire = wire, dtype = dtype, op = op](Communicator::Impl& comm) {
          Bytes got = quantise(comm, wire, dtype, op);
          if (comm.rank() == 0) expected = std::move(got);
        });
    World{layout, kSmall}.run([&, wire = wire, dtype = dtype, op = op](Communicator::Impl& comm) {
      EXPECT_EQ(first_difference(dtype, expected.data(), quantise(comm, wire, dtype, op).data(), kCount), -1);
    });
  }
}

// Broadcasts inputs that are long enough for the chain of nodes, with an end that no rail shares.
TEST(NodesBroadcast, AlongTheChain) {
  constexpr std::size_t kBytes = (std::size_t{3} << 20) + 7;
  const Bytes input = rank_bytes(0, kBytes);
  for (const std::string layout : {"aabb", "abc", "abcd", "abab", "abb", "ab"}) {
    const World world{layout};
    world.run([&](Communicator::Impl& comm) {
      Bytes x(kBytes), y(kBytes);
      for (int root = 0; root < comm.size(); ++root)
        for (const bool in_place : {false, true}) {
          if (comm.rank() == root) x = input;
          else std::memset(x.data(), 0, kBytes);
          std::memset(y.data(), 0, kBytes);
          byte* out = in_place ? x.data() : y.data();
          comm.run(request(comm, Collective::broadcast,
                           {.in = x.data(), .out = out, .count = kBytes, .dtype = DType::u8, .root = root}));
          EXPECT_EQ(std::memcmp(out, input.data(), kBytes), 0)
              << layout << " from " << root << (in_place ? " in place" : "") << " on rank " << comm.rank();
        }
    });
    // Without a chain, the root has one exchange, and one rank of every other node has one.
    const int calls = 2 * static_cast<int>(layout.size()), nodes = layout.back() - 'a' + 1;
    if (layout == "abb" || layout == "ab") EXPECT_EQ(world.post->exchanges, calls * nodes) << layout;
    else EXPECT_GT(world.post->exchanges, calls * nodes * 4) << layout;
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes, Layout,
                         testing::Values("ab", "abc", "aabb", "abab", "abb", "aabbcc", "abcbca"));

}  // namespace
}  // namespace unisono::test
