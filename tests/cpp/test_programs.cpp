// Every collective by every algorithm, at sizes around packets, rings and chunks, against a plain loop.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "base/traits.hpp"
#include "programs.hpp"

namespace unisono::test {
namespace {

constexpr Collective kRegular[] = {Collective::all_reduce, Collective::reduce,    Collective::broadcast,
                                   Collective::all_gather, Collective::gather,    Collective::reduce_scatter,
                                   Collective::scatter,    Collective::all_to_all};

// Returns "" for the plan's choice, then every algorithm's name.
std::vector<std::string_view> all_algorithms(Collective collective) {
  std::vector<std::string_view> names = algorithms(collective);
  names.insert(names.begin(), "");
  return names;
}
bool direct(std::string_view algorithm) {
  const auto named = from_name<Algorithm>(algorithm, kAlgorithms);
  return named && is_direct(*named);
}

// Returns counts of f32: nothing, one, a packet (56 B), the most that packets carry in a piece (7168 B), a
// chunk (64 KiB), each with its neighbours. For up to 3 ranks also more than a ring of chunks holds.
std::vector<std::size_t> counts(int ranks) {
  std::vector<std::size_t> all{0, 1, 3, 13, 14, 15, 27, 1791, 1792, 1793, 16383, 16384, 16385};
  if (ranks <= 3) all.push_back(9 * 16384 + 5);
  if (UNISONO_SANITIZED) all = {0, 1, 15, 1793, 16385};
  return all;
}

class Programs : public testing::TestWithParam<int> {
 protected:
  const int n = GetParam();
  const std::size_t room = (9 * 16384 + 100 + static_cast<std::size_t>(n) * 16500) * 4 * 2 * (n <= 3 ? 4 : 1);
};
INSTANTIATE_TEST_SUITE_P(Ranks, Programs, testing::Values(1, 2, 3, 4, 5, 8),
                         testing::PrintToStringParamName());

void run_all(Communicator& comm, std::byte* room, std::size_t room_bytes, bool direct_only) {
  std::uint64_t seed = 1;
  for (const Collective collective : kRegular)
    for (const std::string_view algorithm : all_algorithms(collective))
      for (const std::size_t count : counts(comm.size()))
        for (const bool in_place : {false, true}) {
          if (direct_only && !direct(algorithm)) continue;
          // refused: a peer may overwrite what has not been sent
          if (in_place && direct(algorithm) && collective == Collective::all_to_all && comm.size() > 1)
            continue;
          const Case c{collective, algorithm, count,
                       DType::f32, Op::sum,   static_cast<int>(seed) % comm.size(),
                       in_place,   ++seed};
          run_checked(comm, c, room, room_bytes);
        }
}

TEST_P(Programs, GiveTheReferencesBits) {
  on_ranks(n, [&](Communicator& comm) {
    Bytes memory(room);
    run_all(comm, memory.data(), room, false);
  });
}

TEST_P(Programs, GiveTheReferencesBitsOnSymmetricMemory) {
  on_ranks(n, [&](Communicator& comm) {
    const Buffer memory = comm.empty(room);
    run_all(comm, static_cast<std::byte*>(memory.data()), room, true);
  });
}

TEST_P(Programs, CombineEveryTypeByEveryOp) {
  on_ranks(n, [&](Communicator& comm) {
    Bytes memory(room);
    std::uint64_t seed = 1;
    for (const auto& [dtype, op] : kinds())
      for (const Collective collective :
           {Collective::all_reduce, Collective::reduce, Collective::reduce_scatter})
        for (const std::string_view algorithm : all_algorithms(collective)) {
          if (UNISONO_SANITIZED && (static_cast<int>(dtype) + static_cast<int>(op)) % 4 != 0) continue;
          const std::size_t count = ++seed % 4 == 0 ? 8209 : seed % 113;
          run_checked(
              comm,
              {collective, algorithm, count, dtype, op, static_cast<int>(seed) % n, seed % 2 == 0, seed},
              memory.data(), room);
        }
  });
}

// The ranks' factors differ, also where calls are compared. An input that is not the output stays as it was.
TEST_P(Programs, ScaleEachRanksInput) {
  for (const bool check : {false, true})
    on_ranks(n, {.timeout_s = 120, .check = check}, [&](Communicator& comm) {
      Bytes memory(room);
      std::uint64_t seed = 0;
      for (const Collective collective :
           {Collective::all_reduce, Collective::reduce, Collective::reduce_scatter})
        for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16})
          for (const std::string_view algorithm : all_algorithms(collective))
            for (const std::size_t count :
                 {std::size_t{0}, std::size_t{1}, std::size_t{13}, std::size_t{1793}, std::size_t{16385}})
              for (const bool in_place : {false, true}) {
                if ((check || n > 3 || UNISONO_SANITIZED) && ++seed % (n > 3 ? 8 : 4) != 0) continue;
                run_checked(comm,
                            {collective, algorithm, dtype == DType::f64 ? count / 2 : count, dtype, Op::sum,
                             static_cast<int>(seed) % n, in_place, ++seed, true},
                            memory.data(), room);
              }
    });
}

