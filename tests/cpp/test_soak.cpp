// A million calls of all kinds and sizes, in random order, on the same rings and counters. Every result is
// checked.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "ranks.hpp"

namespace unisono::test {
namespace {

constexpr int kCalls = UNISONO_SANITIZED ? 20000 : 1000000;  // of all tests together

std::int32_t value(std::uint32_t call, int rank, std::size_t i) {
  return static_cast<std::int32_t>(call * 31 + static_cast<std::uint32_t>(rank) * 7919 +
                                   static_cast<std::uint32_t>(i));
}

// Most calls are small; some are around a packet ring, few around a chunk.
std::size_t random_count(std::mt19937& random) {
  const std::uint32_t kind = random() % 1000;
  if (kind < 950) return random() % 40;
  if (kind < 998) return random() % 2000;
  return random() % 20000;
}

void soak(Communicator& comm, int calls) {
  const int n = comm.size(), me = comm.rank();
  const auto ranks = static_cast<std::size_t>(n), own = static_cast<std::size_t>(me);
  std::mt19937 random(static_cast<std::uint32_t>(n));  // the same on every rank
  std::vector<std::int32_t> in(20000 * ranks), out(20000 * ranks);
  for (int k = 0; k < calls && !testing::Test::HasFailure(); ++k) {
    const auto collective = static_cast<Collective>(random() % static_cast<unsigned>(Collective::empty));
    const std::size_t count = random_count(random);
    const int root = static_cast<int>(random() % ranks), shift = static_cast<int>(random() % ranks);
    const auto names = algorithms(collective);
    const std::uint32_t pick = random() % 4;  // the plan's choice, or any
    const auto call_number = static_cast<std::uint32_t>(k);
    const std::size_t blocks = count * ranks;
    Call call{.in = in.data(), .out = out.data(), .count = count, .dtype = DType::i32, .root = root};
    if (pick == 0 && !names.empty()) call.algorithm = names[random() % names.size()];
    for (std::size_t i = 0; i < blocks; ++i) in[i] = value(call_number, me, i);
    const int to = (me + shift) % n, from = (me + n - shift) % n;
    // compares `many` elements with reference(i)
    auto expect = [&](std::size_t many, auto&& reference) {
      for (std::size_t i = 0; i < many; ++i)
        if (out[i] != reference(i)) {
          ADD_FAILURE() << "call " << k << " (" << name_of(collective) << " by " << call.algorithm << " of "
                        << count << ", root " << root << "), rank " << me << " of " << n << ", element " << i;
          return;
        }
    };
    auto sum = [&](std::size_t i) {
      std::uint32_t all = 0;
      for (int r = 0; r < n; ++r) all += static_cast<std::uint32_t>(value(call_number, r, i));
      return static_cast<std::int32_t>(all);
    };
    auto block = [&](std::size_t i) { return static_cast<int>(i / count); };
    switch (collective) {
      case Collective::all_reduce:
        comm.all_reduce(call);
        expect(count, sum);
        break;
      case Collective::reduce:
        comm.reduce(call);
        if (me == root) expect(count, sum);
        break;
      case Collective::broadcast:
        comm.broadcast(call);
        expect(count, [&](std::size_t i) { return value(call_number, root, i); });
        break;
      case Collective::all_gather:
        comm.all_gather(call);
        expect(blocks, [&](std::size_t i) { return value(call_number, block(i), i % count); });
        break;
      case Collective::gather:
        comm.gather(call);
        if (me == root)
          expect(blocks, [&](std::size_t i) { return value(call_number, block(i), i % count); });
        break;
      case Collective::reduce_scatter:
        comm.reduce_scatter(call);
        expect(count, [&](std::size_t i) { return sum(own * count + i); });
        break;
      case Collective::scatter:
        comm.scatter(call);
        expect(count, [&](std::size_t i) { return value(call_number, root, own * count + i); });
        break;
      case Collective::all_to_all:
        comm.all_to_all(call);
        expect(blocks, [&](std::size_t i) { return value(call_number, block(i), own * count + i % count); });
        break;
      case Collective::all_to_all_v: {
        const std::vector<std::size_t> counts(ranks, count);
        comm.all_to_all_v(call, counts, counts);
        expect(blocks, [&](std::size_t i) { return value(call_number, block(i), own * count + i % count); });
        break;
      }
      case Collective::send:
      case Collective::recv:
        if (shift == 0) break;
        // sends and receives in a ring
        if (call.algorithm == "direct") call.algorithm = "";
        if (me < to) comm.send(call, to), comm.recv(call, from);
        else comm.recv(call, from), comm.send(call, to);
        expect(count, [&](std::size_t i) { return value(call_number, from, i); });
        break;
      case Collective::send_recv:
        comm.send_recv(call, to, from);
        expect(count, [&](std::size_t i) { return value(call_number, from, i); });
        break;
      default: comm.barrier();
    }
  }
}

TEST(Soak, TwoRanks) {
  on_ranks(2, [](Communicator& comm) { soak(comm, kCalls / 100 * 90); });
}
TEST(Soak, ThreeRanks) {
  on_ranks(3, [](Communicator& comm) { soak(comm, kCalls / 100 * 5); });
}
TEST(Soak, FourRanks) {
  on_ranks(4, [](Communicator& comm) { soak(comm, kCalls / 100 * 5); });
}

}  // namespace
}  // namespace unisono::test
