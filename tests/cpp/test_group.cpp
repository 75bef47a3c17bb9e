// What happens when ranks fail, leave or disagree: the same error on every rank, that says what to do.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <future>
#include <latch>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host/backend.hpp"
#include "ranks.hpp"
#include "unisono/tuning.hpp"

namespace unisono::test {
namespace {

constexpr double kShort = 1.5, kLong = 120;

// What each rank has thrown.
class Texts {
 public:
  explicit Texts(int ranks) : texts_(static_cast<std::size_t>(ranks)) {}
  std::string& operator[](int rank) { return texts_[static_cast<std::size_t>(rank)]; }
  void expect_one() const {
    EXPECT_FALSE(texts_[0].empty());
    for (const std::string& text : texts_) EXPECT_EQ(text, texts_[0]);
  }

 private:
  std::vector<std::string> texts_;
};

// One element for each of up to 8 ranks.
struct Words {
  float in[8] = {}, out[8] = {};
  Call call() { return {.in = in, .out = out, .count = 1}; }
};

TEST(Timeout, NamesRankPeerAndSlot) {
  Texts texts(2);
  std::latch over(1);
  on_ranks(2, {.timeout_s = kShort, .check = false}, [&](Communicator& comm) {
    if (comm.rank() == 0) {
      texts[0] = text_of<TimeoutError>([&] { comm.barrier(); });
      over.count_down();
    } else {
      over.wait();
      texts[1] = text_of<TimeoutError>([&] { comm.barrier(); });  // the communicator has failed on every rank
    }
  });
  texts.expect_one();
  for (const char* part : {"barrier", "of rank 0", "for rank 1", "slot meet", "1.5 s", "UNISONO_TIMEOUT_S"})
    EXPECT_TRUE(has(texts[0], part)) << part << " in: " << texts[0];
}

TEST(Timeout, IsANumberOfSecondsAboveZero) {
  for (const double seconds : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const auto bootstraps = thread_bootstraps(1, std::chrono::seconds(1));
    const std::string text =
        text_of<UsageError>([&] { Communicator(bootstraps[0], {.timeout_s = seconds}); });
    EXPECT_TRUE(has(text, "timeout_s=")) << text;
  }
}

TEST(Timeout, NamesTheSlotOfEachKindOfWait) {
  for (const auto& [algorithm, slot] :
       {std::pair("two_shot", "slot chunk,"), std::pair("two_shot_packets", "slot packet")}) {
    std::latch over(1);
    on_ranks(2, {.timeout_s = kShort, .check = false},
             [&, algorithm = algorithm, slot = slot](Communicator& comm) {
               if (comm.rank() == 1) return over.wait();
               Words words;
               Call call = words.call();
               call.algorithm = algorithm;
               const std::string text = text_of<TimeoutError>([&] { comm.all_reduce(call); });
               EXPECT_TRUE(has(text, "rank 1") && has(text, slot)) << text;
               over.count_down();
             });
  }
}

// Ranks 4 and 7 of a larger job, as on a node of several.
void on_ranks_4_and_7(bool check, const std::function<void(LocalCommunicator&)>& body) {
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(120));
  auto rank = [&](std::size_t r) {
    LocalCommunicator comm(*bootstraps[r], {.timeout_s = kShort, .check = check}, {4, 7});
    body(comm);
  };
  std::thread peer(rank, 1);
  rank(0);
  peer.join();
}

TEST(Numbers, OfTheWholeJobAreInTheTexts) {
  std::string late, lost, differing[2];
  std::latch over(1), left(1);
  on_ranks_4_and_7(false, [&](LocalCommunicator& comm) {
    if (comm.rank() == 1) return over.wait();
    late = text_of<TimeoutError>([&] { comm.barrier(); });
    over.count_down();
  });
  on_ranks_4_and_7(false, [&](LocalCommunicator& comm) {
    if (comm.rank() == 1) {
      comm.close();
      return left.count_down();
    }
    left.wait();
    lost = text_of<PeerLostError>([&] { comm.barrier(); });
  });
  on_ranks_4_and_7(true, [&](LocalCommunicator& comm) {
    float in = 1, out = 0;
    const Call call{.in = &in, .out = &out, .count = 1, .op = comm.rank() == 0 ? Op::sum : Op::max};
    differing[comm.rank()] =
        text_of<MismatchError>([&] { comm.run({Collective::all_reduce, call, comm.rank(), comm.size()}); });
  });
  EXPECT_TRUE(has(late, "of rank 4)") && has(late, "for rank 7 ")) << late;
  EXPECT_TRUE(has(lost, "rank 7 (process") && has(lost, "of rank 4)")) << lost;
  EXPECT_TRUE(has(differing[0], "rank 4 called") && has(differing[0], "rank 7 called")) << differing[0];
  EXPECT_EQ(differing[0], differing[1]);
}

TEST(Numbers, AreThoseOfAllRanks) {
  const auto bootstraps = thread_bootstraps(1, std::chrono::seconds(1));
  const std::string text =
      text_of<UsageError>([&] { LocalCommunicator(*bootstraps[0], {.timeout_s = kShort}, {4, 7}); });
  EXPECT_TRUE(has(text, "2 numbers for 1 ranks")) << text;
}

TEST(Departed, IsMissedByThoseWhoWait) {
  Texts texts(3);
  std::latch left(1);
  on_ranks(3, {.timeout_s = kLong, .check = false}, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      comm.close();
      EXPECT_TRUE(comm.closed());
      left.count_down();
      texts[1] = text_of<UsageError>([&] { comm.barrier(); });
      return;
    }
    left.wait();
    texts[comm.rank()] = text_of<PeerLostError>([&] { comm.barrier(); });
  });
  EXPECT_EQ(texts[0], texts[2]);
  EXPECT_TRUE(has(texts[0], "rank 1") && has(texts[0], "closed its communicator")) << texts[0];
  EXPECT_TRUE(has(texts[1], "closed")) << texts[1];
}