// Scaled inputs in scratch memory are as those in symmetric memory to direct programs.
TEST_P(Programs, ScaleInputsInSymmetricMemory) {
  on_ranks(n, [&](Communicator& comm) {
    const Buffer memory = comm.empty(room);
    std::uint64_t seed = 0;
    for (const Collective collective :
         {Collective::all_reduce, Collective::reduce, Collective::reduce_scatter})
      for (const std::string_view algorithm : all_algorithms(collective))
        for (const std::size_t count : {std::size_t{5}, std::size_t{16385}})
          for (const bool in_place : {false, true})
            if (algorithm.empty() || direct(algorithm))
              run_checked(comm,
                          {collective, algorithm, count, DType::f32, Op::sum, static_cast<int>(seed) % n,
                           in_place, ++seed, true},
                          static_cast<std::byte*>(memory.data()), room);
  });
}

// The wire form holds the scaled numbers exactly, so that the sum is known.
TEST_P(Programs, ScaleBeforeTheyQuantise) {
  on_ranks(n, [&](Communicator& comm) {
    const double factors[] = {2, -1, 0.5, -0.5};
    for (const Wire wire : {Wire::fp8, Wire::int8})
      for (const std::size_t count : {std::size_t{0}, std::size_t{33}, std::size_t{1793}})
        for (const bool in_place : {false, true}) {
          std::vector<float> in(count, 2), out(in_place ? 0 : count);
          float sum = 0;
          for (int r = 0; r < n; ++r) sum += 2 * static_cast<float>(factors[r % 4]);
          float* to = in_place ? in.data() : out.data();
          comm.all_reduce(
              {.in = in.data(), .out = to, .count = count, .wire = wire, .factor = factors[comm.rank() % 4]});
          EXPECT_EQ(std::vector<float>(to, to + count), std::vector<float>(count, sum))
              << name_of(wire) << (in_place ? " in place" : "") << ", rank " << comm.rank();
        }
  });
}

TEST_P(Programs, AreStreamedAndCheckedAlike) {
  const std::size_t count = n <= 3 ? 200003 : 20003;  // the plan's choice of large calls
  on_ranks(n, {.timeout_s = 120, .check = true}, [&](Communicator& comm) {
    Bytes memory((count * 4 + 100) * static_cast<std::size_t>(n) * 2);
    for (const Collective collective : kRegular)
      for (const std::size_t elements : {std::size_t{5}, count})
        for (const bool in_place : {false, true})
          run_checked(comm, {collective, "", elements, DType::f32, Op::avg, n - 1, in_place, 7},
                      memory.data(), memory.size());
  });
}

// Returns how many elements rank r sends to rank p: at times none, at times more than a chunk. even: as many
// both ways.
std::size_t part(std::uint64_t seed, bool even, int r, int p) {
  if (even && r > p) std::swap(r, p);
  const auto word =
      (seed * 31 + static_cast<std::uint64_t>(r) * 7 + static_cast<std::uint64_t>(p) * 13) * 2654435761u >> 7;
  return word % 5 == 0 ? 0 : word % 11 == 0 ? 17001 + word % 100 : word % 97;
}

TEST_P(Programs, ExchangePartsOfAnySize) {
  on_ranks(n, [&](Communicator& comm) {
    const int me = comm.rank();
    std::uint64_t seed = 0;
    for (int round = 0; round < 6; ++round)
      for (const bool in_place : {false, true})
        for (const std::string_view algorithm : all_algorithms(Collective::all_to_all_v)) {
          if (in_place && direct(algorithm) && n > 1) continue;
          ++seed;
          std::vector<std::size_t> sends, receives;
          std::vector<std::uint8_t> in, expected;
          auto value = [&](int from, int to, std::size_t i) {
            return static_cast<std::uint8_t>(from * 37 + to * 11 + static_cast<int>(i % 251));
          };
          for (int p = 0; p < n; ++p) {
            sends.push_back(part(seed, in_place, me, p));
            receives.push_back(part(seed, in_place, p, me));
            for (std::size_t i = 0; i < sends.back(); ++i) in.push_back(value(me, p, i));
            for (std::size_t i = 0; i < receives.back(); ++i) expected.push_back(value(p, me, i));
          }
          std::vector<std::uint8_t> out(in_place ? 0 : expected.size());
          std::uint8_t* to = in_place ? in.data() : out.data();
          comm.all_to_all_v({.in = in.data(), .out = to, .dtype = DType::u8, .algorithm = algorithm}, sends,
                            receives);
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), to))
              << algorithm << (in_place ? " in place" : "") << ", seed " << seed;
        }
  });
}

