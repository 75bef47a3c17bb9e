// The C interface: what calls do.
#include <array>
#include <atomic>
#include <cstddef>

#include "c_ranks.hpp"
#include "reference.hpp"

namespace unisono::test {
namespace {

class EveryCollective : public testing::TestWithParam<std::tuple<int, std::size_t>> {};

TEST_P(EveryCollective, IsAPlainLoop) {
  const auto [n, count] = GetParam();
  on_c_ranks(n, [n = n, count = count](unisono_comm* comm, int me) {
    const auto ranks = static_cast<std::size_t>(n), mine = static_cast<std::size_t>(me);
    const int root = n - 1;
    const std::size_t all = ranks * count;
    const Ints small = input(me, count), large = input(me, all);
    Ints out(all, -1), expected(all, -1);
    // Runs a call, and compares the whole output with `expected`; also in place, of the same length.
    auto check = [&](int collective, unisono_call call, const char* what) {
      ok(unisono_run(comm, collective, &call));
      EXPECT_EQ(out, expected) << what;
      out.assign(all, -1);
      expected.assign(all, -1);
    };
    auto call = [&](const Ints& in) {
      unisono_call one = call_of(in.data(), out.data(), count);
      one.root = root;
      return one;
    };
    for (std::size_t i = 0; i < count; ++i) expected[i] = sum(n, i);
    check(UNISONO_ALL_REDUCE, call(small), "all_reduce");
    for (std::size_t i = 0; i < count; ++i) expected[i] = sum(n, i), out[i] = small[i];
    check(UNISONO_ALL_REDUCE, call(out), "all_reduce in place");
    for (std::size_t i = 0; me == root && i < count; ++i) expected[i] = sum(n, i);
    check(UNISONO_REDUCE, call(small), "reduce");
    for (std::size_t i = 0; i < count; ++i) expected[i] = value(root, i);
    check(UNISONO_BROADCAST, call(small), "broadcast");
    for (std::size_t i = 0; i < all; ++i) expected[i] = value(static_cast<int>(i / count), i % count);
    check(UNISONO_ALL_GATHER, call(small), "all_gather");
    for (std::size_t i = 0; me == root && i < all; ++i)
      expected[i] = value(static_cast<int>(i / count), i % count);
    check(UNISONO_GATHER, call(small), "gather");
    for (std::size_t i = 0; i < count; ++i) expected[i] = sum(n, mine * count + i);
    check(UNISONO_REDUCE_SCATTER, call(large), "reduce_scatter");
    for (std::size_t i = 0; i < count; ++i) expected[i] = value(root, mine * count + i);
    check(UNISONO_SCATTER, call(large), "scatter");
    for (std::size_t i = 0; i < all; ++i)
      expected[i] = value(static_cast<int>(i / count), mine * count + i % count);
    check(UNISONO_ALL_TO_ALL, call(large), "all_to_all");
    ok(unisono_run(comm, UNISONO_BARRIER, nullptr));
  });
}

// Rank s sends s+r elements to rank r.
TEST_P(EveryCollective, ByPartsAndPairs) {
  const auto [n, count] = GetParam();
  on_c_ranks(n, [n = n, count = count](unisono_comm* comm, int me) {
    const auto ranks = static_cast<std::size_t>(n), mine = static_cast<std::size_t>(me);
    std::vector<std::size_t> sends, receives;
    std::size_t sent = 0, received = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      sends.push_back(count == 0 ? 0 : mine + r);
      receives.push_back(count == 0 ? 0 : mine + r);
      sent += sends.back();
      received += receives.back();
    }
    const Ints in = input(me, sent);
    Ints out(received + 1, -1), expected;
    for (int s = 0; s < n; ++s) {
      std::size_t at = 0;  // of the part for this rank in rank s's input
      for (std::size_t r = 0; r < mine; ++r) at += static_cast<std::size_t>(s) + r;
      for (std::size_t i = 0; i < receives[static_cast<std::size_t>(s)]; ++i)
        expected.push_back(value(s, at + i));
    }
    expected.push_back(-1);
    unisono_call call = call_of(in.data(), out.data(), 0);
    call.send_counts = sends.data();
    call.recv_counts = receives.data();
    ok(unisono_run(comm, UNISONO_ALL_TO_ALL_V, &call));
    EXPECT_EQ(out, expected);

    const int right = (me + 1) % n, left = (me + n - 1) % n;
    const Ints message = input(me, count), theirs = input(left, count);
    Ints got(count);
    call = call_of(message.data(), got.data(), count);
    call.to = right;
    call.from = left;
    ok(unisono_run(comm, UNISONO_SEND_RECV, &call));
    EXPECT_EQ(got, theirs);

    got.assign(count + 1, -1);  // no message has a null address
    Ints spare = message;
    spare.push_back(0);
    const unisono_outgoing to{spare.data(), 4 * count, right};
    const unisono_incoming from{got.data(), 4 * count, left};
    call = call_of(nullptr, nullptr, 0);
    call.sends = &to;
    call.num_sends = 1;
    call.receives = &from;
    call.num_receives = 1;
    ok(unisono_run(comm, UNISONO_BATCH_SEND_RECV, &call));
    got.pop_back();
    EXPECT_EQ(got, theirs);

    if (n < 2 || me > 1) return;
    got.assign(count, -1);
    call = call_of(message.data(), got.data(), count);
    call.to = 1;
    call.from = 0;
    ok(unisono_run(comm, me == 0 ? UNISONO_SEND : UNISONO_RECV, &call));
    if (me == 1) { EXPECT_EQ(got, input(0, count)); }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, EveryCollective,
                         testing::Combine(testing::Values(1, 2, 3, 4, 5, 8),
                                          testing::Values(0, 1, 1001, 70001)));

TEST(C, EveryTypeAndOp) {
  constexpr std::size_t kCount = 37;
  for (int dtype = 0; dtype < unisono_query(UNISONO_NUM_DTYPES); ++dtype)
    for (int op = 0; op < unisono_query(UNISONO_NUM_OPS); ++op) {
      const auto type = static_cast<DType>(dtype);
      if (!has_op(type, static_cast<Op>(op))) continue;
      const std::size_t bytes = kCount * size_of(type);
      const Bytes in[2] = {random_bytes(bytes, 1), random_bytes(bytes, 2)};
      const Bytes expected = reduced(type, static_cast<Op>(op), {in[0].data(), in[1].data()}, kCount);
      on_c_ranks(2, [&, op = op](unisono_comm* comm, int me) {
        Bytes out(bytes);
        unisono_call call = call_of(in[me].data(), out.data(), kCount, static_cast<int>(type));
        call.op = op;
        ok(unisono_run(comm, UNISONO_ALL_REDUCE, &call));
        EXPECT_EQ(first_difference(type, out.data(), expected.data(), kCount), -1) << name_of(type) << op;
      });
    }
}

TEST(C, TheAlgorithmAndTheWireAreTheCalls) {
  on_c_ranks(2, [](unisono_comm* comm, int) {
    float x = 3, y = 0;
    unisono_call call = call_of(&x, &y, 1, UNISONO_F32);
    call.algorithm = "two_shot";
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &call));
    EXPECT_EQ(y, 6);
    call.wire = UNISONO_WIRE_INT8;
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &call));
    EXPECT_NEAR(y, 6, 0.1);
    call.algorithm = "magic";
    expect_error(unisono_run(comm, UNISONO_ALL_REDUCE, &call), UNISONO_ERROR_USAGE, "no algorithm 'magic'");
  });
}

