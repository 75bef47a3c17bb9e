// Large calls between processes on plain memory: the kernel copies from huge pages, chunks carry what lies in
// small ones, except if ranks take turns on a core. Where the kernel's copies are fast, calls learn their
// way.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/traits.hpp"
#include "far_ranks.hpp"

using namespace unisono::test;

namespace {
void count_copy() {
  if (copies++ == dies_at) ::_exit(0);
  if (delay_us > 0) ::usleep(delay_us);
}
}  // namespace

// Take the place of the C library's, and count. A fast copy takes no time, a slow one a thousand times what
// it would.
extern "C" {
ssize_t process_vm_readv(pid_t pid, const iovec* here, unsigned long heres, const iovec* there,
                         unsigned long theres, unsigned long flags) {
  if (kernel == Kernel::refuses) {
    errno = EPERM;
    return -1;
  }
  if (kernel != Kernel::as_it_is && here->iov_len == kLook) {
    ++looks;
    if (kernel == Kernel::slow) ::usleep(5000);
    return kLook;
  }
  count_copy();
  return ::syscall(SYS_process_vm_readv, pid, here, heres, there, theres, flags);
}
ssize_t process_vm_writev(pid_t pid, const iovec* here, unsigned long heres, const iovec* there,
                          unsigned long theres, unsigned long flags) {
  count_copy();
  return ::syscall(SYS_process_vm_writev, pid, here, heres, there, theres, flags);
}
}

namespace unisono::test {
namespace {

// Collectives go by the kernel if all that peers reach lies in huge pages: everyone's buffers, or the root's.
void run_all(Rank& rank, const std::vector<bool>& of_huge) {
  Communicator& comm = rank.comm;
  std::uint64_t seed = 1;
  for (const Collective collective :
       {Collective::all_reduce, Collective::reduce, Collective::broadcast, Collective::all_gather,
        Collective::gather, Collective::reduce_scatter, Collective::scatter, Collective::all_to_all})
    for (const std::size_t count : {std::size_t{1}, std::size_t{25001}})
      for (const bool in_place : {false, true}) {
        if (in_place && collective == Collective::all_to_all) continue;  // is staged from any pages
        const int root = static_cast<int>(++seed) % comm.size();
        const Case c{collective, "", count, DType::f32, Op::sum, root, in_place, seed};
        bool all_huge = true;
        for (int r = 0; r < comm.size() && !rank.any_pages(); ++r) {
          const bool reached =
              (collective != Collective::gather && collective != Collective::scatter) || r == root;
          if (reached) all_huge = all_huge && of_huge[static_cast<std::size_t>(r)];
        }
        const bool mine = of_huge[static_cast<std::size_t>(comm.rank())];
        for (int i = 0; i <= (rank.learns() ? Rank::kFirstByKernel : 0); ++i) {
          const int copied = rank.copied([&] { run_checked(comm, c, rank.room(mine), kRoom); });
          if (rank.learns() && in_place) continue;  // has learned from the calls before
          EXPECT_EQ(copied > 0, rank.learns() ? i == Rank::kFirstByKernel : all_huge)
              << c.text() << ": " << copied << " copies by the kernel";
        }
      }
}

class FarCalls : public testing::TestWithParam<std::vector<bool>> {};
INSTANTIATE_TEST_SUITE_P(HugePages, FarCalls,
                         testing::Values(std::vector{true, true}, std::vector{false, false},
                                         std::vector{true, false}, std::vector{true, true, true},
                                         std::vector{false, false, false}, std::vector{true, true, false}));

TEST_P(FarCalls, OfAllRanks) {
  const int n = static_cast<int>(GetParam().size());
  for (const bool check : {false, true})
    for (const bool around : {false, true})
      in_processes(n, [&](Rank& rank) { run_all(rank, GetParam()); }, {.check = check, .around = around});
  in_processes(n, [&](Rank& rank) { run_all(rank, GetParam()); }, kFast);
}

// The root of a direct reduce reads all of a small input, and most of a larger one.
TEST(FarReduce, SmallInputsAreReadByTheRootAlone) {
  in_processes(2, [](Rank& rank) {
    constexpr int kOfRoot = 1, kOfOther = 2;  // the other reads, and writes the sum
    for (const auto& [bytes, copied] : {std::pair{4, kOfRoot},
                                        {32 << 10, kOfRoot},
                                        {48 << 10, kOfRoot + kOfOther},
                                        {100000, kOfRoot + kOfOther}})
      for (const int root : {0, 1}) {
        const Case c{Collective::reduce,
                     "direct",
                     static_cast<std::size_t>(bytes) / 4,
                     DType::f32,
                     Op::sum,
                     root,
                     false,
                     5};
        EXPECT_EQ(rank.copied([&] { run_checked(rank.comm, c, rank.room(true), kRoom); }), copied)
            << bytes << " bytes";
      }
  });
}

// Here only the outputs are reached, and each pair goes by the kernel if both of its own lie in huge pages.
// Some parts, and one rank's whole output, are empty.
TEST_P(FarCalls, OfAllToAllV) {
  const std::vector<bool>& of_huge = GetParam();
  const int n = static_cast<int>(of_huge.size());
  auto part = [](int from, int to) {
    return to == 1 || from == to ? 0 : 30001 * static_cast<std::size_t>(from + 1);
  };
  in_processes(n, [&](Rank& rank) {
    const int me = rank.comm.rank();
    std::vector<std::size_t> sends, receives;
    Bytes in, expected;
    for (int p = 0; p < n; ++p) {
      const Bytes sent = content(me, p, part(me, p)), got = content(p, me, part(p, me));
      sends.push_back(sent.size()), receives.push_back(got.size());
      in.insert(in.end(), sent.begin(), sent.end()), expected.insert(expected.end(), got.begin(), got.end());
    }
    std::byte* out = rank.room(of_huge[static_cast<std::size_t>(me)]) + 1;
    const int copied = rank.copied(
        [&] { rank.comm.all_to_all_v({.in = in.data(), .out = out, .dtype = DType::u8}, sends, receives); });
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out)) << "rank " << me;
    const auto suits = [&](int from, int to) {
      return part(from, to) == 0 || rank.any_pages() || of_huge[static_cast<std::size_t>(to)];
    };
    int expected_copies = 0;
    for (int r = 0; r < n; ++r)
      for (int p = 0; p < n; ++p) expected_copies += part(r, p) > 0 && suits(r, p) && suits(p, r);
    EXPECT_EQ(copied, expected_copies);
  });
}

