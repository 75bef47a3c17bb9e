// Tests the transport over NCCL without a GPU: its calls of NCCL, deadlines and errors. Ranks are threads,
// and a stand-in for NCCL (faulty_nccl.cpp) carries their messages. test_cuda_nccl.cpp uses the real NCCL.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <thread>

#include "nodes/transport_nccl.hpp"
#include "processes.hpp"
#include "ranks.hpp"
#include "reference.hpp"
#include "unisono/error.hpp"

namespace unisono::nodes {
namespace {

using test::Bytes;
using test::has;
using test::text_of;

const int chosen = ::setenv("UNISONO_NCCL", FAULTY_NCCL, 1);  // before anything asks for NCCL

// Host memory with a stream that runs nothing by itself: a mark is reached when the test sets `done`.
class SlowSpace final : public GpuSpace {
 public:
  std::atomic<bool> done = true, captures = false;

  Memory memory() const override { return Memory::host; }
  std::size_t grain() const override { return 1; }
  byte* scratch(Scratch, int, std::size_t) override { return nullptr; }
  void copy(byte*, const byte*, std::size_t) override {}
  void combine(const Combine&) override {}
  void requantise(const Requantise&) override {}
  void begin(void*) override {}
  void end() noexcept override {}
  bool captured() const override { return captures; }
  bool idle(void*) const override { return done; }
  std::shared_ptr<void> enter_thread() const override { return {}; }
  // Returns a mark before an exchange, which is always reached, or the one behind it, reached when all is
  // done.
  std::unique_ptr<Mark> mark() override {
    class Point final : public Mark {
     public:
      Point(const std::atomic<bool>& done, bool first) : done_(done), first_(first) {}
      bool reached() const override { return first_ || done_; }

     private:
      const std::atomic<bool>& done_;
      bool first_;
    };
    return std::make_unique<Point>(done, marks_++ % 2 == 0);
  }

 private:
  int marks_ = 0;
};

std::string who(int rank) { return "rank " + std::to_string(rank) + " (node " + std::to_string(rank) + ")"; }

struct Rank {
  Rank(
      Bootstrap& bootstrap, double timeout_s, std::function<void()> look = [] {})
      : transport({bootstrap, space, timeout_s, who, std::move(look)}) {}
  SlowSpace space;
  NcclTransport transport;
};

// A bootstrap of two ranks, in which the test supplies the data of the other one.
class Alone final : public Bootstrap {
 public:
  explicit Alone(std::string other) : other_(std::move(other)) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::vector<std::string> all_gather(const std::string& data) override { return {data, other_}; }

 private:
  std::string other_;
};

// Returns 0 if the error is the expected one. Requires a process of its own, before any other test: a process
// reads its environment and opens NCCL only once.
int without_nccl(const std::string& file, const std::string& expected) {
  ::setenv("UNISONO_NCCL", file.c_str(), 1);
  Alone alone("ready");
  try {
    const Rank rank(alone, 60);
  } catch (const UsageError& error) {
    const bool matches = has(error.what(), "rank 0 (node 0)") && has(error.what(), expected);
    if (!matches) std::fprintf(stderr, "%s\n", error.what());
    return matches ? 0 : 1;
  }
  return 2;
}

TEST(NcclLibrary, AbsentOrTooOld) {
  const char* const absent = "/nonexistent/libnccl.so.2";
  EXPECT_EQ(test::Child([&] { return without_nccl(absent, "name the file in UNISONO_NCCL"); }).wait(), 0);
  EXPECT_EQ(test::Child([&] { return without_nccl("libdl.so.2", "has no ncclGetUniqueId"); }).wait(), 0);
}

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(chosen, 0);
    void* const library = ::dlopen(FAULTY_NCCL, RTLD_NOW | RTLD_LOCAL);
    ask = reinterpret_cast<void (*)(const char*)>(::dlsym(library, "unisono_test_fault"));
    aborts = reinterpret_cast<int (*)()>(::dlsym(library, "unisono_test_aborts"));
    ASSERT_TRUE(ask && aborts);
  }
  void TearDown() override { ask(""); }