TEST(C, AFactorScalesItsRanksInput) {
  on_c_ranks(2, [](unisono_comm* comm, int me) {
    const float x[2] = {3, 5};
    float y[2] = {};
    unisono_call call = call_of(x, y, 2, UNISONO_F32);
    call.factor = me == 0 ? 0.5 : -2;
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &call));
    EXPECT_EQ(y[0], -4.5);
    EXPECT_EQ(y[1], -7.5);
    unisono_work* work = nullptr;
    ok(unisono_begin(comm, UNISONO_ALL_REDUCE, &call, &work));
    ok(unisono_wait(work, 0));
    unisono_work_free(work);
    EXPECT_EQ(y[0], -4.5);
    call.count = 1;
    ok(unisono_run(comm, UNISONO_REDUCE_SCATTER, &call));
    EXPECT_EQ(y[0], me == 0 ? -4.5 : -7.5);
    call.factor = me;  // 0: none, as 1
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &call));
    EXPECT_EQ(y[0], 6);
  });
}

TEST(C, SymmetricAndRegisteredMemory) {
  unisono_buffer* kept[2];
  on_c_ranks(2, [&](unisono_comm* comm, int me) {
    ok(unisono_empty(comm, 4000, UNISONO_HOST, &kept[me]));
    auto* const x = static_cast<float*>(unisono_buffer_data(kept[me]));
    for (int i = 0; i < 1000; ++i) x[i] = static_cast<float>(me + 1);
    unisono_call call = call_of(x, x, 1000, UNISONO_F32);
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &call));
    EXPECT_EQ(x[999], 3);
    std::vector<float> mine(1000, 1);
    unisono_registration* registration = nullptr;
    ok(unisono_register(comm, mine.data(), 4000, UNISONO_HOST, &registration));
    call = call_of(mine.data(), mine.data(), 1000, UNISONO_F32);
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &call));
    EXPECT_EQ(mine[999], 2);
    ok(unisono_unregister(registration));
    void* const wrong = me == 1 ? nullptr : mine.data();
    expect_error(unisono_register(comm, wrong, 4000, UNISONO_HOST, &registration), UNISONO_ERROR_USAGE,
                 "rank 1 cannot register its memory");
    EXPECT_EQ(registration, nullptr);
    ok(unisono_register(comm, mine.data(), 4000, UNISONO_HOST, &registration));
    unisono_close(comm);
    ok(unisono_unregister(registration));
  });
  for (unisono_buffer* buffer : kept) {
    EXPECT_EQ(static_cast<float*>(unisono_buffer_data(buffer))[0], 3);
    unisono_buffer_free(buffer);
  }
}

