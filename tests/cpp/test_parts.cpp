// all_to_all_v on host memory, which each pair of ranks plans by itself: small and large parts in one call,
// ways that pairs hold to, symmetric memory at either end, and sizes of which two ends say another.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "far_ranks.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

using Size = std::function<std::size_t(int from, int to)>;

// Makes a call whose parts are of those sizes, and looks at what came. in == out: in place.
void run_parts(Communicator& comm, const Size& size, std::byte* in, std::byte* out,
               std::string_view algorithm = "") {
  const int me = comm.rank();
  std::vector<std::size_t> sends, receives;
  Bytes sent, expected;
  for (int p = 0; p < comm.size(); ++p) {
    const Bytes to = content(me, p, size(me, p)), from = content(p, me, size(p, me));
    sends.push_back(to.size()), receives.push_back(from.size());
    sent.insert(sent.end(), to.begin(), to.end());
    expected.insert(expected.end(), from.begin(), from.end());
  }
  std::copy(sent.begin(), sent.end(), in);
  if (in != out) std::fill(out, out + expected.size(), std::byte{0});
  comm.all_to_all_v({.in = in, .out = out, .dtype = DType::u8, .algorithm = algorithm}, sends, receives);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out)) << "rank " << me;
}

constexpr std::size_t kSizes[] = {0, 1, 56, 600, 7169, 20000, 40000, 65537, 300000};

// Sizes by chance, which all ranks draw alike. even: as many bytes both ways.
Size any_size(std::mt19937& chance, int n, bool even) {
  const auto ranks = static_cast<std::size_t>(n);
  std::vector<std::size_t> all(ranks * ranks);
  for (std::size_t& one : all) one = kSizes[chance() % std::size(kSizes)];
  return [=](int from, int to) {
    if (even && from > to) std::swap(from, to);
    return all[static_cast<std::size_t>(from) * ranks + static_cast<std::size_t>(to)];
  };
}

constexpr int kCalls = UNISONO_SANITIZED ? 60 : 150;

// Between them are other calls of the same pairs. The kernel's copies are slow, so that pairs hold to chunks.
TEST(Parts, OfMixedSizesAreRight) {
  for (const int n : {2, 3})
    for (const bool check : {false, true}) {
      in_processes(n,
                   [n](Rank& rank) {
                     delay_us = 300;
                     std::mt19937 chance(3);
                     const int me = rank.comm.rank(), next = (me + 1) % n, last = (me + n - 1) % n;
                     const Size often = [](int from, int to) { return from == to ? 0u : 20000u; };
                     std::byte *const in = rank.room() + 1, *const out = in + kRoom / 2;
                     for (int i = 0; i < kCalls && !testing::Test::HasFailure(); ++i) {
                       const bool in_place = chance() % 4 == 0;
                       run_parts(rank.comm, any_size(chance, n, in_place), in, in_place ? in : out);
                       run_parts(rank.comm, often, in, out);
                       if (chance() % 4 == 0) rank.message(next, last, 20000);
                     }
                   },
                   {.check = check});
    }
}

TEST(Parts, HoldToChunksIfTheKernelIsSlow) {
  in_processes(2, [](Rank& rank) {
    if (!rank.learns()) return;
    delay_us = 5000;
    const auto call = [&] {
      run_parts(
          rank.comm, [](int from, int to) { return from == to ? 0u : 20000u; }, rank.room(),
          rank.room() + kRoom / 2);
    };
    for (int i = 0; i < 64; ++i) call();
    // the other way is tried three times in 256 calls
    EXPECT_LE(rank.copied([&] {
      for (int i = 0; i < 192; ++i) call();
    }),
              2 * 3);
  });
}

