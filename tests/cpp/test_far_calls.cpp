// Large calls between processes on plain memory: the kernel copies from huge pages, chunks carry what lies in
// small ones, except if ranks take turns on a core. Where the kernel's copies are fast, calls learn their
// way.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/process.hpp"
#include "base/traits.hpp"
#include "host/pages.hpp"
#include "mapping.hpp"
#include "processes.hpp"
#include "programs.hpp"
#include "unisono/tuning.hpp"

namespace {

// How the kernel's copies seem to be while ranks meet.
enum class Kernel { as_it_is, slow, fast, refuses };
Kernel kernel = Kernel::as_it_is;
constexpr std::size_t kLook = std::size_t{64} << 10;  // bytes of the copy that ranks time when they meet
int copies, looks;                                    // by the kernel, that this process has made

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
  ++copies;
  return ::syscall(SYS_process_vm_readv, pid, here, heres, there, theres, flags);
}
ssize_t process_vm_writev(pid_t pid, const iovec* here, unsigned long heres, const iovec* there,
                          unsigned long theres, unsigned long flags) {
  ++copies;
  return ::syscall(SYS_process_vm_writev, pid, here, heres, there, theres, flags);
}
}

namespace unisono::test {
namespace {

constexpr int kMostRanks = 4;
constexpr std::size_t kRoom = std::size_t{8} << 20;
constexpr std::size_t kRest = std::numeric_limits<std::size_t>::max();

// Shared by the processes of a test.
struct Shared {
  static constexpr int kMeetings = 8;
  struct Meeting {
    std::atomic<int> come;
    std::array<char, 512> text[kMostRanks];
    std::size_t bytes[kMostRanks];
  } meetings[kMeetings];
  int copies[kMostRanks];  // of the call that is looked at
};

class ByMemory : public Bootstrap {
 public:
  ByMemory(Shared& shared, int rank, int size) : shared_(shared), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& data) override {
    Shared::Meeting& here = shared_.meetings[next_++];
    here.bytes[rank_] = data.copy(here.text[rank_].data(), here.text[rank_].size());
    for (++here.come; here.come < size_;) ::usleep(100);
    std::vector<std::string> all;
    for (int r = 0; r < size_; ++r) all.emplace_back(here.text[r].data(), here.bytes[r]);
    return all;
  }

 private:
  Shared& shared_;
  int rank_, size_, next_ = 0;
};

// Bytes of a message or a part, which both of its ends know.
Bytes content(int from, int to, std::size_t bytes) {
  const std::uint64_t seed =
      1 + static_cast<std::uint64_t>(from) * kMostRanks + static_cast<std::uint64_t>(to);
  return input_of({.dtype = DType::u8, .seed = seed}, from, bytes);
}

// A rank, in a process of its own.
struct Rank {
  Communicator& comm;
  Shared& shared;
  const Mapping small{kRoom, false}, huge{kRoom, true};

  // Returns whether the kernel copies from small pages too.
  bool any_pages() const { return comm.size() > Cores::of_this_process().count(); }
  // Returns whether ranks learn which way calls go. Three calls of a kind then begin with chunks.
  bool learns() const { return !any_pages() && Tuning(comm).kernel_copies() == "fast"; }
  static constexpr int kFirstByKernel = 3;
  std::byte* room(bool of_huge) const { return (of_huge ? huge : small).data(); }

  // Makes calls. Returns the kernel's copies that all ranks have made for them.
  int copied(const std::function<void()>& calls) {
    const int before = copies;
    calls();
    shared.copies[comm.rank()] = copies - before;
    comm.barrier();
    int all = 0;
    for (int r = 0; r < comm.size(); ++r) all += shared.copies[r];
    comm.barrier();
    return all;
  }

  // Sends a message to one rank and receives one from another, -1: neither. Both buffers have those pages.
  void message(int to, int from, std::size_t bytes, bool of_huge, bool in_place = false) {
    const int me = comm.rank();
    std::byte* in = room(of_huge) + 3;
    std::byte* out = in_place ? in : room(of_huge) + kRoom / 2 + 1;
    if (to >= 0) {
      const Bytes sent = content(me, to, bytes);
      std::copy(sent.begin(), sent.end(), in);
    }
    const Call call{.in = in, .out = out, .count = bytes, .dtype = DType::u8};
    if (to < 0) comm.recv(call, from);
    else if (from < 0) comm.send(call, to);
    else comm.send_recv(call, to, from);
    if (from < 0) return;
    const Bytes expected = content(from, me, bytes);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out))
        << bytes << " bytes, " << from << " to " << me;
  }
};

// Large calls are direct from the first byte on, as far as the plan decides.
void plan_direct(Communicator& comm) {
  std::vector<PlanEntry> plan;
  for (const Collective collective :
       {Collective::all_reduce, Collective::reduce, Collective::broadcast, Collective::all_gather,
        Collective::gather, Collective::reduce_scatter, Collective::scatter, Collective::all_to_all,
        Collective::all_to_all_v, Collective::send_recv})
    plan.push_back(
        {collective, false, kRest, collective == Collective::all_reduce ? "two_shot_direct" : "direct"});
  Tuning(comm).set_plan(plan);
}

// Returns whether the test can be run here: the kernel tells of pages, gives both kinds, and copies.
bool possible(Rank& rank) {
  const host::Pages pages;
  if (!pages.huge(rank.huge.data(), kRoom) || pages.huge(rank.small.data(), kRoom)) return false;
  try {
    float in = 1, out[kMostRanks];
    rank.comm.all_gather({.in = &in, .out = out, .count = 1, .algorithm = "direct"});
  } catch (const UsageError&) { return false; }
  return pages.known();
}

struct Setting {
  bool check = false, around = false;                                        // chunks go around the cache
  std::function<Kernel(int rank)> seems = [](int) { return Kernel::slow; };  // when the ranks meet
  bool copies = true;                                                        // the test needs the kernel's
};
const Setting kFast{.seems = [](int) { return Kernel::fast; }};

// Runs body(rank) on `size` ranks. Expects that none fails.
void in_processes(int size, const std::function<void(Rank&)>& body, const Setting& setting = {}) {
  constexpr int kImpossible = 77;
  void* const memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto& shared = *new (memory) Shared{};
  auto play = [&](int r) {
    ::setenv("UNISONO_STREAM_CHUNKS", setting.around ? "1" : "0", 1);
    kernel = setting.seems(r);
    Communicator comm(std::make_shared<ByMemory>(shared, r, size), {.timeout_s = 60, .check = setting.check});
    kernel = Kernel::as_it_is;
    plan_direct(comm);
    Rank rank{comm, shared};
    if (setting.copies && !possible(rank)) return kImpossible;
    body(rank);
    return testing::Test::HasFailure() ? 1 : 0;
  };
  std::vector<std::unique_ptr<Child>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<Child>([&, r] { return play(r); }));
  bool impossible = false;
  for (const auto& rank : ranks) {
    impossible = impossible || rank->wait() == kImpossible;
    if (!impossible) { EXPECT_EQ(rank->wait(), 0); }
  }
  ::munmap(memory, sizeof(Shared));
  if (impossible)
    GTEST_SKIP() << "no huge pages here, or the kernel does not tell of them, or forbids copies";
}

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

// Here only the outputs are reached. Some parts, and one rank's whole output, are empty.
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
    bool all_huge = true;
    for (int r = 0; r < n && !rank.any_pages(); ++r)
      all_huge = all_huge && (of_huge[static_cast<std::size_t>(r)] || r == 1);
    EXPECT_EQ(copied > 0, all_huge);
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