TEST(C, TwoCommunicatorsInAProcessAreApart) {
  on_c_ranks(3, [](unisono_comm* all, int me) {
    unisono_comm* alone = nullptr;
    Meeting meeting(1);
    Seat seat{&meeting, 0, 1};
    const unisono_bootstrap bootstrap{sizeof bootstrap, 0, 1, gather, &seat};
    ok(unisono_init_by(&bootstrap, nullptr, &alone));
    const std::int32_t x = me + 1;
    std::int32_t of_all = 0, own = 0;
    const unisono_call in_all = call_of(&x, &of_all, 1), in_own = call_of(&x, &own, 1);
    ok(unisono_run(all, UNISONO_ALL_REDUCE, &in_all));
    ok(unisono_run(alone, UNISONO_ALL_REDUCE, &in_own));
    EXPECT_EQ(of_all, 6);
    EXPECT_EQ(own, me + 1);
    ok(unisono_abort(alone, nullptr));
    expect_error(unisono_run(alone, UNISONO_ALL_REDUCE, &in_own), UNISONO_ERROR_PEER_LOST, "see why there");
    ok(unisono_run(all, UNISONO_ALL_REDUCE, &in_all));
    unisono_free(alone);
  });
}

TEST(C, CallsBegin) {
  std::barrier ready(3);
  on_c_ranks(3, [&](unisono_comm* comm, int me) {
    const Ints x = input(me, 1001);
    std::vector<Ints> outs(5, Ints(1001, -1));
    std::vector<unisono_work*> works(outs.size());
    for (std::size_t i = 0; i < outs.size(); ++i) {
      const unisono_call call = call_of(x.data(), outs[i].data(), 1001);  // gone before it has run
      ok(unisono_begin(comm, UNISONO_ALL_REDUCE, &call, &works[i]));
    }
    ok(unisono_run(comm, UNISONO_BARRIER, nullptr));
    for (std::size_t i = 0; i < outs.size(); ++i) {
      EXPECT_EQ(unisono_done(works[i]), 1);
      ok(unisono_wait(works[i], 0));
      unisono_work_free(works[i]);
      for (std::size_t e = 0; e < outs[i].size(); ++e) ASSERT_EQ(outs[i][e], sum(3, e)) << i;
    }
    std::atomic<int> calls = 0;
    auto count = [](void* at) { ++*static_cast<std::atomic<int>*>(at); };
    ok(unisono_begin(comm, UNISONO_BARRIER, nullptr, &works[0]));
    ok(unisono_then(works[0], count, &calls));
    ok(unisono_wait(works[0], 0));
    ok(unisono_then(works[0], count, &calls));
    while (calls < 2) std::this_thread::yield();
    expect_error(unisono_then(works[0], nullptr, nullptr), UNISONO_ERROR_USAGE, "callback is null");
    unisono_work_free(works[0]);
    unisono_call call = call_of(x.data(), outs[0].data(), 1001);
    call.op = 8;
    unisono_work* work = works[0];
    expect_error(unisono_begin(comm, UNISONO_ALL_REDUCE, &call, &work), UNISONO_ERROR_USAGE, "call->op=8");
    EXPECT_EQ(work, nullptr);
    expect_error(unisono_begin(comm, UNISONO_ALL_REDUCE, &call, nullptr), UNISONO_ERROR_USAGE,
                 "work is null");
    expect_error(unisono_wait(nullptr, 0), UNISONO_ERROR_USAGE, "work is null");
    EXPECT_EQ(unisono_done(nullptr), -1);
    unisono_work_free(nullptr);
    ready.arrive_and_wait();
    if (me == 0) {
      ok(unisono_begin(comm, UNISONO_BARRIER, nullptr, &work));
      expect_error(unisono_wait(work, 0.01), UNISONO_ERROR_TIMEOUT, "barrier has not ended within 0.01");
      EXPECT_EQ(unisono_done(work), 0);
      ok(unisono_abort(comm, "enough."));
      expect_error(unisono_wait(work, 0), UNISONO_ERROR_PEER_LOST,
                   "rank 0 has aborted the communicator: enough.");
      EXPECT_EQ(unisono_done(work), 1);
      unisono_work_free(work);
    } else {
      while (unisono_failure(comm) == UNISONO_OK) std::this_thread::yield();
    }
  });
}

