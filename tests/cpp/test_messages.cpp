// Messages with tags.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <csignal>
#include <functional>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric_here.hpp"
#include "processes.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

using Bytes = std::vector<std::uint8_t>;

// The content of message `number` between two ranks.
Bytes content(int from, int to, int number, std::size_t bytes) {
  std::minstd_rand random(static_cast<unsigned>(1 + from + 8 * to + 64 * number));
  Bytes all(bytes);
  std::generate(all.begin(), all.end(), [&] { return static_cast<std::uint8_t>(random()); });
  return all;
}
Call from(const Bytes& in) { return {.in = in.data(), .count = in.size(), .dtype = DType::u8}; }
Call into(Bytes& out) { return {.out = out.data(), .count = out.size(), .dtype = DType::u8}; }

constexpr std::size_t kSizes[] = {0, 1, 63, 1000, 16384, 16385, 70001, 1000003};
constexpr int kSizesNumber = static_cast<int>(std::size(kSizes));

class Messages : public testing::TestWithParam<int> {};

// Every rank has all sizes under way to every rank, itself too. Receives come in another order of tags.
TEST_P(Messages, ManyAreUnderWay) {
  const int n = GetParam();
  on_ranks(n, [n](Communicator& comm) {
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
  const int n = GetParam();
  on_ranks(n, [n](Communicator& comm) {
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

INSTANTIATE_TEST_SUITE_P(Ranks, Messages, testing::Values(1, 2, 3, 4, 5, 8));

TEST(Message, AWaitingReceiveHoldsUpNoCall) {
  on_ranks(2, [](Communicator& comm) {
    Bytes y(100000), later(3);
    const Bytes x = content(0, 1, 1, y.size()), z = content(0, 1, 2, 3);
    Work work;
    if (comm.rank() == 1) work = comm.begin(Collective::recv, into(y), -1, 0, 4);
    comm.barrier();
    std::atomic<bool> called = false;
    if (comm.rank() == 0) {
      std::thread other([&] { comm.send(from(x), 1, 4); });
      comm.barrier();
      comm.send(from(z), 1, 5);
      other.join();
    } else {
      EXPECT_FALSE(work.done());
      work.then([&] { called = true; });
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

TEST(Message, CallbacksBeginFurtherMessages) {
  constexpr int kHops = 50;
  on_ranks(2, [](Communicator& comm) {
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

TEST(Message, WrongOnesThrowAtOnce) {
  on_ranks(2, [](Communicator& comm) {
    Bytes x(3);
    auto refused = [&](const Call& call, Collective what, int peer, int tag) {
      return text_of<UsageError>([&] { comm.run(what, call, peer, peer, tag); });
    };
    EXPECT_TRUE(has(refused(from(x), Collective::send, 2, 0), "destination 2 is not a rank"));
    EXPECT_TRUE(has(refused(from(x), Collective::send, -1, 0), "destination -1 is not a rank"));
    EXPECT_TRUE(has(refused(into(x), Collective::recv, -2, 0), "source -2 is not a rank"));
    EXPECT_TRUE(has(refused(into(x), Collective::recv, 0, -1), "tag=-1 is none"));
    EXPECT_TRUE(has(refused(into(x), Collective::all_reduce, 0, 1), "all_reduce has no tag"));
    EXPECT_TRUE(has(refused(from(x), Collective::recv, 0, 1), "recv needs an output"));
    Call call = from(x);
    call.algorithm = "push";
    EXPECT_TRUE(has(refused(call, Collective::send, 0, 1), "has no algorithms"));
    call = from(x);
    call.memory = Memory::device;
    EXPECT_TRUE(has(refused(call, Collective::send, 0, 1), "is on host memory"));
    call = from(x);
    call.out = x.data();
    call.timeout_s = -1;
    EXPECT_TRUE(has(refused(call, Collective::send, 0, 1), "is no deadline"));
    EXPECT_TRUE(has(text_of<UsageError>([&] { comm.all_reduce(call); }), "is no deadline"));
  });
}

TEST(Message, OnTheFabricIsRefused) {
  if (const std::string why = no_fabric("tcp"); !why.empty()) GTEST_SKIP() << why;
  on_ranks(2, {.timeout_s = 120, .fabric = Communicator::Fabric{.provider = "tcp"}}, [](Communicator& comm) {
    Bytes x(3);
    EXPECT_TRUE(has(text_of<UsageError>([&] { comm.send(from(x), 0, 1); }), "between ranks of one machine"));
  });
}

TEST(Message, ALongerOneIsAnErrorOnBothRanks) {
  for (const std::size_t bytes : {std::size_t{10}, std::size_t{100000}}) {
    Texts texts(2);
    on_ranks(2, [&](Communicator& comm) {
      Bytes x(bytes), y(bytes - 1);
      texts[comm.rank()] = text_of<MismatchError>([&] {
        if (comm.rank() == 0) comm.send(from(x), 1, 9);
        else comm.recv(into(y), 0, 9);
        comm.barrier();
      });
    });
    texts.expect_one();
    EXPECT_TRUE(has(texts[0], "the message with tag 9 of rank 0 to rank 1 has " + std::to_string(bytes) +
                                  " bytes, but its receive has room for "))
        << texts[0];
  }
}

TEST(Message, CheckComparesDtypes) {
  on_ranks(2, {.timeout_s = 120, .check = true}, [](Communicator& comm) {
    Bytes x(8);
    Call call = from(x);
    call.out = x.data();
    if (comm.rank() == 0) call.dtype = DType::i8;
    const std::string text = text_of<MismatchError>([&] {
      comm.rank() == 0 ? comm.send(call, 1, 2) : static_cast<void>(comm.recv(call, 0, 2));
      comm.barrier();
    });
    EXPECT_TRUE(has(text, "is of i8, but its receive is of u8")) << text;
  });
}

// Tags that never match: the deadline is the call's, and the text says which tags have come.
TEST(Message, ADeadlineNamesTheRankAndTheTags) {
  for (const bool begins : {false, true}) {
    Texts texts(2);
    on_ranks(2, [&](Communicator& comm) {
      Bytes x(4);
      Call call = into(x);
      call.timeout_s = 0.05;
      Work work;
      texts[comm.rank()] = text_of<TimeoutError>([&] {
        if (comm.rank() == 0) {
          comm.send(from(x), 1, 5);
          comm.send(from(x), 1, 6);
        } else if (begins) {
          work = comm.begin(Collective::recv, call, -1, 0, 8);
          work.wait();
        } else {
          comm.recv(call, 0, 8);
        }
        comm.barrier();
      });
    });
    texts.expect_one();
    EXPECT_TRUE(has(texts[0],
                    "recv with tag 8 of rank 1 has waited 0.05 s for rank 0: see what that rank is "
                    "doing, give both ends of the message the same tag (messages with tag 5, 6 "
                    "have come)"))
        << texts[0];
  }
}

TEST(Deadline, OfACallNamesWhoIsMissing) {
  std::latch over(2);
  on_ranks(3, [&](Communicator& comm) {
    Words words;
    Call call = words.call();
    comm.all_reduce(call);
    call.timeout_s = 0.05;
    if (comm.rank() == 1) {
      over.wait();
      EXPECT_TRUE(has(text_of<TimeoutError>([&] { comm.all_reduce(call); }), "for rank 1"));
      return;
    }
    Work work;
    const std::string text = text_of<TimeoutError>([&] {
      if (comm.rank() == 0) return comm.all_reduce(call);
      work = comm.begin(Collective::all_reduce, call);
      work.wait();
    });
    EXPECT_TRUE(has(text, "has waited 0.05 s for rank 1")) << text;
    over.count_down();
  });
}

TEST(Message, CloseEndsThoseUnderWay) {
  on_ranks(2, [](Communicator& comm) {
    Bytes x(1), large(1000000);
    if (comm.rank() == 1) {
      comm.recv(into(x), 0, 0);
      return;  // and closes
    }
    const Work receive = comm.begin(Collective::recv, into(x), -1, Communicator::kAnySource, 1);
    const Work send = comm.begin(Collective::send, from(large), 1, -1, 2);
    comm.send(from(x), 1, 0);
    const std::string text = text_of<PeerLostError>([&] { receive.wait(); });
    EXPECT_TRUE(has(text, "has closed")) << text;
    EXPECT_EQ(text_of<PeerLostError>([&] { send.wait(); }), text);
  });
  on_ranks(1, [](Communicator& comm) {
    Bytes x(1);
    std::atomic<bool> called = false;
    std::latch begun(1);
    const Work work = comm.begin(Collective::recv, into(x), -1, 0, 1);
    work.then([&] { called = true; });
    std::thread other([&] {
      Bytes y(1);
      begun.count_down();
      EXPECT_TRUE(has(text_of<UsageError>([&] { comm.recv(into(y), 0, 2); }), "closed"));
    });
    comm.send(from(x), 0, 4);
    comm.recv(into(x), 0, 4);
    begun.wait();
    comm.close();
    EXPECT_TRUE(called);  // close waits for callbacks
    other.join();
    EXPECT_TRUE(has(text_of<UsageError>([&] { work.wait(); }), "closed"));
  });
}

// A sender dies in the middle of a large message.
TEST(Message, ADeadRankIsNamed) {
  if (UNISONO_SANITIZED) GTEST_SKIP() << "the thread sanitizer does not let a process with threads fork";
  Pipe to_child, to_parent;
  struct Piped final : Bootstrap {
    Piped(int me, Pipe& in, Pipe& out) : me_(me), in_(in), out_(out) {}
    int rank() const override { return me_; }
    int size() const override { return 2; }
    std::vector<std::string> all_gather(const std::string& data) override {
      std::array<char, 1024> mine{};
      std::copy(data.begin(), data.end(), mine.begin());
      out_.send(std::pair(data.size(), mine));
      const auto [bytes, text] = in_.receive<std::pair<std::size_t, std::array<char, 1024>>>();
      const std::string other(text.data(), bytes);
      return me_ == 0 ? std::vector{data, other} : std::vector{other, data};
    }
    int me_;
    Pipe &in_, &out_;
  };
  Child child([&] {
    Communicator comm(std::make_shared<Piped>(1, to_child, to_parent), {.timeout_s = 120});
    const Bytes x(1000000);
    Bytes y(2);
    comm.begin(Collective::send, from(x), 0, -1, 3);
    comm.recv(into(y), 0, 1);
    ::raise(SIGKILL);
    return 0;
  });
  Communicator comm(std::make_shared<Piped>(0, to_parent, to_child), {.timeout_s = 120});
  Bytes x(2), y(1000000);
  const Work work = comm.begin(Collective::recv, into(y), -1, 1, 4);
  comm.send(from(x), 1, 1);
  const std::string text = text_of<PeerLostError>([&] { work.wait(); });
  EXPECT_TRUE(has(text, "rank 1 (process " + std::to_string(child.pid()) + ") has died")) << text;
  EXPECT_EQ(text_of<PeerLostError>([&] { comm.recv(into(y), 1, 3); }), text);
}

}  // namespace
}  // namespace unisono::test
