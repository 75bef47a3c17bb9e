// Calls that begin and run beside the program, and calls of several threads.
#include "unisono/work.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nodes_world.hpp"
#include "processes.hpp"
#include "works.hpp"

namespace unisono::test {
namespace {

class Works : public testing::TestWithParam<int> {};

TEST_P(Works, RunInTheOrderInWhichTheyBegan) {
  const int n = GetParam();
  on_ranks(n, [n](Communicator& comm) {
    constexpr std::size_t kCounts[] = {1, 0, 70001, 5, 300, 1001, 40000};
    std::vector<Ints> ins, outs;
    for (const std::size_t count : kCounts) {
      ins.push_back(input(comm.rank(), count));
      outs.emplace_back(count, -1);
    }
    std::vector<Work> works;
    for (std::size_t i = 0; i < ins.size(); ++i)
      works.push_back(comm.begin(Collective::all_reduce, call_of(ins[i], outs[i], ins[i].size())));
    const Ints mine = input(comm.rank(), 17);
    Ints after(17, -1);
    comm.all_reduce(call_of(mine, after, 17));  // waits for its turn
    EXPECT_EQ(after, sums(n, 17));
    for (std::size_t i = 0; i < ins.size(); ++i) {
      EXPECT_TRUE(works[i].done());
      works[i].wait();
      works[i].wait(1);
      EXPECT_EQ(outs[i], sums(n, ins[i].size())) << i;
      EXPECT_FALSE(works[i].error());
    }
  });
}

TEST_P(Works, OfEveryForm) {
  const int n = GetParam();
  on_ranks(n, [n](Communicator& comm) {
    const int me = comm.rank(), right = (me + 1) % n, left = (me + n - 1) % n;
    const auto ranks = static_cast<std::size_t>(n);
    constexpr std::size_t kCount = 33;
    const Ints small = input(me, kCount), large = input(me, kCount * ranks);
    Ints gathered(kCount * ranks, -1), exchanged = gathered, turned = gathered, got(kCount, -1),
                                       batched = got;
    std::vector<Work> works;
    works.push_back(comm.begin(Collective::all_gather, call_of(small, gathered, kCount)));
    works.push_back(comm.begin(Collective::barrier));
    {
      std::vector<std::size_t> counts(ranks, kCount);  // gone before the call may have run
      works.push_back(comm.begin(call_of(large, exchanged, 0), counts, counts));
      Call one = call_of(large, turned, kCount);
      const std::string algorithm = "push";
      one.algorithm = algorithm;
      works.push_back(comm.begin(Collective::all_to_all, one));
    }
    works.push_back(comm.begin(Collective::send_recv, call_of(small, got, kCount), right, left));
    {
      const std::array to{Outgoing{small.data(), 4 * kCount, right}};
      const std::array from{Incoming{batched.data(), 4 * kCount, left}};
      works.push_back(comm.begin(Call{}, to, from));
    }
    for (const Work& work : works) work.wait();
    for (std::size_t i = 0; i < gathered.size(); ++i) {
      const int from = static_cast<int>(i / kCount);
      EXPECT_EQ(gathered[i], value(from, i % kCount));
      EXPECT_EQ(exchanged[i], value(from, static_cast<std::size_t>(me) * kCount + i % kCount));
    }
    EXPECT_EQ(turned, exchanged);
    EXPECT_EQ(got, input(left, kCount));
    EXPECT_EQ(batched, got);
    if (n < 2 || me > 1) return;
    Work work = me == 0 ? comm.begin(Collective::send, call_of(small, got, kCount), 1, 0)
                        : comm.begin(Collective::recv, call_of(small, got, kCount), 1, 0);
    work.wait();
    EXPECT_EQ(got, input(me == 0 ? left : 0, kCount));
  });
}

// Each call scales its input in its turn: one in place begins with the sum before it.
TEST_P(Works, ScaleTheirInputsInTheirTurn) {
  const int n = GetParam();
  on_ranks(n, [n](Communicator& comm) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{3}, std::size_t{40001}}) {
      const float factor = 0.5F / static_cast<float>(comm.rank() + 1);
      std::vector<float> x(count, static_cast<float>(comm.rank() + 1)),
          parts(count * static_cast<std::size_t>(n), 4);
      std::vector<float> scattered(count), reduced(count, -1);
      const Call in_place{
          .in = x.data(), .out = x.data(), .count = count, .timeout_s = 120, .factor = factor};
      Call last = in_place;
      last.factor = -1;
      const Work works[] = {
          comm.begin(Collective::all_reduce, in_place),  // n times 0.5
          comm.begin(Collective::all_reduce, last),
          comm.begin(Collective::reduce_scatter,
                     {.in = parts.data(), .out = scattered.data(), .count = count, .factor = 0.25}),
          comm.begin(Collective::reduce,
                     {.in = x.data(), .out = reduced.data(), .count = count, .root = n - 1, .factor = 2})};
      for (const Work& work : works) work.wait();
      const float first = 0.5F * static_cast<float>(n), second = -first * static_cast<float>(n);
      EXPECT_EQ(x, std::vector<float>(count, second));
      EXPECT_EQ(scattered, std::vector<float>(count, static_cast<float>(n)));
      const float third = comm.rank() == n - 1 ? 2 * second * static_cast<float>(n) : -1;
      EXPECT_EQ(reduced, std::vector<float>(count, third));
      EXPECT_EQ(parts, std::vector<float>(parts.size(), 4));
    }
  });
}

