// Messages with tags.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "messages.hpp"
#include "nodes_layout.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

// 36 bytes are the most within a record's line, 256 before records begin pages, 32768 of a piece, and 190464
// at once between two ranks; 262157 ends with a short piece. 16312 and 131000 are the most of a record over
// the fabric's shm and tcp. From 131072 on both ends copy.
constexpr std::size_t kSizes[] = {0,      1,      36,     37,     256,    257,    1000,   16312,
                                  16313,  16384,  16385,  20000,  32769,  70001,  131000, 131001,
                                  131071, 131072, 190464, 190465, 262157, 1000003};
constexpr int kSizesNumber = static_cast<int>(std::size(kSizes));
static_assert(kSizesNumber % 2 == 0);  // two have a tag

// A letter for each rank, which names its node.
class Messages : public OnLayout {};
class TwoRanks : public OnLayout {};
INSTANTIATE_TEST_SUITE_P(Nodes, TwoRanks, testing::Values("aa", "ab", "ab/records", "ab/fabric"));

// Every rank has all sizes under way to every rank, itself too. Receives come in another order of tags.
TEST_P(Messages, ManyAreUnderWay) {
  const int n = ranks_of(GetParam());
  on_layout(GetParam(), [n](Communicator& comm) {
    const int me = comm.rank();
    std::vector<Bytes> sent, got;
    std::vector<Work> sends, receives;
    std::vector<std::pair<int, int>> of;
    const std::size_t all = static_cast<std::size_t>(n) * std::size(kSizes);
    sent.reserve(all);
    got.reserve(all);
    for (int round = 0; round < 2; ++round) {
      for (int r = 0; r < n && round == me % 2; ++r)  // odd ranks post their receives first
        for (int i = 0; i < kSizesNumber; ++i) {
          sent.push_back(content(me, r, i, kSizes[i]));
          sends.push_back(comm.begin(Collective::send, from(sent.back()), r, -1, i / 2));
        }
      for (int r = 0; r < n && round != me % 2; ++r)
        for (int tag = kSizesNumber / 2 - 1; tag >= 0; --tag)
          for (const int i : {2 * tag, 2 * tag + 1}) {  // in order within a tag
            got.emplace_back(kSizes[i] + (i % 3 == 0 ? 5 : 0));
            of.emplace_back(r, i);
            receives.push_back(comm.begin(Collective::recv, into(got.back()), -1, r, tag));
          }
    }
    for (const Work& work : sends) work.wait();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto [r, number] = of[i];
      receives[i].wait();
      EXPECT_EQ(receives[i].received().source, r);
      EXPECT_EQ(receives[i].received().bytes, kSizes[number]);
      got[i].resize(kSizes[number]);
      EXPECT_EQ(got[i], content(r, me, number, kSizes[number])) << r << " " << number;
    }
    comm.barrier();
  });
}

TEST_P(Messages, OfAnySourceAndInOrder) {
  constexpr int kEach = 40;
  const int n = ranks_of(GetParam());
  on_layout(GetParam(), [n](Communicator& comm) {
    if (comm.rank() != 0) {
      std::vector<Bytes> sent;
      std::vector<Work> works;
      sent.reserve(kEach);
      for (int i = 0; i < kEach; ++i) {
        sent.push_back(content(comm.rank(), 0, i, i % 4 == 0 ? 20000 : 9));
        works.push_back(comm.begin(Collective::send, from(sent.back()), 0, -1, i % 4 == 0 ? 7 : 3));
      }
      for (const Work& work : works) work.wait();
      return comm.barrier();
    }
    std::vector<int> next(static_cast<std::size_t>(n), 0);
    for (int i = 0; i < kEach * 3 / 4 * (n - 1); ++i) {
      Bytes y(10);
      const Received received = comm.recv(into(y), Communicator::kAnySource, 3);
      int& number = next[static_cast<std::size_t>(received.source)];
      if (number % 4 == 0) {  // comes before this one
        Bytes large(20000);
        EXPECT_EQ(comm.recv(into(large), received.source, 7).bytes, 20000u);
        EXPECT_EQ(large, content(received.source, 0, number++, 20000));
      }
      EXPECT_EQ(received.bytes, 9u);
      y.resize(9);
      EXPECT_EQ(y, content(received.source, 0, number++, 9));
    }
    comm.barrier();
  });
}