constexpr std::size_t kMessages[] = {1, 65537, 3000003};  // the last is more than a ring of chunks

TEST_P(FarCalls, OfRings) {
  const std::vector<bool>& of_huge = GetParam();
  const int n = static_cast<int>(of_huge.size());
  const auto messages = [&](Rank& rank) {
    const int me = rank.comm.rank(), next = (me + 1) % n, last = (me + n - 1) % n;
    const auto by_kernel = rank.any_pages() ? n : std::count(of_huge.begin(), of_huge.end(), true);
    for (const bool in_place : {false, true})
      for (const std::size_t bytes : kMessages) {
        const bool mine = of_huge[static_cast<std::size_t>(me)];
        for (int i = 0; i <= (rank.learns() ? Rank::kFirstByKernel : 0); ++i) {
          const int copied = rank.copied([&] { rank.message(next, last, bytes, mine, in_place); });
          // in place, a copy of the input is sent, and the allocator has chosen its pages
          if (in_place) continue;
          const auto expected = !rank.learns() ? by_kernel : i == Rank::kFirstByKernel ? n : 0;
          EXPECT_EQ(copied, expected) << bytes << " bytes";
        }
      }
  };
  for (const bool around : {false, true}) in_processes(n, messages, {.around = around});
  in_processes(n, messages, kFast);
}

// One end only sends and the other only receives. Both copy, except from small pages from 1 MiB on.
TEST(FarMessages, OneWay) {
  in_processes(2, [](Rank& rank) {
    for (const bool from_huge : {false, true})
      for (const bool to_huge : {false, true})
        for (const std::size_t bytes : kMessages) {
          const int copied = rank.copied([&] {
            if (rank.comm.rank() == 0) rank.message(1, -1, bytes, from_huge);
            else rank.message(-1, 0, bytes, to_huge);
          });
          const bool by_chunks = !from_huge && bytes > 1 << 20 && !rank.any_pages();
          EXPECT_EQ(copied, by_chunks ? 0 : bytes > 1 ? 2 : 1) << bytes << " bytes";  // one byte has no half
        }
  });
}