// Ranks that begin a call give pieces ahead and sleep early, those that wait in it do not.
TEST_P(Works, MeetCallsThatWait) {
  const int n = GetParam();
  on_ranks(n, [n](Communicator& comm) {
    for (const std::size_t count : {1, 3001, 300001, UNISONO_SANITIZED ? 600007 : 1500007})
      for (int who = 0; who < 3; ++who) {  // some ranks, the others, all
        Ints x = input(comm.rank(), count);
        Call call = call_of(x, x, count);
        call.algorithm = "one_shot";
        if (who == 2 || comm.rank() % 2 == who) comm.begin(Collective::all_reduce, call).wait();
        else comm.all_reduce(call);
        EXPECT_EQ(x, sums(n, count)) << count << " elements";
      }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Works, testing::Values(1, 2, 3, 4, 5, 8));

TEST(Work, WithoutACallIsDone) {
  const Work none;
  none.wait();
  none.wait(0.001);
  EXPECT_TRUE(none.done());
  EXPECT_FALSE(none.error());
}

TEST(Work, WrongCallsThrowAtOnce) {
  on_ranks(2, [](Communicator& comm) {
    Ints x(2), y(2);
    Call call = call_of(x, y, 2);
    auto refused = [&](const auto& begin) { return text_of<UsageError>([&] { begin(); }); };
    EXPECT_TRUE(has(refused([&] { comm.begin(Collective::all_to_all_v, call); }),
                    "all_to_all_v cannot be called so"));
    EXPECT_TRUE(has(refused([&] { comm.begin(Collective::send, call); }), "send cannot be called so"));
    EXPECT_TRUE(has(refused([&] { comm.begin(Collective::empty, call); }), "empty cannot be called so"));
    EXPECT_TRUE(has(refused([&] { comm.begin(Collective::all_reduce, call, 0, 1); }),
                    "all_reduce has no destination"));
    EXPECT_TRUE(
        has(refused([&] { comm.begin(Collective::send, call, 2, -1); }), "destination 2 is not a rank"));
    call.memory = Memory::device;
    EXPECT_TRUE(has(refused([&] { comm.begin(Collective::all_reduce, call); }), "has no GPU"));
    call = call_of(x, y, 2);
    call.algorithm = "magic";
    EXPECT_TRUE(has(refused([&] { comm.begin(Collective::all_reduce, call); }), "no algorithm 'magic'"));
    call.algorithm = {};
    call.factor = 2;
    EXPECT_TRUE(has(refused([&] { comm.begin(Collective::all_reduce, call); }), "factor is for f32"));
    EXPECT_TRUE(
        has(refused([&] { comm.begin(Collective::send, call, 1 - comm.rank(), -1); }), "send has no sum"));
    call.factor = 1;
    call.root = 9;
    EXPECT_TRUE(has(refused([&] { comm.begin(Collective::reduce, call); }), "root 9 is not a rank"));
    call.root = 0;
    comm.begin(Collective::all_reduce, call).wait();
  });
}

TEST(Work, AWaitHasATimeoutOfItsOwn) {
  std::latch waited(1);
  on_ranks(2, [&](Communicator& comm) {
    const Ints x = input(comm.rank(), 3);
    Ints y(3);
    if (comm.rank() == 1) waited.wait();
    const Work work = comm.begin(Collective::all_reduce, call_of(x, y, 3));
    if (comm.rank() == 0) {
      EXPECT_FALSE(work.done());
      EXPECT_TRUE(
          has(text_of<TimeoutError>([&] { work.wait(0.01); }), "all_reduce has not ended within 0.01"));
      EXPECT_TRUE(has(text_of<UsageError>([&] { work.wait(-1); }), "is no deadline"));
      EXPECT_FALSE(work.error());
      waited.count_down();
    }
    work.wait();
    EXPECT_EQ(y, sums(2, 3));
  });
}

TEST(Work, AnErrorEndsAllThatCameAfter) {
  Texts texts(2);
  on_ranks(2, {.timeout_s = 120, .check = true}, [&](Communicator& comm) {
    const Ints x(2);
    Ints y(2);
    std::vector<Work> works;
    for (int i = 0; i < 3; ++i)
      works.push_back(comm.begin(Collective::all_reduce, call_of(x, y, comm.rank() == 1 && i == 1 ? 1 : 2)));
    works[0].wait();
    texts[comm.rank()] = error_of<MismatchError>(works[1]);
    EXPECT_EQ(error_of<MismatchError>(works[2]), texts[comm.rank()]);
  });
  texts.expect_one();
}

TEST(Work, CloseAndTheEndOfTheCommunicatorEndAll) {
  for (const int way : {0, 1, 2}) {
    std::vector<Work> works;
    std::latch ended(1);
    on_ready_ranks(2, [&, way](Communicator& comm) {
      if (comm.rank() == 1) return ended.wait();
      const Ints x(2);
      Ints y(2);
      for (int i = 0; i < 3; ++i) works.push_back(comm.begin(Collective::all_reduce, call_of(x, y, 2)));
      if (way == 0) comm.close();
      else if (way == 1) const Communicator moved = std::move(comm);
      else comm = Communicator(thread_bootstraps(1, std::chrono::seconds(60))[0], {});
      for (const Work& work : works) EXPECT_TRUE(has(error_of<UsageError>(work), "closed"));
      ended.count_down();
    });
  }
}

TEST(Work, AnAbortOrALostPeerEndsAll) {
  for (const bool aborts : {true, false})
    on_ready_ranks(3, [aborts](Communicator& comm) {
      const Ints x(2);
      Ints y(2);
      if (comm.rank() == 1) return aborts ? comm.abort("no more.") : comm.close();
      std::vector<Work> works;
      for (int i = 0; i < 3; ++i) works.push_back(comm.begin(Collective::barrier));
      const std::string first = error_of<PeerLostError>(works[0]);
      EXPECT_TRUE(has(first, aborts ? "rank 1 has aborted the communicator: no more." : "has closed"))
          << first;
      for (const Work& work : works) EXPECT_EQ(error_of<PeerLostError>(work), first);
    });
}

TEST(Work, AForkedChildIsRefused) {
  if (UNISONO_SANITIZED) GTEST_SKIP() << "the thread sanitizer does not let a process with threads fork";
  std::latch over(1);
  on_ranks(2, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      over.wait();
      return comm.barrier();
    }
    const Work work = comm.begin(Collective::barrier);
    {
      Child child([&] {
        const bool refused = has(text_of<UsageError>([&] { work.wait(); }), "was forked from a rank") &&
                             has(text_of<UsageError>([&] { comm.begin(Collective::barrier); }), "was forked");
        bool called = false;
        work.then([&] { called = true; });
        const bool error = work.done() && work.error() && called;
        const Communicator gone = std::move(comm);
        return refused && error ? 0 : 1;
      });
      EXPECT_EQ(child.wait(), 0);
    }
    over.count_down();
    work.wait();
  });
}