  // Runs body(rank, transport and space) on every rank.
  void on_ranks(int size, double timeout_s, const std::function<void(int, Rank&)>& body) {
    const auto bootstraps = thread_bootstraps(size, std::chrono::seconds(60));
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r)
      threads.emplace_back([&, r] {
        try {
          Rank rank(*bootstraps[static_cast<std::size_t>(r)], timeout_s);
          body(r, rank);
        } catch (const std::exception& error) { ADD_FAILURE() << "rank " << r << ": " << error.what(); }
      });
    for (std::thread& thread : threads) thread.join();
  }
  void (*ask)(const char*) = nullptr;
  int (*aborts)() = nullptr;
};

TEST_F(Nccl, CarriesEveryMessageOfAnExchange) {
  constexpr int kRanks = 3;
  on_ranks(kRanks, 60, [](int me, Rank& rank) {
    auto text = [](int from, int to, int round) {
      return test::random_bytes(static_cast<unsigned>(1 + 1000 * from + 10 * to + round),
                                static_cast<unsigned>(from * 16 + to));
    };
    for (int round = 0; round < 20; ++round) {
      std::vector<Bytes> out(kRanks), in(kRanks);
      std::vector<Outgoing> sends;
      std::vector<Incoming> receives;
      for (int p = 0; p < kRanks; ++p) {
        if (p == me) continue;
        auto& to = out[static_cast<std::size_t>(p)] = text(me, p, round);
        auto& from = in[static_cast<std::size_t>(p)] = Bytes(text(p, me, round).size());
        sends.push_back({to.data(), to.size(), p});
        receives.push_back({from.data(), from.size(), p});
      }
      const auto pending = rank.transport.exchange(sends, receives);
      EXPECT_TRUE(pending->test());
      EXPECT_TRUE(pending->open().empty());
      for (int p = 0; p < kRanks; ++p)
        if (p != me) { EXPECT_EQ(in[static_cast<std::size_t>(p)], text(p, me, round)); }
    }
    rank.transport.synchronize(nullptr);
  });
}

// Waits for a message from rank 1, which never comes. Returns the text of the error that ends the wait in
// NCCL.
template <class E>
std::string text_of_receive(Rank& rank) {
  char got = 0;
  const Incoming one{&got, 1, 1};
  return text_of<E>([&] { rank.transport.exchange({}, {&one, 1}); });
}

TEST_F(Nccl, APeerThatStaysAwayEndsTheCallThatWaitsInNccl) {
  std::latch over(1);
  on_ranks(2, 0.3, [&](int me, Rank& rank) {
    if (me == 1) return over.wait();
    for (int i = 0; i < 2; ++i) {  // later calls too
      const std::string text = text_of_receive<TimeoutError>(rank);
      EXPECT_TRUE(has(text, "rank 0 (node 0) has waited 0.3 s on its GPU for rank 1 (node 1)")) << text;
    }
    EXPECT_TRUE(has(text_of<TimeoutError>([&] { rank.transport.synchronize(nullptr); }), "rank 1"));
    over.count_down();
  });
}

// Begins an exchange that the other rank does not take part in.
void send_to(Rank& rank, int peer) {
  static const char kByte = 1;
  const Outgoing one{&kByte, 1, peer};
  rank.transport.exchange({&one, 1}, {});
}

