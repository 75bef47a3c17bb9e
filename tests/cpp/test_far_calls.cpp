// Large calls between processes on plain memory: calls learn whether the kernel copies or chunks carry them,
// except if ranks take turns on a core.
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

// Makes each call until the kernel copies, and expects that it does then.
void run_all(Rank& rank) {
  std::uint64_t seed = 1;
  const int first = rank.before_kernel();
  for (const Collective collective :
       {Collective::all_reduce, Collective::reduce, Collective::broadcast, Collective::all_gather,
        Collective::gather, Collective::reduce_scatter, Collective::scatter, Collective::all_to_all})
    for (const std::size_t count : {std::size_t{1}, std::size_t{25001}})
      for (const bool in_place : {false, true}) {
        if (in_place && collective == Collective::all_to_all) continue;  // is staged
        const int root = static_cast<int>(++seed) % rank.comm.size();
        const Case c{collective, "", count, DType::f32, Op::sum, root, in_place, seed};
        for (int i = 0; i <= first; ++i) {
          const int copied = rank.copied([&] { run_checked(rank.comm, c, rank.room(), kRoom); });
          if (rank.learns() && in_place) continue;  // has learned from the calls before
          EXPECT_EQ(copied > 0, i == first) << c.text() << ": " << copied << " copies by the kernel";
        }
      }
}

class FarCalls : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FarCalls, testing::Values(2, 3));

TEST_P(FarCalls, OfAllRanks) {
  for (const bool check : {false, true})
    for (const bool around : {false, true})
      in_processes(GetParam(), run_all, {.check = check, .around = around});
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
        EXPECT_EQ(rank.copied([&] { run_checked(rank.comm, c, rank.room(), kRoom); }), copied)
            << bytes << " bytes";
      }
  });
}

// Some parts, and one rank's whole output, are empty.
TEST_P(FarCalls, OfAllToAllV) {
  const int n = GetParam();
  auto part = [](int from, int to) {
    return to == 1 || from == to ? 0 : 30001 * static_cast<std::size_t>(from + 1);
  };
  in_processes(n, [&](Rank& rank) {
    const int me = rank.comm.rank(), first = rank.before_kernel();
    std::vector<std::size_t> sends, receives;
    Bytes in, expected;
    for (int p = 0; p < n; ++p) {
      const Bytes sent = content(me, p, part(me, p)), got = content(p, me, part(p, me));
      sends.push_back(sent.size()), receives.push_back(got.size());
      in.insert(in.end(), sent.begin(), sent.end()), expected.insert(expected.end(), got.begin(), got.end());
    }
    int messages = 0;
    for (int r = 0; r < n; ++r)
      for (int p = 0; p < n; ++p) messages += part(r, p) > 0;
    std::byte* out = rank.room() + 1;
    for (int i = 0; i <= first; ++i) {
      const int copied = rank.copied([&] {
        rank.comm.all_to_all_v({.in = in.data(), .out = out, .dtype = DType::u8}, sends, receives);
      });
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out)) << "rank " << me;
      EXPECT_EQ(copied, i == first ? messages : 0);
    }
  });
}

constexpr std::size_t kMessages[] = {1, 65537, 3000003};  // the last is more than a ring of chunks

TEST_P(FarCalls, OfRings) {
  const int n = GetParam();
  const auto messages = [&](Rank& rank) {
    const int me = rank.comm.rank(), next = (me + 1) % n, last = (me + n - 1) % n;
    const int first = rank.before_kernel();
    for (const bool in_place : {false, true})
      for (const std::size_t bytes : kMessages)
        for (int i = 0; i <= first; ++i) {
          const int copied = rank.copied([&] { rank.message(next, last, bytes, in_place); });
          if (in_place) continue;  // a copy of the input is sent, from where the allocator has put it
          EXPECT_EQ(copied, i == first ? n : 0) << bytes << " bytes";
        }
  };
  for (const bool around : {false, true}) in_processes(n, messages, {.around = around});
}

// One end only sends and the other only receives. Both copy.
TEST(FarMessages, OneWay) {
  in_processes(2, [](Rank& rank) {
    const int first = rank.before_kernel();
    for (const std::size_t bytes : kMessages)
      for (int i = 0; i <= first; ++i) {
        const int copied = rank.copied([&] {
          if (rank.comm.rank() == 0) rank.message(1, -1, bytes);
          else rank.message(-1, 0, bytes);
        });
        EXPECT_EQ(copied, i < first ? 0 : bytes > 1 ? 2 : 1) << bytes << " bytes";  // one byte has no half
      }
  });
}

// A rank that does both at once meets one that receives and then sends, or sends and then receives. Chunks
// would wait for a call that comes later.
TEST(FarMessages, OfOtherCallsAtBothEnds) {
  in_processes(2, [](Rank& rank) {
    for (const bool sends_first : {false, true})
      for (const std::size_t bytes : kMessages) {
        const int copied = rank.copied([&] {
          if (rank.comm.rank() == 0) return rank.message(1, 1, bytes);
          if (sends_first) rank.message(0, -1, bytes);
          rank.message(-1, 0, bytes);
          if (!sends_first) rank.message(0, -1, bytes);
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
        case 0: return rank.message(1, 2, kBytes);
        case 1: rank.message(-1, 2, kBytes); return rank.message(-1, 0, kBytes);
        case 2: rank.message(0, 3, kBytes); return rank.message(1, -1, kBytes);
        default: return rank.message(2, -1, kBytes);
      }
    });
    EXPECT_EQ(copied, rank.learns() ? 2 : 5);  // of the others that learn, chunks come first
  });
}

// Ranks that time the kernel differently: the sum of all decides, on every rank.
TEST(KernelCopies, AreTheSameOnEveryRank) {
  for (const int odd : {0, 1, 2})
    in_processes(3, [](Rank& rank) { EXPECT_EQ(Tuning(rank.comm).kernel_copies(), "slow"); },
                 {.seems = [=](int r) { return r == odd ? Kernel::slow : Kernel::fast; }});
  in_processes(3, [](Rank& rank) { EXPECT_EQ(Tuning(rank.comm).kernel_copies(), "fast"); },
               {.seems = [](int) { return Kernel::fast; }});
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
                 EXPECT_EQ(rank.copied([&] { rank.message(peer, peer, 65537); }), 0);
                 EXPECT_EQ(looks, 0);
               },
               {.seems = [](int r) { return r == 0 ? Kernel::refuses : Kernel::slow; }, .copies = false});
}

}  // namespace
}  // namespace unisono::test
