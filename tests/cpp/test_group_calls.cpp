// Calls that differ between ranks, or are wrong: which ranks raise an error, and which communicators go on.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <future>
#include <latch>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ranks.hpp"
#include "unisono/tuning.hpp"

namespace unisono::test {
namespace {

constexpr double kTimeout = 120;  // s

// Enough for the ranks to time their chunks again, and for pieces of odd sizes to go around their rings. Each
// round has other data at each place. With a sanitizer a loop over all takes longest: it compares every 61st
// element, some of each piece.
TEST(Chunks, AreTimedAgainWhileCallsGoOn) {
  constexpr std::size_t kMany = 9'000'001, kStep = UNISONO_SANITIZED ? 61 : 1;  // elements
  constexpr std::size_t kRounds = UNISONO_SANITIZED ? 9 : 12;
  on_ranks(2, {.timeout_s = kTimeout}, [](Communicator& comm) {
    std::vector<int> x(kMany), y(kMany);
    for (std::size_t i = 0; i < kMany; ++i) x[i] = static_cast<int>(i) * (comm.rank() + 1);
    for (std::size_t round = 0; round < kRounds; ++round) {
      const std::size_t count = kMany - round * 12345, first = 16 * round;
      comm.all_reduce({.in = x.data() + first, .out = y.data(), .count = count, .dtype = DType::i32});
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < count; i += kStep) wrong += y[i] != static_cast<int>(first + i) * 3;
      ASSERT_EQ(wrong, 0u) << "in round " << round;
    }
  });
}

TEST(Mismatch, RaisesTheSameErrorOnEveryRankNowAndLater) {
  const std::vector<std::pair<const char*, void (*)(Communicator&, Call)>> calls = {
      {"of 2 f32",
       [](Communicator& comm, Call call) { call.count = comm.rank() == 2 ? 2 : 1, comm.all_reduce(call); }},
      {"all_reduce(max)",
       [](Communicator& comm, Call call) {
         call.op = comm.rank() == 1 ? Op::max : Op::sum, comm.all_reduce(call);
       }},
      {"i32",
       [](Communicator& comm, Call call) {
         call.dtype = comm.rank() == 0 ? DType::i32 : DType::f32, comm.all_gather(call);
       }},
      {"with root 3",
       [](Communicator& comm, Call call) { call.root = comm.rank() == 3 ? 3 : 0, comm.broadcast(call); }},
      {"by push", [](Communicator& comm,
                     Call call) { call.algorithm = comm.rank() == 2 ? "push" : "", comm.all_gather(call); }},
      {"barrier",
       [](Communicator& comm, Call call) { comm.rank() == 2 ? comm.barrier() : comm.all_reduce(call); }},
      {"direct",
       [](Communicator& comm, Call call) {
         call.algorithm = "direct", call.count = comm.rank() == 2 ? 2 : 1, comm.gather(call);
       }},
  };
  for (const auto& [part, wrong] : calls) {
    Texts first(4), second(4);
    on_ranks(4, {.timeout_s = kTimeout, .check = true}, [&, wrong = wrong](Communicator& comm) {
      Words words;
      comm.all_reduce(words.call());
      first[comm.rank()] = text_of<MismatchError>([&] { wrong(comm, words.call()); });
      second[comm.rank()] = text_of<MismatchError>([&] { comm.all_reduce(words.call()); });
    });
    first.expect_one();
    second.expect_one();
    EXPECT_EQ(first[0], second[0]);
    EXPECT_TRUE(has(first[0], part) && has(first[0], "make the same call")) << first[0];
  }
}

// Calls are compared before a factor scales an input in place.
TEST(Mismatch, LeavesAnInputThatWouldBeScaled) {
  Texts texts(2);
  on_ranks(2, {.timeout_s = kTimeout, .check = true}, [&](Communicator& comm) {
    std::vector<float> x(5, 3);
    const std::size_t count = comm.rank() == 0 ? 5 : 4;
    texts[comm.rank()] = text_of<MismatchError>(
        [&] { comm.all_reduce({.in = x.data(), .out = x.data(), .count = count, .factor = 0.5}); });
    EXPECT_EQ(x, std::vector<float>(5, 3));
  });
  texts.expect_one();
}

TEST(Mismatch, OfPlans) {
  using Make = void (*)(Communicator&);
  constexpr std::size_t rest = std::numeric_limits<std::size_t>::max();
  constexpr std::size_t large = std::size_t{1} << 18;
  struct Case {
    Collective collective;
    const char *mine, *theirs;
    Make call;
  };
  const Case cases[] = {
      {Collective::all_reduce, "one_shot", "two_shot",
       [](Communicator& comm) {
         Words words;
         comm.all_reduce(words.call());
       }},
      {Collective::all_reduce, "two_shot_direct", "two_shot",
       [](Communicator& comm) {
         std::vector<float> x(large);
         comm.all_reduce({.in = x.data(), .out = x.data(), .count = large});
       }},
      {Collective::all_reduce, "two_shot_direct", "two_shot_push",
       [](Communicator& comm) {
         std::vector<float> x(large);
         comm.all_reduce({.in = x.data(), .out = x.data(), .count = large});
       }},
      {Collective::all_to_all_v, "push", "push_packets",
       [](Communicator& comm) {
         Words words;
         const std::vector<std::size_t> counts(2, 1);
         comm.all_to_all_v(words.call(), counts, counts);
       }},
      {Collective::send_recv, "push", "push_packets",
       [](Communicator& comm) {
         Words words;
         comm.send_recv(words.call(), 1 - comm.rank(), 1 - comm.rank());
         comm.barrier();  // if only the other rank has seen the mismatch yet
       }},
      {Collective::send_recv, "push", "push_packets",
       [](Communicator& comm) {
         Words words;
         const Communicator::Outgoing to{words.in, sizeof(float), 1 - comm.rank()};
         const Communicator::Incoming from{words.out, sizeof(float), 1 - comm.rank()};
         comm.batch_send_recv({}, {&to, 1}, {&from, 1});
         comm.barrier();
       }},
  };
  for (const Case& one : cases) {
    Texts texts(2);
    on_ranks(2, {.timeout_s = kTimeout, .check = true}, [&](Communicator& comm) {
      const char* algorithm = comm.rank() == 0 ? one.mine : one.theirs;
      Tuning(comm).set_plan(
          {{one.collective, false, rest, algorithm}, {one.collective, true, rest, algorithm}});
      texts[comm.rank()] = text_of<MismatchError>([&] { one.call(comm); });
    });
    texts.expect_one();
    EXPECT_TRUE(has(texts[0], std::string(" by ") + one.theirs) && has(texts[0], "by the same plan"))
        << texts[0];
  }
}

TEST(Mismatch, OfSymmetricMemory) {
  Texts texts(3);
  on_ranks(3, {.timeout_s = kTimeout, .check = false}, [&](Communicator& comm) {
    texts[comm.rank()] = text_of<MismatchError>([&] { comm.empty(comm.rank() == 1 ? 200 : 100); });
  });
  texts.expect_one();
}

TEST(Mismatch, OfAPairAndOfParts) {
  Texts pair(2), parts(2);
  std::barrier ready(2);  // otherwise one rank may fail the group before the other begins
  on_ranks(2, {.timeout_s = kTimeout, .check = true}, [&](Communicator& comm) {
    Words words;
    const int peer = 1 - comm.rank();
    ready.arrive_and_wait();
    pair[comm.rank()] = text_of<MismatchError>([&] {
      Call call = words.call();
      call.count = comm.rank() == 0 ? 1 : 2;
      comm.send_recv(call, peer, peer);
      comm.barrier();  // if only the other rank has seen the mismatch yet
    });
  });
  pair.expect_one();
  on_ranks(2, {.timeout_s = kTimeout, .check = true}, [&](Communicator& comm) {
    Words words;
    const std::vector<std::size_t> sends{1, 1},
        receives = comm.rank() == 0 ? std::vector<std::size_t>{1, 2} : sends;
    parts[comm.rank()] = text_of<MismatchError>([&] { comm.all_to_all_v(words.call(), sends, receives); });
  });
  parts.expect_one();
}

TEST(Usage, AWrongCallMovesNothingAndFailsNoRank) {
  on_ranks(3, {.timeout_s = kTimeout, .check = false}, [&](Communicator& comm) {
    Words words;
    words.in[0] = 2;
    if (comm.rank() == 1) {
      Call call = words.call();
      call.root = 3;
      EXPECT_THROW(comm.broadcast(call), UsageError);
      call.root = 0, call.algorithm = "none";
      EXPECT_THROW(comm.all_reduce(call), UsageError);
      const std::vector<std::size_t> counts(2, 1);
      EXPECT_THROW(comm.all_to_all_v(words.call(), counts, counts), UsageError);
    }
    comm.all_reduce(words.call());
    EXPECT_EQ(words.out[0], 6);
  });
}

TEST(Usage, ADirectExchangeInPlaceIsRefusedAlike) {
  on_ranks(3, {.timeout_s = kTimeout, .check = false}, [&](Communicator& comm) {
    Words words;
    Call call = words.call();
    call.out = words.in, call.algorithm = "direct";
    EXPECT_THROW(comm.all_to_all(call), UsageError);
    comm.all_reduce(words.call());
  });
}

TEST(Usage, ClosingIsIdempotentAndFinal) {
  on_ranks(1, {.timeout_s = kTimeout, .check = false}, [&](Communicator& comm) {
    Words words;
    EXPECT_FALSE(comm.closed());
    comm.close();
    comm.close();
    EXPECT_TRUE(comm.closed());
    EXPECT_THROW(comm.all_reduce(words.call()), UsageError);
    EXPECT_THROW(comm.barrier(), UsageError);
    EXPECT_THROW(comm.empty(10), UsageError);
  });
}

TEST(Usage, ACallOfAnotherThreadWaitsForItsTurn) {
  std::promise<void> inside;
  std::latch released(1);
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(120));
  std::thread peer([&] {
    Communicator comm(bootstraps[1], {.timeout_s = kTimeout, .check = true});
    released.wait();
    Words words;
    comm.barrier();
    comm.all_reduce(words.call());
  });
  bool made = false, signalled = false;  // the constructor may wait too
  Communicator comm(bootstraps[0], {.timeout_s = kTimeout, .check = true, .while_waiting = [&] {
                                      if (made && !std::exchange(signalled, true)) inside.set_value();
                                    }});
  made = true;
  std::thread first([&] { comm.barrier(); });
  inside.get_future().wait();
  std::thread second([&] {
    Words words;
    comm.all_reduce(words.call());
  });
  released.count_down();
  first.join();
  second.join();
  peer.join();
}

TEST(Memory, TooMuchIsRefusedOnEveryRankAndTheCommunicatorGoesOn) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  on_ranks(3, {.timeout_s = kTimeout, .check = false}, [&](Communicator& comm) {
    for (const std::size_t absurd :
         {most, most - 4095, most / 2, std::size_t{1} << 62, std::size_t{1} << 50}) {
      EXPECT_THROW(comm.empty(absurd), ResourceError) << absurd;
      Words words;
      words.in[0] = 1;
      comm.all_reduce(words.call());
      EXPECT_EQ(words.out[0], 3);
      EXPECT_EQ(comm.empty(5).bytes(), 5u);
    }
  });
}

TEST(Memory, OutlivesItsCommunicator) {
  Buffer kept[2];
  on_ranks(2, {.timeout_s = kTimeout, .check = false}, [&](Communicator& comm) {
    Buffer& mine = kept[comm.rank()] = comm.empty(sizeof(float));
    *static_cast<float*>(mine.data()) = 3;
    comm.all_reduce({.in = mine.data(), .out = mine.data(), .count = 1});
  });
  for (const Buffer& buffer : kept) EXPECT_EQ(*static_cast<const float*>(buffer.data()), 6);
}

}  // namespace
}  // namespace unisono::test