TEST(Departed, IsNotMissedByThoseWhoAreDone) {
  std::latch left(1);
  on_ranks(3, {.timeout_s = kLong, .check = false}, [&](Communicator& comm) {
    Words words;
    words.in[0] = 1;
    comm.all_reduce(words.call());
    if (comm.rank() == 2) {
      comm.close();
      return left.count_down();
    }
    left.wait();
    // the two that stay still have each other
    for (int i = 0; i < 100; ++i) comm.send_recv(words.call(), 1 - comm.rank(), 1 - comm.rank());
    EXPECT_EQ(words.out[0], 1);
  });
}

TEST(Mismatch, RaisesTheSameOnEveryRankNowAndLater) {
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
    on_ranks(4, {.timeout_s = kLong, .check = true}, [&, wrong = wrong](Communicator& comm) {
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
         comm.barrier();  // should the other have seen it first
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
    on_ranks(2, {.timeout_s = kLong, .check = true}, [&](Communicator& comm) {
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
  on_ranks(3, {.timeout_s = kLong, .check = false}, [&](Communicator& comm) {
    texts[comm.rank()] = text_of<MismatchError>([&] { comm.empty(comm.rank() == 1 ? 200 : 100); });
  });
  texts.expect_one();
}

TEST(Mismatch, OfAPairAndOfParts) {
  Texts pair(2), parts(2);
  std::barrier ready(2);  // or one might have failed the group before the other looks
  on_ranks(2, {.timeout_s = kLong, .check = true}, [&](Communicator& comm) {
    Words words;
    const int peer = 1 - comm.rank();
    ready.arrive_and_wait();
    pair[comm.rank()] = text_of<MismatchError>([&] {
      Call call = words.call();
      call.count = comm.rank() == 0 ? 1 : 2;
      comm.send_recv(call, peer, peer);
      comm.barrier();  // should this rank have been content
    });
  });
  pair.expect_one();
  on_ranks(2, {.timeout_s = kLong, .check = true}, [&](Communicator& comm) {
    Words words;
    const std::vector<std::size_t> sends{1, 1},
        receives = comm.rank() == 0 ? std::vector<std::size_t>{1, 2} : sends;
    parts[comm.rank()] = text_of<MismatchError>([&] { comm.all_to_all_v(words.call(), sends, receives); });
  });
  parts.expect_one();
}

TEST(Usage, AWrongCallMovesNothingAndFailsNobody) {
  on_ranks(3, {.timeout_s = kLong, .check = false}, [&](Communicator& comm) {
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
  on_ranks(3, {.timeout_s = kLong, .check = false}, [&](Communicator& comm) {
    Words words;
    Call call = words.call();
    call.out = words.in, call.algorithm = "direct";
    EXPECT_THROW(comm.all_to_all(call), UsageError);
    comm.all_reduce(words.call());
  });
}

TEST(Usage, ClosingIsIdempotentAndFinal) {
  on_ranks(1, {.timeout_s = kLong, .check = false}, [&](Communicator& comm) {
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

TEST(Usage, OneThreadAtATime) {
  std::promise<void> inside;
  std::latch released(1);
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(120));
  std::thread peer([&] {
    Communicator comm(bootstraps[1], {.timeout_s = kLong, .check = false});
    released.wait();
    comm.barrier();
  });
  bool made = false, told = false;  // making it may wait too
  Communicator comm(bootstraps[0], {.timeout_s = kLong, .check = false, .while_waiting = [&] {
                                      if (made && !std::exchange(told, true)) inside.set_value();
                                    }});
  made = true;
  std::thread first([&] { comm.barrier(); });
  inside.get_future().wait();
  const std::string text = text_of<UsageError>([&] { comm.barrier(); });
  EXPECT_TRUE(has(text, "another thread")) << text;
  released.count_down();
  first.join();
  peer.join();
}

TEST(WhileWaiting, WhatItThrowsEndsTheCallAndLosesTheRank) {
  struct Interrupt {};
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(120));
  std::latch left(1);
  std::thread peer([&] {
    Communicator comm(bootstraps[1], {.timeout_s = kLong, .check = false});
    left.wait();
    EXPECT_THROW(comm.barrier(), PeerLostError);
  });
  bool made = false;  // making it may wait too
  Communicator comm(bootstraps[0], {.timeout_s = kLong, .check = false, .while_waiting = [&] {
                                      if (made) throw Interrupt{};
                                    }});
  made = true;
  Words words;
  EXPECT_THROW(comm.recv(words.call(), 1), Interrupt);
  EXPECT_TRUE(comm.closed());
  left.count_down();
  peer.join();
}

// As does a look at Python's signals while another thread has the GIL.
TEST(WhileWaiting, TheTimeThatItTakesCountsForTheDeadline) {
  using Clock = std::chrono::steady_clock;
  std::latch over(1);
  on_ranks(2,
           {.timeout_s = kShort,
            .check = false,
            .while_waiting = [] { std::this_thread::sleep_for(std::chrono::seconds(1)); }},
           [&](Communicator& comm) {
             if (comm.rank() == 1) return over.wait();
             const auto began = Clock::now();
             text_of<TimeoutError>([&] { comm.barrier(); });
             EXPECT_LT(Clock::now() - began, std::chrono::duration<double>(3 * kShort));
             over.count_down();
           });
}

TEST(Memory, ThatNobodyHasIsRefusedAlikeAndTheCommunicatorGoesOn) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  on_ranks(3, {.timeout_s = kLong, .check = false}, [&](Communicator& comm) {
    for (const std::size_t absurd :
         {most, most - 4095, most / 2, std::size_t{1} << 62, std::size_t{1} << 50}) {
      EXPECT_THROW(comm.empty(absurd), ResourceError) << absurd;
      Words words;
      words.in[0] = 1;
      comm.all_reduce(words.call());
      EXPECT_EQ(words.out[0], 3);
      const Buffer some = comm.empty(5);
      EXPECT_EQ(some.bytes(), 5u);
    }
  });
}

TEST(Memory, OutlivesItsCommunicator) {
  Buffer kept[2];
  on_ranks(2, {.timeout_s = kLong, .check = false}, [&](Communicator& comm) {
    Buffer& mine = kept[comm.rank()] = comm.empty(sizeof(float));
    *static_cast<float*>(mine.data()) = 3;
    comm.all_reduce({.in = mine.data(), .out = mine.data(), .count = 1});
  });
  for (const Buffer& buffer : kept) EXPECT_EQ(*static_cast<const float*>(buffer.data()), 6);
}

// A bootstrap that gives `count` greetings, each changed by `change`.
// The board holds so much of a text, in whole letters.
TEST(Failures, ALongTextIsCutBetweenLetters) {
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(60));
  std::vector<std::thread> threads;
  std::string heard;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      LocalCommunicator comm(*bootstraps[static_cast<std::size_t>(r)], {.timeout_s = 60, .check = false});
      if (r == 0) comm.fail({FailureKind::peer_lost, std::string(998, 'x') + "\u00e9 and more"});
      const std::string text = text_of<PeerLostError>([&] { comm.barrier(); });
      if (r == 1) heard = text;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(heard, std::string(998, 'x'));
}

class Forged final : public Bootstrap {
 public:
  Forged(int rank, int size, std::function<std::vector<std::string>(std::string)> answer)
      : rank_(rank), size_(size), answer_(std::move(answer)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& data) override { return answer_(data); }

 private:
  int rank_, size_;
  std::function<std::vector<std::string>(std::string)> answer_;
};

TEST(Joining, ChecksWhatTheBootstrapGives) {
  auto refused = [](int rank, int size, const std::function<std::vector<std::string>(std::string)>& answer) {
    return text_of<Error>(
        [&] { Communicator(std::make_shared<Forged>(rank, size, answer), {.timeout_s = 1}); });
  };
  using Greetings = std::vector<std::string>;
  auto own = [](const std::string& mine) { return Greetings{mine}; };
  EXPECT_TRUE(has(refused(2, 2, own), "not possible"));
  EXPECT_TRUE(has(refused(-1, 2, own), "not possible"));
  EXPECT_TRUE(has(refused(0, 0, own), "not possible"));
  EXPECT_TRUE(has(refused(0, 1000000, own), "not possible"));
  EXPECT_TRUE(has(refused(0, 2, own), "1 greetings for 2 ranks"));
  EXPECT_TRUE(has(refused(0, 1, [](const std::string&) { return Greetings{"hello"}; }), "version"));
  EXPECT_TRUE(has(refused(0, 2, [](const std::string& mine) { return Greetings{mine, ""}; }), "version"));
  EXPECT_TRUE(has(refused(0, 2, [](const std::string& mine) { return Greetings{mine, mine}; }),
                  "two ranks are numbered 0"));
  EXPECT_TRUE(has(refused(0, 1,
                          [](std::string mine) {
                            mine[0] = 'U';
                            return Greetings{mine};
                          }),
                  "version"));
  EXPECT_THROW(thread_bootstraps(0, std::chrono::seconds(1)), UsageError);
}

TEST(Joining, EndsWhenThreadsAreMissing) {
  const auto bootstraps = thread_bootstraps(2, std::chrono::milliseconds(50));
  const std::string text = text_of<TimeoutError>([&] { Communicator(bootstraps[0], {.timeout_s = 1}); });
  EXPECT_TRUE(has(text, "rank 0")) << text;
}

}  // namespace
}  // namespace unisono::test