// A rank that does both at once meets one that receives and then sends, or sends and then receives. Chunks
// would wait for a call that comes later.
TEST(FarMessages, OfOtherCallsAtBothEnds) {
  in_processes(2, [](Rank& rank) {
    for (const bool of_huge : {false, true})
      for (const bool sends_first : {false, true})
        for (const std::size_t bytes : kMessages) {
          const int copied = rank.copied([&] {
            if (rank.comm.rank() == 0) return rank.message(1, 1, bytes, of_huge);
            if (sends_first) rank.message(0, -1, bytes, of_huge);
            rank.message(-1, 0, bytes, of_huge);
            if (!sends_first) rank.message(0, -1, bytes, of_huge);
          });
          EXPECT_EQ(copied, 2) << bytes << " bytes";
        }
  });
}

// Rank 0's destination waits for what rank 2 sends only after rank 0 has taken its chunks.
TEST(FarMessages, ComeBeforeTheReply) {
  in_processes(4, [](Rank& rank) {
    constexpr std::size_t kBytes = 3000003;
    const int copied = rank.copied([&] {
      switch (rank.comm.rank()) {
        case 0: return rank.message(1, 2, kBytes, false);
        case 1: rank.message(-1, 2, kBytes, false); return rank.message(-1, 0, kBytes, false);
        case 2: rank.message(0, 3, kBytes, false); return rank.message(1, -1, kBytes, false);
        default: return rank.message(2, -1, kBytes, false);
      }
    });
    EXPECT_EQ(copied, rank.any_pages() ? 5 : 2);  // rank 1 pulls from rank 0, and rank 2 from rank 3
  });
}

// Ranks that time the kernel differently: the sum of all decides, on every rank.
TEST(KernelCopies, AreTheSameOnEveryRank) {
  for (const int odd : {0, 1, 2})
    in_processes(3, [](Rank& rank) { EXPECT_EQ(Tuning(rank.comm).kernel_copies(), "slow"); },
                 {.seems = [=](int r) { return r == odd ? Kernel::slow : Kernel::fast; }});
  in_processes(3, [](Rank& rank) { EXPECT_EQ(Tuning(rank.comm).kernel_copies(), "fast"); }, kFast);
}

// Whatever it would find, a later communicator of these processes does not look.
TEST(KernelCopies, AreWhatTheFirstCommunicatorHasFound) {
  for (const Kernel first : {Kernel::slow, Kernel::fast})
    in_processes(3,
                 [=](Rank& rank) {
                   const int before = looks;
                   kernel = first == Kernel::fast ? Kernel::slow : Kernel::fast;
                   auto some = rank.comm.split(rank.comm.rank() == 1 ? 1 : 0, 0);
                   kernel = Kernel::as_it_is;
                   const std::string_view found = Tuning(*some).kernel_copies();
                   EXPECT_EQ(found, some->size() == 1 ? "none" : Tuning(rank.comm).kernel_copies());
                   EXPECT_GT(before, 0);
                   EXPECT_EQ(looks, before);
                 },
                 {.seems = [=](int) { return first; }});
}

// If one rank may not copy, none does and none looks. Chunks carry what is large.
TEST(KernelCopies, ThatOneRankIsRefusedAreNone) {
  in_processes(2,
               [](Rank& rank) {
                 EXPECT_EQ(Tuning(rank.comm).kernel_copies(), "none");
                 const int peer = 1 - rank.comm.rank();
                 EXPECT_EQ(rank.copied([&] { rank.message(peer, peer, 65537, true); }), 0);
                 EXPECT_EQ(looks, 0);
               },
               {.seems = [](int r) { return r == 0 ? Kernel::refuses : Kernel::slow; }, .copies = false});
}

}  // namespace
}  // namespace unisono::test
