// Callbacks of calls that have begun.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "works.hpp"

namespace unisono::test {
namespace {

TEST(Work, CallsBackOnce) {
  on_ranks(2, [](Communicator& comm) {
    const Ints x = input(comm.rank(), 100);
    std::array<Ints, 3> y{Ints(100), Ints(100), Ints(100)};
    std::array<std::atomic<int>, 3> calls{};
    std::vector<Work> works;
    for (std::size_t i = 0; i < y.size(); ++i) {
      works.push_back(comm.begin(Collective::all_reduce, call_of(x, y[i], 100)));
      for (int twice = 0; twice < 2; ++twice)
        works.back().then([&, i, work = works.back()] {
          EXPECT_TRUE(work.done());
          EXPECT_EQ(y[i], sums(2, 100));
          ++calls[i];
        });
    }
    for (const Work& work : works) work.wait();
    const std::thread::id here = std::this_thread::get_id();
    bool at_once = false;
    works[0].then([&] { at_once = std::this_thread::get_id() == here; });
    EXPECT_TRUE(at_once);
    comm.close();  // which waits for the callbacks
    for (auto& one : calls) EXPECT_EQ(one, 2);
    Work().then([&] { at_once = false; });
    EXPECT_FALSE(at_once);
    EXPECT_EQ(text_of<std::out_of_range>([&] { works[0].then([] { throw std::out_of_range("here"); }); }),
              "here");
  });
}

// Rank 1 calls in the order that the callbacks of rank 0 make.
TEST(Work, CallbacksMakeCallsAndWait) {
  std::latch attached(1);
  on_ranks(2, [&](Communicator& comm) {
    const Ints x = input(comm.rank(), 9);
    std::array<Ints, 4> y{Ints(9), Ints(9), Ints(9), Ints(9)};
    auto sum = [&](std::size_t i) { return comm.begin(Collective::all_reduce, call_of(x, y[i], 9)); };
    if (comm.rank() == 1) {
      attached.wait();  // the first call has not ended before
      for (std::size_t i = 0; i < y.size(); ++i) sum(i).wait();
    } else {
      std::latch begun(1), over(1);
      const Work first = sum(0);
      first.then([&] {
        begun.wait();
        sum(2).wait();
        comm.all_reduce(call_of(x, y[3], 9));
        over.count_down();
      });
      attached.count_down();
      const Work second = sum(1);  // while the thread waits in the callback
      begun.count_down();
      second.wait();
      over.wait();
    }
    for (const Ints& one : y) EXPECT_EQ(one, sums(2, 9));
  });
}

TEST(Work, ACallbackThatThrowsAborts) {
  std::string text;
  std::latch asked(1), heard(1);
  on_ready_ranks(2, [&](Communicator& comm) {
    const Ints x(2);
    Ints y(2);
    if (comm.rank() == 0) {
      asked.wait();  // the call has not ended before
      text = text_of<PeerLostError>([&] {
        comm.all_reduce(call_of(x, y, 2));  // the abort may come before its end
        comm.barrier();
      });
      return heard.count_down();
    }
    const Work first = comm.begin(Collective::all_reduce, call_of(x, y, 2));
    first.then([] { throw std::runtime_error("no room."); });
    asked.count_down();
    heard.wait();
  });
  EXPECT_TRUE(has(text,
                  "rank 1 has aborted the communicator: a callback of a Work has thrown an "
                  "exception: no room."));
}

TEST(Work, ACallbackMayEndTheCommunicator) {
  for (const int ender : {0, 1}) {
    std::latch attached(1);
    on_ranks(2, [&](Communicator& comm) {
      if (comm.rank() != ender) {
        attached.wait();  // a call that has ended would run its callback at once, in the thread below
        return comm.barrier();
      }
      auto mine = std::make_unique<Communicator>(std::move(comm));
      std::latch queued(1), over(1);
      const Work first = mine->begin(Collective::barrier);
      first.then([&] {
        queued.wait();
        mine.reset();
        over.count_down();
      });
      attached.count_down();
      const Work second = mine->begin(Collective::barrier);  // without a peer
      queued.count_down();
      over.wait();
      EXPECT_NE(second.error(), nullptr);
    });
  }
}

}  // namespace
}  // namespace unisono::test