// The kernel refuses copies or makes them, and each rank has other buffers in symmetric memory. A call that
// names direct is refused on every rank or on none.
TEST(Parts, ReachSymmetricMemoryAtEitherEnd) {
  for (const Kernel kernel : {Kernel::refuses, Kernel::fast})
    in_processes(
        3,
        [=](Rank& rank) {
          const auto inputs = rank.comm.empty(kRoom), outputs = rank.comm.empty(kRoom);
          std::mt19937 chance(9);
          for (int i = 0; i < kCalls && !testing::Test::HasFailure(); ++i) {
            const auto of = chance();  // a bit for each rank's input, and for its output
            const int me = rank.comm.rank();
            auto* in = of >> me & 1 ? rank.room() : static_cast<std::byte*>(inputs.data());
            auto* out =
                of >> (me + 3) & 1 ? rank.room() + kRoom / 2 : static_cast<std::byte*>(outputs.data());
            const Size size = any_size(chance, 3, false);
            run_parts(rank.comm, size, in, out);
            bool receives = false;  // a rank that the kernel refuses, in plain memory
            for (int r = 0; r < 3; ++r)
              for (int p = 0; p < 3; ++p) receives = receives || ((of >> (r + 3) & 1) && size(p, r) > 0);
            const auto direct = [&] { run_parts(rank.comm, size, in, out, "direct"); };
            if (kernel == Kernel::refuses && receives)
              EXPECT_TRUE(has(text_of<UsageError>(direct), "needs buffers from Communicator::empty"));
            else direct();
          }
        },
        {.seems = [=](int) { return kernel; }, .copies = kernel != Kernel::refuses});
}

TEST(Parts, ThatAreDirectAndInPlaceAreRefusedAlike) {
  on_ranks(3, [&](Communicator& comm) {
    std::vector<std::byte> x(9, std::byte{1}), y(9);
    const std::vector<std::size_t> counts(3, 3);
    Call call{.in = x.data(), .out = comm.rank() == 1 ? x.data() : y.data(), .dtype = DType::u8};
    call.algorithm = "direct";
    EXPECT_THROW(comm.all_to_all_v(call, counts, counts), UsageError);
    call.algorithm = "";
    comm.all_to_all_v(call, counts, counts);
  });
}

// Both ends say a size of a part, with parts of some sizes the other way. One end may notice at its next
// call.
TEST(Parts, OfSizesThatDifferAreAMismatch) {
  constexpr std::size_t kSaid[] = {0, 8, 600, 300000};
  for (const bool check : {false, true})
    for (const std::size_t back : {std::size_t{0}, std::size_t{8}, std::size_t{300000}})
      for (const std::size_t sent : kSaid)
        for (const std::size_t expected : kSaid)
          for (const std::size_t more : {std::size_t{0}, std::size_t{1}}) {
            if (sent == expected + more) continue;
            std::string texts[2];
            on_ranks(2, {.timeout_s = 10, .check = check}, [&](Communicator& comm) {
              std::vector<std::byte> x(1 << 20), y(1 << 20);
              std::vector<std::size_t> sends{sent, sent}, receives{back, back};
              if (comm.rank() == 1) sends = {back, back}, receives = {expected + more, expected + more};
              sends[static_cast<std::size_t>(comm.rank())] = receives[static_cast<std::size_t>(comm.rank())] =
                  0;
              texts[comm.rank()] = text_of<MismatchError>([&] {
                comm.all_to_all_v({.in = x.data(), .out = y.data(), .dtype = DType::u8}, sends, receives);
                comm.barrier();
              });
            });
            EXPECT_EQ(texts[0], texts[1]);
            EXPECT_TRUE(has(texts[0], check ? "all_to_all_v of " + std::to_string(sent) + " u8"
                                            : "met another call of rank"))
                << sent << " bytes, said to be " << expected + more << ", and " << back
                << " back: " << texts[0];
          }
}

// A pair holds to chunks, and one end then says another size, large or small.
TEST(Parts, OfSizesThatDifferAreAMismatchToPairsThatHold) {
  for (const std::size_t other : {std::size_t{0}, std::size_t{8}, std::size_t{20001}, std::size_t{300000}})
    in_processes(2, [=](Rank& rank) {
      delay_us = 300;
      const int me = rank.comm.rank();
      const Size usual = [](int from, int to) { return from == to ? 0u : 20000u; };
      std::byte *const in = rank.room(), *const out = in + kRoom / 2;
      for (int i = 0; i < 40; ++i) run_parts(rank.comm, usual, in, out);
      const std::vector<std::size_t> counts{me == 0 ? 0 : 20000u, me == 0 ? 20000u : 0};
      std::vector<std::size_t> receives = counts;
      if (me == 1) receives[0] = other;
      const std::string text = text_of<MismatchError>([&] {
        rank.comm.all_to_all_v({.in = in, .out = out, .dtype = DType::u8}, counts, receives);
        rank.comm.barrier();
      });
      EXPECT_TRUE(has(text, "all_to_all_v") || has(text, "barrier")) << text;
    });
}

}  // namespace
}  // namespace unisono::test
