// Ranks that fail, leave or do not join: the same error on every rank, which says what to do.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <latch>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host/backend.hpp"
#include "ranks.hpp"
#include "unisono/device/area.hpp"
#include "unisono/window.hpp"

namespace unisono::test {
namespace {

constexpr double kShort = 1.5, kLong = 120;  // timeouts in s

TEST(DeviceAreas, AreRefusedWithoutAGpu) {
  on_ranks(2, {}, [](Communicator& comm) {
    EXPECT_TRUE(has(text_of<UsageError>([&] { DeviceArea(comm, 64, 1); }), "with device= on every rank"));
    EXPECT_TRUE(has(text_of<UsageError>([&] { DeviceArea(comm, 64, -1); }), "0 to 2^24 signals"));
    EXPECT_TRUE(has(text_of<UsageError>([&] { Window(comm, 64); }), "with device= on every rank"));
    Words words;
    words.in[0] = 1;
    comm.all_reduce(words.call());
    EXPECT_EQ(words.out[0], 2);
  });
}

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

TEST(Timeout, MustBeAPositiveNumberOfSeconds) {
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
               Words words;
               Call call = words.call();
               call.algorithm = algorithm;
               comm.all_reduce(call);
               if (comm.rank() == 1) return over.wait();
               const std::string text = text_of<TimeoutError>([&] { comm.all_reduce(call); });
               EXPECT_TRUE(has(text, "rank 1") && has(text, slot)) << text;
               over.count_down();
             });
  }
}

TEST(Timeout, CanBeSetForLaterCalls) {
  using Way = std::function<void(Communicator&)>;
  static std::int32_t word = 0;
  const Call one{.in = &word, .out = &word, .count = 1, .dtype = DType::i32};
  const std::vector<Way> ways{[&](Communicator& comm) { comm.all_reduce(one); },
                              [&](Communicator& comm) { comm.begin(Collective::all_reduce, one).wait(); },
                              [&](Communicator& comm) { comm.recv(one, 1, 7); },
                              [&](Communicator& comm) { comm.begin(Collective::recv, one, -1, 1, 7).wait(); },
                              [&](Communicator& comm) { comm.empty(64); },
                              [&](Communicator& comm) {
                                Call shorter = one;
                                shorter.timeout_s = kShort;
                                comm.set_timeout(kLong);
                                comm.all_reduce(shorter);
                              }};
  for (std::size_t w = 0; w < 2 * ways.size(); ++w) {  // the later ones on a communicator that is split off
    std::latch over(1);
    on_ranks(2, {.timeout_s = kLong, .check = false}, [&](Communicator& whole) {
      EXPECT_TRUE(has(text_of<UsageError>([&] { whole.set_timeout(0); }), "timeout_s=0"));
      whole.set_timeout(kShort);
      whole.barrier();
      std::optional<Communicator> part;
      if (w >= ways.size()) part = whole.split(0);
      Communicator& comm = part ? *part : whole;
      if (comm.rank() == 1) return over.wait();
      const std::string text = text_of<TimeoutError>([&] { ways[w % ways.size()](comm); });
      EXPECT_TRUE(has(text, "has waited 1.5 s") && has(text, "rank 1")) << w << ": " << text;
      over.count_down();
    });
  }
}

// Runs ranks 4 and 7 of a larger job, like those of one of several nodes.
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

TEST(Numbers, InErrorsAreThoseOfTheWholeJob) {
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

TEST(Numbers, MustNameEveryRank) {
  const auto bootstraps = thread_bootstraps(1, std::chrono::seconds(1));
  const std::string text =
      text_of<UsageError>([&] { LocalCommunicator(*bootstraps[0], {.timeout_s = kShort}, {4, 7}); });
  EXPECT_TRUE(has(text, "2 numbers for 1 ranks")) << text;
}

TEST(Departed, IsAnErrorOfRanksThatWait) {
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

TEST(Departed, IsNoErrorOfRanksThatDoNotWaitForIt) {
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
    // the two that stay can still call each other
    for (int i = 0; i < 100; ++i) comm.send_recv(words.call(), 1 - comm.rank(), 1 - comm.rank());
    EXPECT_EQ(words.out[0], 1);
  });
}

TEST(WhileWaiting, AnExceptionEndsTheCallAndClosesTheRank) {
  struct Interrupt {};
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(120));
  std::latch left(1);
  std::thread peer([&] {
    Communicator comm(bootstraps[1], {.timeout_s = kLong, .check = false});
    left.wait();
    EXPECT_THROW(comm.barrier(), PeerLostError);
  });
  bool made = false;  // the constructor may wait too
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

// A look at Python's signals takes time while another thread has the GIL.
TEST(WhileWaiting, ItsTimeCountsForTheDeadline) {
  using Clock = std::chrono::steady_clock;
  std::latch over(1);
  std::atomic<bool> met = false;  // before that each wait of the ranks that meet would take a second
  on_ranks(2,
           {.timeout_s = kShort,
            .check = false,
            .while_waiting =
                [&] {
                  if (met) std::this_thread::sleep_for(std::chrono::seconds(1));
                }},
           [&](Communicator& comm) {
             if (comm.rank() == 1) return over.wait();
             met = true;
             const auto began = Clock::now();
             text_of<TimeoutError>([&] { comm.barrier(); });
             EXPECT_LT(Clock::now() - began, std::chrono::duration<double>(3 * kShort));
             over.count_down();
           });
}

// The peer comes once it has been called.
TEST(BeforeRest, IsCalledInEachWait) {
  constexpr int kWaits = 3;
  const auto bootstraps = thread_bootstraps(2, std::chrono::seconds(120));
  std::atomic<int> waits = 0;
  std::thread peer([&] {
    Communicator comm(bootstraps[1], {.timeout_s = kLong, .check = false});
    for (int i = 0; i < kWaits; ++i) {
      waits.wait(i);
      comm.barrier();
    }
  });
  Communicator comm(bootstraps[0], {.timeout_s = kLong, .check = false, .before_rest = [&] {
                                      ++waits;
                                      waits.notify_one();
                                    }});
  EXPECT_EQ(waits, 0);                     // a constructor's waits are not told
  EXPECT_FALSE(comm.tells_before_rest());  // nor are all those of ranks that share a process
  for (int i = 0; i < kWaits; ++i) comm.barrier();
  EXPECT_EQ(waits, kWaits);
  peer.join();
}

TEST(BeforeRest, IsToldByARankAloneInItsProcess) {
  const Communicator comm(thread_bootstraps(1, std::chrono::seconds(60))[0], {.timeout_s = kLong});
  EXPECT_TRUE(comm.tells_before_rest());
}

// The board holds the first 999 bytes of a text, in whole letters.
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

// A bootstrap whose all_gather returns the test's answer.
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

TEST(Joining, ChecksTheBootstrapsRanksAndGreetings) {
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
