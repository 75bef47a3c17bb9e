// Large messages with tags between two processes, which both ends copy while the sender waits.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/process.hpp"
#include "host/portions.hpp"
#include "messages.hpp"
#include "piped.hpp"
#include "processes.hpp"
#include "ranks.hpp"
#include "unisono/tuning.hpp"

namespace {

constexpr std::size_t kLook = std::size_t{64} << 10;  // bytes of the copy that ranks time when they meet

// The kernel's answer to a copy.
enum class Does { copies, seems_fast, refuses, stops, ends_the_process };

// Shared by both processes.
struct Shared {
  std::atomic<int> reads = 0, writes = 0;  // that have begun
  std::atomic<bool> interrupted = false;
};
Shared* shared = nullptr;  // none: the kernel copies
Does reading = Does::copies, writing = Does::copies;
bool reads_after_writes = false;      // a read begins when a write has
bool writes_after_reads = false;      // a write begins when a read has
bool writes_after_interrupt = false;  // a write begins when the other end has given up

ssize_t as(Does does, const std::function<ssize_t()>& copy) {
  if (does == Does::ends_the_process) ::raise(SIGKILL);
  if (does == Does::stops) ::raise(SIGSTOP);
  if (does != Does::refuses) return copy();
  errno = EPERM;
  return -1;
}
void wait_for(const std::function<bool()>& done) {
  while (!done()) ::usleep(100);
}

}  // namespace

// Take the place of the C library's.
extern "C" {
ssize_t process_vm_readv(pid_t pid, const iovec* here, unsigned long heres, const iovec* there,
                         unsigned long theres, unsigned long flags) {
  if (reading == Does::seems_fast && here->iov_len == kLook) return kLook;
  if (shared) ++shared->reads;
  if (reads_after_writes) wait_for([] { return shared->writes > 0; });
  return as(reading, [&] { return ::syscall(SYS_process_vm_readv, pid, here, heres, there, theres, flags); });
}
ssize_t process_vm_writev(pid_t pid, const iovec* here, unsigned long heres, const iovec* there,
                          unsigned long theres, unsigned long flags) {
  if (shared) ++shared->writes;
  if (writes_after_reads) wait_for([] { return shared->reads > 0; });
  if (writes_after_interrupt) {
    wait_for([] { return shared->interrupted.load(); });
    ::usleep(20000);  // a receive that does not wait for this would have ended
  }
  return as(writing,
            [&] { return ::syscall(SYS_process_vm_writev, pid, here, heres, there, theres, flags); });
}
}

