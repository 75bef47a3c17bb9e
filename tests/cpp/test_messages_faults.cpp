// Messages with tags that are wrong, or do not come.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fabric_here.hpp"
#include "messages.hpp"
#include "nodes_layout.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

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

TEST(Message, OverATransportWithoutRecordsIsRefused) {
  on_layout(
      "ab", {.timeout_s = 120},
      [](Communicator& comm) {
        Bytes x(3);
        EXPECT_TRUE(
            has(text_of<UsageError>([&] { comm.send(from(x), 0, 1); }), "whose transport has records"));
      },
      std::make_shared<Post>(), 0);
}

// On one node and on two, by a transport between threads and by the fabric's.
class Faults : public OnLayout {};
INSTANTIATE_TEST_SUITE_P(Nodes, Faults, testing::Values("aa", "ab", "ab/records", "ab/fabric"));

TEST_P(Faults, ALongerOneIsAnErrorOnBothRanks) {
  for (const std::size_t bytes : {std::size_t{10}, std::size_t{1000000}}) {
    Texts texts(2);
    on_layout(GetParam(), [&](Communicator& comm) {
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

TEST_P(Faults, CheckComparesDtypes) {
  on_layout(GetParam(), {.timeout_s = 120, .check = true}, [](Communicator& comm) {
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
TEST_P(Faults, ADeadlineNamesTheRankAndTheTags) {
  for (const bool begins : {false, true}) {
    Texts texts(2);
    on_layout(GetParam(), [&](Communicator& comm) {
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

// A record that no mailbox has sent is an error, of whatever form.
TEST(Message, StrayRecordsFromAnotherNode) {
  // kind, tag, bytes of data that the head tells of, bytes that follow
  constexpr std::uint32_t kForms[][4] = {{0, 3, 8, 4}, {0, 3, 8, 9}, {9, 3, 0, 0},
                                         {1, 3, 8, 8}, {2, 3, 8, 8}, {5, 3, 1 << 30, 0}};
  for (int form = -1; form < static_cast<int>(std::size(kForms)); ++form) {
    std::vector<std::byte> record(7);
    if (form >= 0) {
      const auto& [kind, tag, told, follow] = kForms[form];
      record.assign(40 + follow, std::byte{0});
      std::memcpy(record.data(), &kind, sizeof kind);
      std::memcpy(record.data() + 4, &tag, sizeof tag);
      std::memcpy(record.data() + 8, &told, sizeof told);
    }
    const auto post = std::make_shared<Post>();
    post->records[{0, 1}].push_back(record);
    Texts texts(2);
    on_layout(
        "ab", {.timeout_s = 120},
        [&](Communicator& comm) {
          Bytes x(8);
          texts[comm.rank()] = text_of<MismatchError>([&] {
            if (comm.rank() == 1) comm.recv(into(x), 0, 3);
            comm.barrier();
          });
        },
        post);
    texts.expect_one();
    EXPECT_TRUE(has(texts[0], "rank 0 has sent what is no message")) << form << texts[0];
  }
}

// Neither rank waits in a call: the thread of messages that have begun tells the others.
TEST(Message, AFailureOfOneThatHasBegunReachesOtherNodes) {
  Texts texts(3);
  on_layout("aab", [&](Communicator& comm) {
    Bytes x(4);
    Call call = into(x);
    call.timeout_s = comm.rank() == 0 ? 0.05 : 100;
    const Work work = comm.begin(Collective::recv, call, -1, Communicator::kAnySource, 8);
    texts[comm.rank()] = text_of<TimeoutError>([&] { work.wait(); });
    EXPECT_EQ(text_of<TimeoutError>([&] { comm.send(from(x), 0, 1); }), texts[comm.rank()]);
  });
  texts.expect_one();
  EXPECT_TRUE(has(texts[0], "recv with tag 8 of rank 0 has waited 0.05 s for any rank")) << texts[0];
}

TEST(Message, APeerThatIsLostIsNamed) {
  std::latch left(1);
  on_layout("abb", [&](Communicator& comm) {
    Bytes x(4);
    if (comm.rank() == 2) {
      comm.close();
      return left.count_down();
    }
    if (comm.rank() == 0) left.wait();
    const std::string text = text_of<PeerLostError>([&] {
      if (comm.rank() == 0) comm.send(from(x), 2, 1);
      else comm.recv(into(x), 0, 1);
    });
    EXPECT_TRUE(
        has(text, comm.rank() == 0 ? "rank 0 (node 0) has lost rank 2 (node 1) over threads" : "rank "))
        << text;
  });
}

// The sender gets an exception while it waits, and may use its memory for something else.
TEST(Message, AnInterruptedSendIsNotTaken) {
  struct Interrupt {};
  thread_local bool interrupted = false;
  std::latch gone(1);
  const Communicator::Options options{.timeout_s = 120, .while_waiting = [] {
                                        if (interrupted) throw Interrupt();
                                      }};
  on_ranks(2, options, [&](Communicator& comm) {
    Bytes x(1000000);
    if (comm.rank() == 1) {
      gone.wait();
      const std::string text = text_of<PeerLostError>([&] { comm.recv(into(x), 0, 3); });
      EXPECT_TRUE(has(text, "rank 0") && has(text, "has closed its communicator")) << text;
      return;
    }
    interrupted = true;
    EXPECT_THROW(comm.send(from(x), 1, 3), Interrupt);
    interrupted = false;
    std::fill(x.begin(), x.end(), std::uint8_t{1});
    gone.count_down();
  });
}

}  // namespace
}  // namespace unisono::test