TEST(C, MessagesWithTagsAndSplits) {
  on_c_ranks(3, [](unisono_comm* comm, int me) {
    unisono_comm* some = nullptr;
    ok(unisono_split(comm, me == 1 ? -1 : 4, -me, &some));
    EXPECT_EQ(some == nullptr, me == 1);
    EXPECT_EQ(unisono_size(some), me == 1 ? -1 : 2);
    EXPECT_EQ(unisono_rank(some), me == 1 ? -1 : me == 2 ? 0 : 1);
    unisono_free(some);
    const Ints x = input(me, 40000);
    Ints y(40000);
    unisono_received received{};
    unisono_call call = call_of(x.data(), y.data(), 40000);
    call.tagged = 1;
    call.tag = 6;
    call.timeout_s = 100;
    unisono_work* work = nullptr;
    call.from = UNISONO_ANY_SOURCE;
    ok(unisono_begin(comm, UNISONO_RECV, &call, &work));
    call.to = (me + 1) % 3;
    ok(unisono_run(comm, UNISONO_SEND, &call));
    ok(unisono_wait(work, 0));
    ok(unisono_work_received(work, &received));
    unisono_work_free(work);
    EXPECT_EQ(received.source, (me + 2) % 3);
    EXPECT_EQ(received.bytes, 160000u);
    EXPECT_EQ(y, input(received.source, 40000));
    call.count = 1;
    call.tag = 0;
    ok(unisono_run(comm, UNISONO_SEND, &call));
    call.from = (me + 2) % 3;
    call.count = 2;
    call.received = &received;
    ok(unisono_run(comm, UNISONO_RECV, &call));
    EXPECT_EQ(received.source, call.from);
    EXPECT_EQ(received.bytes, 4u);
    call.tagged = 2;
    expect_error(unisono_run(comm, UNISONO_SEND, &call), UNISONO_ERROR_USAGE, "call->tagged=2");
    unisono_call barrier = call_of(nullptr, nullptr, 0);
    barrier.timeout_s = -1;
    expect_error(unisono_run(comm, UNISONO_BARRIER, &barrier), UNISONO_ERROR_USAGE, "is no deadline");
    barrier.timeout_s = 100;
    ok(unisono_run(comm, UNISONO_BARRIER, &barrier));
  });
}

// Layouts are part of the interface. A struct grows at its end: the first unisono_call had 152 bytes.
static_assert(sizeof(void*) != 8 || (sizeof(unisono_call) == 160 && offsetof(unisono_call, factor) == 152 &&
                                     sizeof(unisono_options) == 40 && sizeof(unisono_bootstrap) == 32 &&
                                     sizeof(unisono_outgoing) == 24));

}  // namespace
}  // namespace unisono::test