namespace unisono::test {
namespace {

using host::Portion;
using host::Portions;

TEST(Portions, AreTheWholeMessage) {
  for (const std::size_t bytes :
       {std::size_t{1}, Portions::kLeast, Portions::kLeast + 1, std::size_t{5000003}, std::size_t{1} << 32,
        (std::size_t{1} << 36) + 7, std::size_t{1} << 44}) {
    Portions portions{};
    portions.open(7, bytes);
    EXPECT_EQ(portions.take(true, 6, bytes).bytes(), 0u);
    std::size_t begin = 0, end = bytes;
    for (unsigned turn = 0; begin < end; turn = turn * 5 + 3) {
      const bool from_end = turn % 4 >= 2;
      const Portion part = portions.take(from_end, 7, bytes);
      ASSERT_GT(part.bytes(), 0u) << bytes;
      EXPECT_EQ(from_end ? part.end : part.begin, from_end ? end : begin) << bytes;
      (from_end ? end : begin) = from_end ? part.begin : part.end;
      EXPECT_TRUE(part.bytes() <= Portions::kMost || bytes > std::size_t{1} << 36) << bytes;
    }
    EXPECT_EQ(begin, end);
    EXPECT_EQ(portions.take(false, 7, bytes).bytes() + portions.take(true, 7, bytes).bytes(), 0u);
  }
  Portions portions{};
  portions.open(1, 5000003);
  portions.close();
  EXPECT_EQ(portions.take(false, 1, 5000003).bytes(), 0u);
}

TEST(Portions, AreTakenOnce) {
  constexpr std::size_t kBytes = std::size_t{200} << 20;
  Portions portions{};
  for (std::uint32_t number = 1; number < 50; ++number) {
    portions.open(number, kBytes);
    const auto take_all = [&](bool from_end) {
      std::size_t all = 0;
      while (const std::size_t bytes = portions.take(from_end, number, kBytes).bytes()) all += bytes;
      return all;
    };
    std::size_t others = 0;
    std::thread other([&] { others = take_all(true); });
    const std::size_t mine = take_all(false);
    other.join();
    EXPECT_EQ(mine + others, kBytes);
  }
}

struct Interrupt {};

// One of two processes.
struct Rank {
  Communicator& comm;
  Pipe &in, &out;  // from and to the other
  bool& interrupts;
  int child;  // the other process, of the receiver
};

// Runs sender(rank), in a child, and receiver(rank), where the kernel's copies seem fast: all pages suit
// them. Expects that the child ends so.
void on_both(const std::function<void(Rank&)>& sender, const std::function<void(Rank&)>& receiver,
             int status = 0) {
  if (UNISONO_SANITIZED) GTEST_SKIP() << "the thread sanitizer does not let a process with threads fork";
  void* const memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const counts = new (memory) Shared;
  Pipe to_child, to_parent;
  bool possible = true;
  const auto play = [&](int me, const std::function<void(Rank&)>& body, int child) {
    Pipe &in = me == 0 ? to_parent : to_child, &out = me == 0 ? to_child : to_parent;
    bool interrupts = false;
    reading = Does::seems_fast;
    Communicator comm(std::make_shared<Piped>(me, in, out), {.timeout_s = 100, .while_waiting = [&] {
                                                               if (!interrupts || counts->writes == 0) return;
                                                               counts->interrupted = true;
                                                               throw Interrupt();
                                                             }});
    reading = Does::copies;
    possible = Tuning(comm).kernel_copies() == "fast" && Cores::of_this_process().count() > 1;
    Rank rank{comm, in, out, interrupts, child};
    shared = counts;
    if (possible) body(rank);
    shared = nullptr;
  };
  Child child([&] {
    play(1, sender, 0);
    return testing::Test::HasFailure() ? 1 : 0;
  });
  play(0, receiver, child.pid());
  reading = writing = Does::copies;
  reads_after_writes = writes_after_reads = writes_after_interrupt = false;
  if (possible) { EXPECT_EQ(child.wait(), status); }
  child.wait();
  ::munmap(memory, sizeof(Shared));
  if (!possible) GTEST_SKIP() << "the kernel forbids copies here, or there is one core";
}

void send(const Rank& rank, std::size_t bytes, int tag = 3) {
  rank.comm.send(from(content(1, 0, tag, bytes)), 0, tag);
}
void receive(const Rank& rank, std::size_t bytes, int tag = 3) {
  Bytes got(bytes);
  EXPECT_EQ(rank.comm.recv(into(got), 1, tag).bytes, bytes);
  EXPECT_EQ(got, content(1, 0, tag, bytes));
}

constexpr std::size_t kBytes = 3000003;

// The receiver reads nothing before its sender writes: a message below the border would never come so.
TEST(SharedMessage, IsCopiedByBothEnds) {
  for (const std::size_t bytes :
       {std::size_t{131072}, std::size_t{131073}, std::size_t{262157}, kBytes, std::size_t{9000001}})
    on_both([=](Rank& rank) { send(rank, bytes); },
            [=](Rank& rank) {
              reads_after_writes = true;
              receive(rank, bytes);
              EXPECT_GT(shared->writes, 0);
            });
  on_both([](Rank& rank) { send(rank, 131071); },
          [](Rank& rank) {
            receive(rank, 131071);
            EXPECT_EQ(shared->writes, 0);
          });
}

// A later one has come, or its receive has, before the call that waits for it.
TEST(SharedMessage, MeetsItsReceiveLaterOrEarlier) {
  on_both(
      [](Rank& rank) {
        const Bytes x = content(1, 0, 4, kBytes);
        const Work work = rank.comm.begin(Collective::send, from(x), 0, -1, 4);
        send(rank, 1, 1);
        work.wait();
        Bytes y(1);
        rank.comm.recv(into(y), 0, 2);
        send(rank, 2 * kBytes, 5);
      },
      [](Rank& rank) {
        receive(rank, 1, 1);
        receive(rank, kBytes, 4);
        shared->writes = 0;
        reads_after_writes = true;
        Bytes y(2 * kBytes);
        const Work work = rank.comm.begin(Collective::recv, into(y), -1, 1, 5);
        rank.comm.send(from(Bytes(1)), 1, 2);
        work.wait();
        EXPECT_EQ(y, content(1, 0, 5, y.size()));
      });
}

// A sender that does something else, or only looks now and then, leaves all to its receiver.
TEST(SharedMessage, NeedsNoHelp) {
  on_both(
      [](Rank& rank) {
        const Bytes x = content(1, 0, 3, kBytes);
        const Work work = rank.comm.begin(Collective::send, from(x), 0, -1, 3);
        EXPECT_EQ(rank.in.receive<int>(), 1);
        EXPECT_EQ(shared->writes, 0);
        while (!work.done()) std::this_thread::yield();
      },
      [](Rank& rank) {
        receive(rank, kBytes);
        rank.out.send(1);
      });
}

// Both ends look now and then.
TEST(SharedMessage, OfEndsThatLook) {
  const auto look = [](const Work& work) {
    while (!work.done()) {
      try {
        work.wait(1e-9);
      } catch (const TimeoutError&) {}
    }
  };
  on_both(
      [&](Rank& rank) {
        const Bytes x = content(1, 0, 3, kBytes);
        look(rank.comm.begin(Collective::send, from(x), 0, -1, 3));
      },
      [&](Rank& rank) {
        Bytes y(kBytes);
        look(rank.comm.begin(Collective::recv, into(y), -1, 1, 3));
        EXPECT_EQ(y, content(1, 0, 3, kBytes));
      });
}

// Messages go both ways at once, of two threads of each process.
TEST(SharedMessage, GoBothWays) {
  const auto both = [](int me) {
    return [=](Rank& rank) {
      const auto exchange = [&](int thread) {
        for (int i = 0; i < 12; ++i) {
          const std::size_t bytes = (std::size_t{1} << (17 + i % 6)) + static_cast<std::size_t>(i);
          const int tag = 100 * thread + i;
          const Bytes x = content(me, 1 - me, tag, bytes);
          Bytes y(bytes);
          const Work receive = rank.comm.begin(Collective::recv, into(y), -1, 1 - me, tag);
          if (i % 2 == 0) rank.comm.send(from(x), 1 - me, tag);
          else rank.comm.begin(Collective::send, from(x), 1 - me, -1, tag).wait();
          receive.wait();
          EXPECT_EQ(y, content(1 - me, me, tag, bytes));
        }
      };
      std::thread other([&] { exchange(1); });
      exchange(0);
      other.join();
    };
  };
  on_both(both(1), both(0));
}

// A copy that the kernel refuses once is not asked for again.
TEST(SharedMessage, ComesInPartsIfTheKernelRefuses) {
  for (const bool refuses_reads : {false, true})
    on_both(
        [=](Rank& rank) {
          if (!refuses_reads) writing = Does::refuses;
          send(rank, kBytes);
          send(rank, 2 * kBytes);
        },
        [=](Rank& rank) {
          if (refuses_reads) reading = Does::refuses;
          reads_after_writes = true;
          receive(rank, kBytes);
          const int writes = shared->writes;
          reads_after_writes = false;
          receive(rank, 2 * kBytes);
          EXPECT_EQ(shared->writes, writes);
        });
}

TEST(SharedMessage, OfARankThatDiesIsAnError) {
  on_both(
      [](Rank& rank) {
        writing = Does::ends_the_process;
        send(rank, kBytes);
      },
      [](Rank& rank) {
        reads_after_writes = true;
        Bytes y(kBytes);
        const std::string text = text_of<PeerLostError>([&] { rank.comm.recv(into(y), 1, 3); });
        EXPECT_TRUE(has(text, "rank 1 (process ") && has(text, ") has died")) << text;
      },
      -1);
  on_both(
      [](Rank& rank) {
        reads_after_writes = true;
        reading = Does::ends_the_process;
        Bytes y(kBytes);
        rank.comm.recv(into(y), 0, 3);
      },
      [](Rank& rank) {
        const Bytes x(kBytes);
        const std::string text = text_of<PeerLostError>([&] { rank.comm.send(from(x), 1, 3); });
        EXPECT_TRUE(has(text, "rank 1 (process ") && has(text, ") has died")) << text;
      },
      -1);
}

// A rank is stopped while it copies: the other one's deadline holds.
TEST(SharedMessage, OfARankThatStopsIsLate) {
  const auto late = [](const Rank& rank, Call call, Collective what) {
    call.timeout_s = 0.2;
    const std::string text = text_of<TimeoutError>([&] { rank.comm.run(what, call, 1, 1, 3); });
    EXPECT_TRUE(has(text, "has waited 0.2 s for rank 1")) << text;
    ::kill(rank.child, SIGCONT);
  };
  on_both(
      [](Rank& rank) {
        writing = Does::stops;
        text_of<TimeoutError>([&] { send(rank, kBytes); });
      },
      [&](Rank& rank) {
        reads_after_writes = true;
        Bytes y(kBytes);
        late(rank, into(y), Collective::recv);
      });
  on_both(
      [](Rank& rank) {
        reading = Does::stops;
        Bytes y(kBytes);
        try {
          rank.comm.recv(into(y), 0, 3);  // all of it may be there
        } catch (const TimeoutError&) {}
      },
      [&](Rank& rank) {
        writes_after_reads = true;  // or the sender might write all of it
        const Bytes x(kBytes);
        late(rank, from(x), Collective::send);
      });
}

// The receiver gets an exception while its sender writes, and may use its memory for something else.
TEST(SharedMessage, AnInterruptedReceiveIsNotWritten) {
  on_both(
      [](Rank& rank) {
        writes_after_interrupt = true;
        const std::string text = text_of<PeerLostError>([&] { send(rank, kBytes); });
        EXPECT_TRUE(has(text, "has closed its communicator")) << text;
        rank.out.send(1);
      },
      [](Rank& rank) {
        reads_after_writes = true;
        rank.interrupts = true;
        Bytes y(kBytes);
        EXPECT_THROW(rank.comm.recv(into(y), 1, 3), Interrupt);
        std::fill(y.begin(), y.end(), std::uint8_t{1});
        EXPECT_EQ(rank.in.receive<int>(), 1);
        EXPECT_EQ(std::count(y.begin(), y.end(), 1), static_cast<std::ptrdiff_t>(kBytes));
      });
}

}  // namespace
}  // namespace unisono::test