TEST_F(Nccl, TheDeadlineAbortsNcclEvenBetweenCalls) {
  std::latch over(1);
  on_ranks(2, 0.3, [&](int me, Rank& rank) {
    if (me == 1) return over.wait();
    rank.space.done = false;
    const int before = aborts();
    send_to(rank, 1);
    for (int i = 0; i < 3000 && aborts() == before; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_EQ(aborts(), before + 1);
    EXPECT_TRUE(has(text_of<TimeoutError>([&] { send_to(rank, 1); }), "rank 1 (node 1)"));
    over.count_down();
  });
}

TEST_F(Nccl, CapturedExchangesAreNotWatched) {
  std::latch over(1);
  on_ranks(2, 0.1, [&](int me, Rank& rank) {
    if (me == 1) return over.wait();
    rank.space.done = false;
    rank.space.captures = true;
    const int before = aborts();
    send_to(rank, 1);
    std::this_thread::sleep_for(std::chrono::seconds(1));
    EXPECT_EQ(aborts(), before);
    send_to(rank, 1);
    over.count_down();
  });
}

TEST_F(Nccl, SynchronizeEndsByTheDeadline) {
  std::latch over(1);
  on_ranks(2, 0.3, [&](int me, Rank& rank) {
    if (me == 1) return over.wait();
    rank.space.captures = true;  // keeps the watcher from ending the exchange first
    send_to(rank, 1);
    rank.space.done = false;
    const std::string text = text_of<TimeoutError>([&] { rank.transport.synchronize(nullptr); });
    EXPECT_TRUE(has(text, "for rank 1 (node 1) over NCCL")) << text;
    over.count_down();
  });
}

TEST_F(Nccl, CloseWaitsForExchangesUnderWay) {
  std::latch over(1);
  on_ranks(2, 60, [&](int me, Rank& rank) {
    if (me == 1) return over.wait();
    rank.space.done = false;
    send_to(rank, 1);
    const int before = aborts();
    std::thread closing([&] { rank.transport.close(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(aborts(), before);
    rank.space.done = true;
    closing.join();
    EXPECT_EQ(aborts(), before + 1);
    rank.transport.close();
    EXPECT_TRUE(has(text_of<PeerLostError>([&] { send_to(rank, 1); }), "it has been closed"));
    over.count_down();
  });
}

TEST_F(Nccl, CloseEndsACallThatWaitsInNccl) {
  std::latch over(1);
  on_ranks(2, 60, [&](int me, Rank& rank) {
    if (me == 1) return over.wait();
    std::thread closing([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      rank.transport.close();
    });
    const std::string text = text_of_receive<PeerLostError>(rank);
    EXPECT_TRUE(has(text, "rank 1 (node 1) over NCCL (it has been closed)")) << text;
    closing.join();
    over.count_down();
  });
}

TEST_F(Nccl, AFailedNodeEndsWaits) {
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(60));
  std::atomic<bool> failed = false;
  std::thread other([&] { const Rank rank(*bootstraps[1], 60); });
  Rank rank(*bootstraps[0], 60, [&] {
    if (failed) throw PeerLostError("rank 2 has died");
  });
  other.join();
  send_to(rank, 1);
  failed = true;
  rank.space.done = false;
  EXPECT_EQ(text_of<PeerLostError>([&] { rank.transport.synchronize(nullptr); }), "rank 2 has died");
  rank.transport.close();  // does not wait for the exchange under way
}

TEST_F(Nccl, AForkedChildLeavesNcclToItsParent) {
  std::latch joined(1), over(1);
  on_ranks(2, 60, [&](int me, Rank& rank) {
    if (me == 1) {
      joined.count_down();
      return over.wait();
    }
    joined.wait();
    const int before = aborts();
    test::Child child([&] {
      rank.transport.close();
      return aborts() - before;
    });
    EXPECT_EQ(child.wait(), 0);
    send_to(rank, 1);
    over.count_down();
  });
}

TEST_F(Nccl, ErrorsHaveNcclsOwnWords) {
  on_ranks(2, 60, [this](int me, Rank& rank) {
    if (me == 1) return;
    ask("send");
    std::string text = text_of<PeerLostError>([&] { send_to(rank, 1); });
    EXPECT_TRUE(
        has(text,
            "rank 0 (node 0) cannot reach rank 1 (node 1) over NCCL (ncclSend failed: unhandled system "
            "error (the test wants it)): "))
        << text;
    EXPECT_TRUE(has(text, "NCCL_DEBUG=WARN")) << text;
    ask("async");
    text = text_of<PeerLostError>([&] { send_to(rank, 1); });
    EXPECT_TRUE(has(text, "remote process exited")) << text;
    ask("");
    send_to(rank, 1);  // the group of the failed call has been closed
  });
}

TEST_F(Nccl, NobodyJoins) {
  Alone alone("ready");
  const std::string text = text_of<TimeoutError>([&] { const Rank rank(alone, 0.3); });
  EXPECT_TRUE(has(text, "rank 0 (node 0) has waited 0.3 s for the others to join NCCL")) << text;
  EXPECT_TRUE(has(text, "NCCL_SOCKET_IFNAME")) << text;
}

TEST_F(Nccl, JoiningFails) {
  Alone alone("ready");
  ask("init");
  const std::string text = text_of<ResourceError>([&] { const Rank rank(alone, 60); });
  EXPECT_TRUE(has(text, "ncclCommInitRank failed: unhandled system error")) << text;
}

TEST_F(Nccl, ARankWithoutNcclIsNamed) {
  Alone alone("");
  const std::string text = text_of<UsageError>([&] { const Rank rank(alone, 60); });
  EXPECT_TRUE(has(text, "which rank 1 (node 1) cannot use: see the error there")) << text;
}

}  // namespace
}  // namespace unisono::nodes