TEST_P(Programs, SendBatchesOfMessages) {
  for (const bool check : {false, true})
    on_ranks(n, {.timeout_s = 120, .check = check}, [&](Communicator& comm) {
      for (int turn = 0; turn < 7; ++turn) {
        auto size_of = [&](int from, int to) {
          constexpr std::size_t sizes[] = {0, 1, 56, 7168, 7169, 65536, 300001};
          return sizes[(from * 3 + to * 5 + turn) % 7];
        };
        run_checked_batch(comm, [](int, int) { return true; }, size_of);
        run_checked_batch(comm, [&](int from, int to) { return (from + 2 * to + turn) % 3 == 0; }, size_of);
        run_checked_batch(comm, [&](int from, int to) { return from + to == n - 1; }, size_of);
      }
    });
}

// The wire form holds these numbers exactly, so that the sum is known. test_quantised.py has rounded ones.
TEST_P(Programs, SumNumbersThatTheWireFormHolds) {
  on_ranks(n, [&](Communicator& comm) {
    const auto value = [](int rank, std::size_t i) {
      return static_cast<float>((i * 5 + static_cast<std::size_t>(rank) * 3) % 5) - 2;
    };
    for (const Wire wire : {Wire::fp8, Wire::int8})
      for (const std::size_t count : counts(n))
        for (const bool in_place : {false, true}) {
          std::vector<float> in(count), out(in_place ? 0 : count), expected(count);
          for (std::size_t i = 0; i < count; ++i) {
            in[i] = value(comm.rank(), i);
            for (int r = 0; r < n; ++r) expected[i] += value(r, i);
          }
          float* to = in_place ? in.data() : out.data();
          comm.all_reduce({.in = in.data(), .out = to, .count = count, .wire = wire});
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), to))
              << name_of(wire) << " of " << count << (in_place ? " in place" : "") << ", rank "
              << comm.rank();
        }
  });
}

TEST_P(Programs, PassOnAroundARing) {
  on_ranks(n, [&](Communicator& comm) {
    const int me = comm.rank(), to = (me + 1) % n, from = (me + n - 1) % n;
    std::uint64_t seed = 0;
    for (const std::string_view algorithm : all_algorithms(Collective::send_recv))
      for (const std::size_t count : counts(n))
        for (const bool in_place : {false, true}) {
          const Case c{Collective::send_recv, algorithm, count, DType::f32, Op::sum, 0, in_place, ++seed};
          Bytes in = input_of(c, me, count), out(in_place ? 0 : in.size());
          std::byte* result = in_place ? in.data() : out.data();
          comm.send_recv({.in = in.data(), .out = result, .count = count, .algorithm = algorithm}, to, from);
          const Bytes expected = input_of(c, from, count);
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), result)) << c.text() << ", rank " << me;
        }
  });
}

// Rank 0 sends to each; odd ranks answer by a send_recv with it, even ranks by a send.
TEST_P(Programs, SendAndReceive) {
  on_ranks(n, [&](Communicator& comm) {
    const int me = comm.rank();
    std::vector<std::int32_t> one, two;
    for (const std::string_view algorithm : all_algorithms(Collective::send))
      for (const std::size_t count : counts(n)) {
        auto call = [&](std::vector<std::int32_t>* in, std::vector<std::int32_t>* out) {
          return Call{.in = in ? in->data() : nullptr,
                      .out = out ? out->data() : nullptr,
                      .count = count,
                      .dtype = DType::i32,
                      .algorithm = algorithm};
        };
        for (int p = 1; p < n; ++p) {
          if (me != 0 && me != p) continue;
          one.assign(count, me * 1000), two.assign(count, -1);
          std::iota(one.begin(), one.end(), me * 1000);
          if (me == 0 && p % 2 == 1) comm.send_recv(call(&one, &two), p, p);
          else if (me == 0) comm.send(call(&one, nullptr), p), comm.recv(call(nullptr, &two), p);
          else if (p % 2 == 1) comm.send_recv(call(&one, &two), 0, 0);
          else comm.recv(call(nullptr, &two), 0), comm.send(call(&one, nullptr), 0);
          std::vector<std::int32_t> expected(count);
          std::iota(expected.begin(), expected.end(), (me == 0 ? p : 0) * 1000);
          EXPECT_EQ(two, expected) << algorithm << ' ' << count << " ranks 0 and " << p;
        }
      }
  });
}

}  // namespace
}  // namespace unisono::test