TEST_P(Messages, LargeOnesFromSymmetricMemory) {
  constexpr std::size_t kBytes = 1234567;
  on_layout(GetParam(), [](Communicator& comm) {
    const int n = comm.size(), me = comm.rank(), right = (me + 1) % n, left = (me + n - 1) % n;
    const Buffer buffer = comm.empty(kBytes + 1);
    auto* const at = static_cast<std::uint8_t*>(buffer.data()) + 1;
    const Bytes x = content(me, right, 5, kBytes);
    std::copy(x.begin(), x.end(), at);
    Bytes got(kBytes + 9);
    for (const int source : {left, Communicator::kAnySource}) {
      std::fill(got.begin(), got.end(), std::uint8_t{0});
      const Work send =
          comm.begin(Collective::send, {.in = at, .count = kBytes, .dtype = DType::u8}, right, -1, 1);
      EXPECT_EQ(comm.recv(into(got), source, 1).source, left);
      send.wait();
      EXPECT_TRUE(std::equal(got.begin(), got.begin() + kBytes, content(left, me, 5, kBytes).begin()));
      EXPECT_EQ(std::count(got.begin() + kBytes, got.end(), 0), 9);
      comm.barrier();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Nodes, Messages,
                         testing::Values("a", "aa", "aaa", "aaaa", "aaaaa", "aaaaaaaa", "ab", "aab", "abab",
                                         "abcab", "ab/records", "abcab/records", "ab/fabric",
                                         "abcab/fabric"));

TEST_P(TwoRanks, AWaitingReceiveHoldsUpNoCall) {
  on_layout(GetParam(), [](Communicator& comm) {
    Bytes y(100000), later(3);
    const Bytes x = content(0, 1, 1, y.size()), z = content(0, 1, 2, 3);
    Work work;
    std::atomic<bool> called = false;
    if (comm.rank() == 1) {
      work = comm.begin(Collective::recv, into(y), -1, 0, 4);
      EXPECT_FALSE(work.done());
      work.then([&] { called = true; });
    }
    comm.barrier();
    if (comm.rank() == 0) {
      std::thread other([&] { comm.send(from(x), 1, 4); });
      comm.barrier();
      comm.send(from(z), 1, 5);
      other.join();
    } else {
      std::thread other([&] { comm.recv(into(later), 0, 5); });
      comm.barrier();
      other.join();
      work.wait();
      while (!called) std::this_thread::yield();
      EXPECT_EQ(y, x);
      EXPECT_EQ(later, z);
    }
  });
}

TEST_P(TwoRanks, CallbacksBeginFurtherMessages) {
  constexpr int kHops = 50;
  on_layout(GetParam(), [](Communicator& comm) {
    const int other = 1 - comm.rank();
    std::atomic<int> hops = 0, ended = 0;
    const Bytes ball = content(comm.rank(), other, 0, 64);
    Bytes got(64);
    std::function<void()> receive, next = [&] {
      EXPECT_EQ(got, content(other, comm.rank(), 0, 64));
      const bool last = ++hops == kHops;
      if (!last) receive();
      if (!last || comm.rank() == 1) comm.send(from(ball), other, 0);
      ++ended;
    };
    receive = [&] { comm.begin(Collective::recv, into(got), -1, other, 0).then([&] { next(); }); };
    receive();
    if (comm.rank() == 0) comm.send(from(ball), other, 0);
    while (ended < kHops) std::this_thread::yield();
  });
}

// More of them than a ring has room for, from some 3 KiB on of sizes that go around the cache now and then.
TEST_P(TwoRanks, ManyGoOneWay) {
  on_layout(GetParam(), [](Communicator& comm) {
    for (int i = 0; i < 400; ++i) {
      const Bytes x = content(0, 1, i, 1000 + std::size_t{79} * static_cast<std::size_t>(i));
      Bytes y(x.size());
      if (comm.rank() == 0) {
        comm.send(from(x), 1, 4);
      } else {
        comm.recv(into(y), 0, 4);
        ASSERT_EQ(y, x) << i;
      }
    }
    comm.barrier();
  });
}

// Its message goes while the sender does something else.
TEST_P(TwoRanks, ASenderThatDoesNotWaitIsServed) {
  for (const std::size_t bytes : {std::size_t{100}, std::size_t{3000000}}) {
    std::latch taken(1);
    on_layout(GetParam(), [&](Communicator& comm) {
      if (comm.rank() == 1) {
        Bytes y(bytes), z(bytes);
        comm.recv(into(y), 0, 2);
        EXPECT_EQ(y, content(0, 1, 2, bytes));
        comm.send(from(content(1, 0, 3, bytes)), 0, 3);  // whose receive does not wait either
        return taken.count_down();
      }
      const Bytes x = content(0, 1, 2, bytes);
      Bytes y(bytes);
      const Work send = comm.begin(Collective::send, from(x), 1, -1, 2),
                 receive = comm.begin(Collective::recv, into(y), -1, 1, 3);
      taken.wait();
      receive.wait();
      EXPECT_EQ(y, content(1, 0, 3, bytes));
      send.wait();
    });
  }
}

TEST_P(TwoRanks, SeveralThreadsWaitForDifferentOnes) {
  constexpr int kThreads = 3, kRounds = 30;
  on_layout(GetParam(), [](Communicator& comm) {
    const int me = comm.rank(), other = 1 - me;
    auto size = [](int tag, int round) {
      return kSizes[static_cast<std::size_t>(tag + round) % std::size(kSizes)];
    };
    auto body = [&](int tag) {
      for (int i = 0; i < kRounds; ++i) {
        const Bytes x = content(me, other, tag, size(tag, i));
        Bytes y(x.size());
        const Work receive = comm.begin(Collective::recv, into(y), -1, other, tag);
        std::thread too([&] { receive.wait(); });
        if (i % 2 == 0) comm.send(from(x), other, tag);
        else comm.begin(Collective::send, from(x), other, -1, tag).wait();
        receive.wait();
        too.join();
        EXPECT_EQ(y, content(other, me, tag, y.size()));
      }
    };
    std::vector<std::thread> threads;
    for (int tag = 1; tag < kThreads; ++tag) threads.emplace_back(body, tag);
    body(0);
    for (std::thread& thread : threads) thread.join();
  });
}

TEST_P(TwoRanks, AWaitHasATimeoutOfItsOwn) {
  std::latch waited(1);
  on_layout(GetParam(), [&](Communicator& comm) {
    const Bytes x = content(0, 1, 0, 200000);
    if (comm.rank() == 0) {
      waited.wait();
      return comm.send(from(x), 1, 0);
    }
    Bytes y(x.size());
    const Work work = comm.begin(Collective::recv, into(y), -1, 0, 0);
    EXPECT_TRUE(has(text_of<TimeoutError>([&] { work.wait(0.001); }), "recv has not ended within 0.001"));
    EXPECT_FALSE(work.done());
    waited.count_down();
    work.wait();
    EXPECT_EQ(y, x);
  });
}

// A thread that waits may run the callbacks, which may wait, and may end the communicator.
TEST_P(TwoRanks, CallbacksOfOneThatIsWaitedFor) {
  std::latch begun(1);
  on_layout(GetParam(), [&](Communicator& comm) {
    Bytes x(9), y(9);
    if (comm.rank() == 0) {
      begun.wait();
      comm.send(from(x), 1, 0);
      comm.send(from(x), 1, 1);
      return comm.barrier();
    }
    auto mine = std::make_unique<Communicator>(std::move(comm));
    std::atomic<int> calls = 0;
    const Work work = mine->begin(Collective::recv, into(x), -1, 0, 0);
    work.then([&] {
      mine->begin(Collective::recv, into(y), -1, 0, 1).wait();
      ++calls;
    });
    work.then([&] {
      mine->barrier();
      mine.reset();
      ++calls;
    });
    begun.count_down();
    work.wait();
    while (calls < 2) std::this_thread::yield();
    EXPECT_FALSE(mine);
  });
}

TEST(Message, TheEndOfTheCommunicatorEndsAWait) {
  on_ranks(1, [&](Communicator& comm) {
    auto mine = std::make_unique<Communicator>(std::move(comm));
    Bytes x(9);
    std::vector<Work> works;
    for (int tag = 0; tag < 3; ++tag) works.push_back(mine->begin(Collective::recv, into(x), -1, 0, tag));
    std::vector<std::thread> threads;
    for (const Work& work : works)
      threads.emplace_back([&] { EXPECT_TRUE(has(text_of<UsageError>([&] { work.wait(); }), "closed")); });
    mine.reset();
    for (std::thread& thread : threads) thread.join();
  });
}

}  // namespace
}  // namespace unisono::test