TEST(Work, CallsWithinACallAreRefused) {
  std::latch refused(1);
  Communicator* zero = nullptr;
  std::string text;
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(120));
  std::thread peer([&] {
    Communicator comm(bootstraps[1], {.timeout_s = 120});
    refused.wait();
    comm.barrier();
  });
  Communicator comm(bootstraps[0], {.timeout_s = 120, .while_waiting = [&] {
                                      if (!zero || !text.empty()) return;
                                      text = text_of<UsageError>([&] { zero->barrier(); });
                                      refused.count_down();
                                    }});
  zero = &comm;
  comm.barrier();
  EXPECT_TRUE(has(text, "barrier was called from within a call of this communicator")) << text;
  peer.join();
}

// Every thread makes the same calls, so that their order does not matter.
TEST(Turns, CallsOfSeveralThreadsRunOneAtATime) {
  constexpr int kThreads = 4, kCalls = 50;
  on_ranks(2, [](Communicator& comm) {
    auto body = [&] {
      for (int i = 0; i < kCalls; ++i) {
        const Ints x = input(comm.rank(), 100);
        Ints y(100), z(100);
        const Work work = comm.begin(Collective::all_reduce, call_of(x, y, 100));
        comm.all_reduce(call_of(x, z, 100));
        work.wait();
        EXPECT_EQ(y, sums(2, 100));
        EXPECT_EQ(z, sums(2, 100));
      }
    };
    std::vector<std::thread> threads;
    for (int t = 1; t < kThreads; ++t) threads.emplace_back(body);
    body();
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(Turns, CommunicatorsDoNotWaitForEachOther) {
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(120));
  on_ranks(2, [&](Communicator& first) {
    const auto me = static_cast<std::size_t>(first.rank());
    Communicator second(bootstraps[me], {.timeout_s = 120});
    const Ints x = input(first.rank(), 10);
    Ints y(10), z(10);
    // in another order on each rank
    Communicator &a = me == 0 ? first : second, &b = me == 0 ? second : first;
    const Work of_a = a.begin(Collective::all_reduce, call_of(x, y, 10));
    const Work of_b = b.begin(Collective::all_reduce, call_of(x, z, 10));
    of_a.wait();
    of_b.wait();
    EXPECT_EQ(y, sums(2, 10));
    EXPECT_EQ(z, sums(2, 10));
  });
}

TEST(Work, AcrossNodes) {
  World{.layout = "aab"}.run([](Communicator::Impl& comm) {
    const Ints x = input(comm.rank(), 1000);
    Ints y(1000), z(1000);
    std::vector<Work> works;
    for (Ints* out : {&y, &z}) {
      const auto begun = std::make_shared<Begun>(Collective::all_reduce, call_of(x, *out, 1000));
      begun->request.emplace(Collective::all_reduce, begun->call, comm.rank(), comm.size());
      works.push_back(comm.begin(begun));
    }
    for (const Work& work : works) work.wait();
    EXPECT_EQ(y, sums(3, 1000));
    EXPECT_EQ(z, y);
    comm.end_begun();
  });
}

}  // namespace
}  // namespace unisono::test
