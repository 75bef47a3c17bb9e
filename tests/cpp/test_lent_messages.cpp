// Messages that a sender lends in symmetric memory, beside others that go through chunks. Its receiver knows
// which of both as the message comes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <vector>

#include "far_ranks.hpp"

namespace unisono::test {
namespace {

constexpr std::size_t kSizes[] = {1, 4099, 20011, 70001, 131072};

// Messages go through chunks, except those whose buffers are all symmetric memory.
void plan_pushed(Communicator& comm) {
  Tuning(comm).set_plan({{Collective::send_recv, false, kRest, "push"},
                         {Collective::send_recv, true, 4096, "push"},
                         {Collective::send_recv, true, kRest, "direct"}});
}

struct Message {
  int to, from;
  std::size_t bytes;
  bool lent_in = false, lent_out = false;  // the buffer is in symmetric memory
  bool in_place = false;                   // one buffer, that of the input
  bool apart = false;                      // a send and a receive, in two calls, not in place
};

// A rank's memory: plain and symmetric.
struct Memory {
  explicit Memory(Rank& its) : rank(its), symmetric(its.comm.empty(kRoom)) { plan_pushed(its.comm); }
  std::byte* of(bool lent) const { return lent ? static_cast<std::byte*>(symmetric.data()) : rank.room(); }
  void exchange(const Message& m) const {
    const int me = rank.comm.rank();
    std::byte* const in = of(m.lent_in) + 3;
    std::byte* const out = m.in_place ? in : of(m.lent_out) + kRoom / 2 + 1;
    const Bytes sent = content(me, m.to, m.bytes), expected = content(m.from, me, m.bytes);
    std::copy(sent.begin(), sent.end(), in);
    const Call send{.in = in, .count = m.bytes, .dtype = DType::u8};
    const Call receive{.out = out, .count = m.bytes, .dtype = DType::u8};
    if (!m.apart) {
      rank.comm.send_recv({.in = in, .out = out, .count = m.bytes, .dtype = DType::u8}, m.to, m.from);
    } else if (me < m.to) {
      rank.comm.send(send, m.to);
      rank.comm.recv(receive, m.from);
    } else {
      rank.comm.recv(receive, m.from);
      rank.comm.send(send, m.to);
    }
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out))
        << m.bytes << " bytes" << (m.lent_in ? ", lent" : "") << (m.in_place ? ", in place" : "");
  }
  Rank& rank;
  Buffer symmetric;
};

const Setting kAny{.copies = false};

// Each rank chooses its memory by itself.
TEST(LentMessages, AreRightBesideOthers) {
  for (const int n : {2, 3, 5})
    in_processes(
        n,
        [n](Rank& rank) {
          const Memory memory(rank);
          const int me = rank.comm.rank();
          std::mt19937 alike(5), own(static_cast<unsigned>(me));
          for (int i = 0; i < (UNISONO_SANITIZED ? 60 : 300); ++i) {
            const std::size_t bytes = kSizes[alike() % std::size(kSizes)];
            const int step = 1 + static_cast<int>(alike() % static_cast<unsigned>(n - 1));
            const bool apart = n == 2 && own() % 4 == 0;
            memory.exchange({.to = (me + step) % n,
                             .from = (me + n - step) % n,
                             .bytes = bytes,
                             .lent_in = own() % 2 == 0,
                             .lent_out = own() % 2 == 0,
                             .in_place = !apart && own() % 5 == 0,
                             .apart = apart});
            if (testing::Test::HasFailure()) return;
          }
        },
        kAny);
}

// Through chunks, the first rank's call would end before the other one receives.
TEST(LentMessages, AreReadBeforeTheSendersCallEnds) {
  in_processes(
      2,
      [](Rank& rank) {
        const Memory memory(rank);
        std::byte* const in = memory.of(true);
        const Call call{.in = in, .out = in + kRoom / 2, .count = 50000, .dtype = DType::u8};
        std::atomic_ref<int> receives(rank.shared.copies[1]);
        if (rank.comm.rank() == 0) {
          rank.comm.send_recv(call, 1, 1);
          EXPECT_EQ(receives, 1);
        } else {
          rank.comm.send(call, 0);
          ::usleep(100000);
          receives = 1;
          rank.comm.recv(call, 0);
        }
      },
      kAny);
}

TEST(LentMessages, OfOtherSizesAreAMismatch) {
  in_processes(
      2,
      [](Rank& rank) {
        const Memory memory(rank);
        const int peer = 1 - rank.comm.rank();
        const std::size_t bytes = rank.comm.rank() == 0 ? 50000 : 60000;
        const Call call{
            .in = memory.of(true), .out = memory.of(true) + kRoom / 2, .count = bytes, .dtype = DType::u8};
        EXPECT_THROW(
            {
              rank.comm.send_recv(call, peer, peer);
              rank.comm.barrier();
            },
            MismatchError);
      },
      kAny);
}

}  // namespace
}  // namespace unisono::test
