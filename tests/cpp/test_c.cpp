// The C interface, on ranks that are threads and meet by a callback.
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "processes.hpp"
#include "reference.hpp"
#include "unisono/unisono.h"

namespace unisono::test {
namespace {

// An all_gather between threads.
struct Meeting {
  explicit Meeting(int ranks) : here(ranks) {}
  std::vector<char> bytes;
  std::barrier<> here;
};
struct Seat {
  Meeting* meeting;
  int rank, ranks;
};
int gather(void* user, const void* mine, std::size_t bytes, void* all) {
  const Seat& seat = *static_cast<Seat*>(user);
  Meeting& at = *seat.meeting;
  const std::size_t whole = bytes * static_cast<std::size_t>(seat.ranks);
  if (seat.rank == 0) at.bytes.resize(whole);
  at.here.arrive_and_wait();
  std::memcpy(at.bytes.data() + bytes * static_cast<std::size_t>(seat.rank), mine, bytes);
  at.here.arrive_and_wait();
  std::memcpy(all, at.bytes.data(), whole);
  at.here.arrive_and_wait();
  return 0;
}

using Body = std::function<void(unisono_comm*, int)>;

// Runs body(comm, rank) on every rank when all have their communicators.
void on_c_ranks(int ranks, const Body& body, double timeout_s = 120, bool check = false) {
  unisono_options options{};
  options.size = sizeof options;
  options.timeout_s = timeout_s;
  options.check = check;
  Meeting meeting(ranks);
  auto one = [&](int rank) {
    Seat seat{&meeting, rank, ranks};
    const unisono_bootstrap bootstrap{sizeof bootstrap, rank, ranks, gather, &seat};
    unisono_comm* comm = nullptr;
    ASSERT_EQ(unisono_init_by(&bootstrap, &options, &comm), UNISONO_OK) << unisono_error_text();
    EXPECT_EQ(unisono_rank(comm), rank);
    EXPECT_EQ(unisono_size(comm), ranks);
    meeting.here.arrive_and_wait();
    body(comm, rank);
    unisono_free(comm);
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < ranks; ++rank) threads.emplace_back(one, rank);
  one(0);
  for (std::thread& thread : threads) thread.join();
}

void ok(int status) { ASSERT_EQ(status, UNISONO_OK) << unisono_error_text(); }

// Expects an error of that status, whose text has `part`.
void expect_error(int status, int expected, const std::string& part) {
  EXPECT_EQ(status, expected);
  EXPECT_NE(std::string(unisono_error_text()).find(part), std::string::npos) << unisono_error_text();
}

unisono_call call_of(const void* in, void* out, std::size_t count, int dtype = UNISONO_I32) {
  unisono_call call{};
  call.size = sizeof call;
  call.in = in;
  call.out = out;
  call.count = count;
  call.dtype = dtype;
  return call;
}

using Ints = std::vector<std::int32_t>;

// The element i of rank r's input; block b begins at b*count.
std::int32_t value(int rank, std::size_t i) { return rank * 100003 + static_cast<std::int32_t>(i) * 7 + 1; }
Ints input(int rank, std::size_t elements) {
  Ints x(elements);
  for (std::size_t i = 0; i < elements; ++i) x[i] = value(rank, i);
  return x;
}
std::int32_t sum(int ranks, std::size_t i) {
  std::int32_t all = 0;
  for (int r = 0; r < ranks; ++r) all += value(r, i);
  return all;
}

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

TEST(C, WrongCallsSayWhatToDoAndMoveNothing) {
  struct Case {
    int collective;
    std::function<void(unisono_call&)> change;
    const char* text;
  };
  const std::size_t one_each[2] = {1, 1};
  const unisono_outgoing messages[3] = {};
  const std::vector<Case> cases = {
      {99, [](unisono_call&) {}, "collective=99 is no unisono_collective: give one from 0 to 13."},
      {-1, [](unisono_call&) {}, "collective=-1 is no unisono_collective"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.size = 0; },
       "call->size is 0: set it to sizeof(unisono_call)."},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.size = 64; }, "call->size is 64"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.size = std::size_t{1} << 40; },
       "call->size is 1099511627776"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.dtype = 10; },
       "call->dtype=10 is no unisono_dtype: give one from 0 to 9."},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.op = -5; }, "call->op=-5 is no unisono_op"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.wire = 3; }, "call->wire=3 is no unisono_wire"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.memory = 2; }, "call->memory=2 is no unisono_memory"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.memory = UNISONO_DEVICE; }, "the communicator has no GPU"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.reserved = 1; }, "call->reserved=1 means nothing yet"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.in = nullptr; }, "all_reduce needs an input buffer"},
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.count = std::numeric_limits<std::size_t>::max(); },
       "more than memory can hold"},
      {UNISONO_ALL_GATHER, [](unisono_call& c) { c.count = std::numeric_limits<std::size_t>::max() / 4; },
       "more than memory can hold"},
      {UNISONO_BROADCAST, [](unisono_call& c) { c.root = 2; }, "root 2 is not a rank"},
      {UNISONO_SEND, [](unisono_call& c) { c.to = 7; }, "destination 7 is not a rank"},
      {UNISONO_RECV, [](unisono_call& c) { c.from = -1; }, "source -1 is not a rank"},
      {UNISONO_ALL_TO_ALL_V, [](unisono_call&) {}, "call->send_counts is null"},
      {UNISONO_ALL_TO_ALL_V, [&](unisono_call& c) { c.send_counts = one_each; }, "call->recv_counts is null"},
      {UNISONO_BATCH_SEND_RECV, [](unisono_call& c) { c.num_sends = 1; }, "call->sends is null"},
      {UNISONO_BATCH_SEND_RECV, [&](unisono_call& c) { c.sends = messages, c.num_sends = 3; },
       "call->num_sends=3 are too many for 2 ranks"},
      {UNISONO_BATCH_SEND_RECV, [&](unisono_call& c) { c.sends = messages, c.num_sends = 1; },
       "batch_send_recv needs a buffer"},
  };
  on_c_ranks(2, [&](unisono_comm* comm, int me) {
    const std::int32_t x = me + 1;
    std::int32_t y = 0;
    for (const Case& one : cases) {
      unisono_call call = call_of(&x, &y, 1);
      one.change(call);
      expect_error(unisono_run(comm, one.collective, &call), UNISONO_ERROR_USAGE, one.text);
    }
    expect_error(unisono_run(comm, UNISONO_ALL_REDUCE, nullptr), UNISONO_ERROR_USAGE, "call is null");
    expect_error(unisono_empty(comm, 8, 5, nullptr), UNISONO_ERROR_USAGE, "buffer is null");
    unisono_buffer* buffer = nullptr;
    expect_error(unisono_empty(comm, 8, 5, &buffer), UNISONO_ERROR_USAGE, "memory=5 is no unisono_memory");
    EXPECT_EQ(y, 0);
    const unisono_call right = call_of(&x, &y, 1);
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &right));
    EXPECT_EQ(y, 3);
  });
  const unisono_call call = call_of(nullptr, nullptr, 0);
  expect_error(unisono_run(nullptr, UNISONO_ALL_REDUCE, &call), UNISONO_ERROR_USAGE, "comm is null");
  expect_error(unisono_abort(nullptr, "why"), UNISONO_ERROR_USAGE, "comm is null");
  expect_error(unisono_close(nullptr), UNISONO_ERROR_USAGE, "comm is null");
  expect_error(unisono_failure(nullptr), UNISONO_ERROR_USAGE, "comm is null");
  expect_error(unisono_unregister(nullptr), UNISONO_ERROR_USAGE, "registration is null");
  EXPECT_EQ(unisono_rank(nullptr), -1);
  EXPECT_EQ(unisono_size(nullptr), -1);
  EXPECT_EQ(unisono_buffer_data(nullptr), nullptr);
  unisono_buffer_free(nullptr);
  unisono_free(nullptr);
}

// A program of a later version, whose struct is longer.
TEST(C, LaterStructsAreTakenIfTheirNewFieldsAreZero) {
  on_c_ranks(2, [](unisono_comm* comm, int me) {
    const std::int32_t x = me + 1;
    std::int32_t y = 0;
    struct {
      unisono_call call;
      std::int64_t later;
    } longer{call_of(&x, &y, 1), 0};
    longer.call.size = sizeof longer;
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &longer.call));
    EXPECT_EQ(y, 3);
    longer.later = 5;
    expect_error(unisono_run(comm, UNISONO_ALL_REDUCE, &longer.call), UNISONO_ERROR_USAGE,
                 "call has fields that this library does not know");
  });
}

TEST(C, WrongBootstrapsAndOptions) {
  auto answer = [](void*, const void*, std::size_t, void*) { return 5; };
  auto zeros = [](void*, const void*, std::size_t bytes, void* all) {
    std::memset(all, 0, bytes);
    return 0;
  };
  Meeting meeting(1);
  Seat seat{&meeting, 0, 1};
  const unisono_bootstrap right{sizeof right, 0, 1, gather, &seat};
  unisono_comm* comm = nullptr;
  auto with = [&](unisono_bootstrap wrong) { return unisono_init_by(&wrong, nullptr, &comm); };
  expect_error(unisono_init_by(&right, nullptr, nullptr), UNISONO_ERROR_USAGE, "comm is null");
  expect_error(unisono_init_by(nullptr, nullptr, &comm), UNISONO_ERROR_USAGE, "bootstrap is null");
  expect_error(with({8, 0, 1, gather, &seat}), UNISONO_ERROR_USAGE, "set it to sizeof(unisono_bootstrap)");
  expect_error(with({sizeof right, 1, 1, gather, &seat}), UNISONO_ERROR_USAGE, "rank=1 is none of 1 ranks");
  expect_error(with({sizeof right, 0, 0, gather, &seat}), UNISONO_ERROR_USAGE, "rank=0 is none of 0 ranks");
  expect_error(with({sizeof right, 0, 1, nullptr, &seat}), UNISONO_ERROR_USAGE, "all_gather is null");
  expect_error(with({sizeof right, 0, 1, answer, &seat}), UNISONO_ERROR_RESOURCE, "has returned 5 on rank 0");
  expect_error(with({sizeof right, 0, 1, zeros, &seat}), UNISONO_ERROR_USAGE,
               "has not brought what the ranks gave");
  unisono_options options{sizeof options, -1, 0, 0, 0, 0, nullptr};
  expect_error(unisono_init_by(&right, &options, &comm), UNISONO_ERROR_USAGE, "is no deadline");
  expect_error(unisono_init(&options, &comm), UNISONO_ERROR_USAGE, "is no deadline");
  options = {sizeof options, 0, 7, 0, 0, 0, nullptr};
  expect_error(unisono_init_by(&right, &options, &comm), UNISONO_ERROR_USAGE,
               "options->use_gpu=7 is no flag");
  options = {1, 0, 0, 0, 0, 0, nullptr};
  expect_error(unisono_init_by(&right, &options, &comm), UNISONO_ERROR_USAGE, "options->size is 1");
  EXPECT_EQ(comm, nullptr);
}

TEST(C, FailuresReachEveryRankAndStay) {
  on_c_ranks(
      3,
      [](unisono_comm* comm, int me) {
        const std::int32_t x[2] = {1, 1};
        std::int32_t y[2];
        const unisono_call call = call_of(x, y, me == 1 ? 2 : 1);
        const char* const text = "rank 0 called all_reduce(sum) of 1 i32 by ";
        expect_error(unisono_run(comm, UNISONO_ALL_REDUCE, &call), UNISONO_ERROR_MISMATCH, text);
        expect_error(unisono_failure(comm), UNISONO_ERROR_MISMATCH, text);
      },
      120, true);
  std::barrier ready(3);
  on_c_ranks(3, [&](unisono_comm* comm, int me) {
    ok(unisono_failure(comm));
    ready.arrive_and_wait();
    if (me == 2) ok(unisono_abort(comm, "the disk is full."));
    const char* const text = "rank 2 has aborted the communicator: the disk is full.";
    expect_error(unisono_run(comm, UNISONO_BARRIER, nullptr), UNISONO_ERROR_PEER_LOST, text);
    expect_error(unisono_failure(comm), UNISONO_ERROR_PEER_LOST, text);
  });
  on_c_ranks(2, [](unisono_comm* comm, int me) {
    if (me == 0) {
      ok(unisono_close(comm));
      ok(unisono_close(comm));
      expect_error(unisono_run(comm, UNISONO_BARRIER, nullptr), UNISONO_ERROR_USAGE, "is closed");
      ok(unisono_abort(comm, "too late"));
    } else {
      expect_error(unisono_run(comm, UNISONO_BARRIER, nullptr), UNISONO_ERROR_PEER_LOST,
                   "has closed its communicator, but barrier");
    }
  });
}

TEST(C, ADeadlineIsTheOptions) {
  on_c_ranks(
      2,
      [](unisono_comm* comm, int me) {
        if (me == 0)
          expect_error(unisono_run(comm, UNISONO_BARRIER, nullptr), UNISONO_ERROR_TIMEOUT,
                       "has waited 2 s for rank 1");
        while (unisono_failure(comm) == UNISONO_OK) std::this_thread::yield();
      },
      2);
}

TEST(C, AbortEndsACallOfAnotherThread) {
  on_c_ranks(2, [](unisono_comm* comm, int me) {
    if (me == 1) {
      while (unisono_failure(comm) == UNISONO_OK) std::this_thread::yield();
      return;
    }
    std::thread waiter([&] {
      expect_error(unisono_run(comm, UNISONO_BARRIER, nullptr), UNISONO_ERROR_PEER_LOST,
                   "rank 0 has aborted");
    });
    ok(unisono_abort(comm, "enough."));
    waiter.join();
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
    unisono_call call = call_of(x.data(), outs[0].data(), 1001);
    call.op = 7;
    unisono_work* work = works[0];
    expect_error(unisono_begin(comm, UNISONO_ALL_REDUCE, &call, &work), UNISONO_ERROR_USAGE, "call->op=7");
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

TEST(C, TextsAreOfAThread) {
  expect_error(unisono_close(nullptr), UNISONO_ERROR_USAGE, "comm is null");
  std::thread([] {
    EXPECT_STREQ(unisono_error_text(), "");
    unisono_unregister(nullptr);
  }).join();
  EXPECT_NE(std::string(unisono_error_text()).find("comm is null"), std::string::npos);
}

TEST(C, Queries) {
  EXPECT_EQ(unisono_version(), kHeaderVersion);
  EXPECT_EQ(unisono_query(UNISONO_NUM_DTYPES), kDTypes);
  EXPECT_EQ(unisono_query(UNISONO_NUM_OPS), kOps);
  EXPECT_EQ(unisono_query(UNISONO_NUM_WIRES), kWires);
  EXPECT_EQ(unisono_query(UNISONO_NUM_COLLECTIVES), UNISONO_BARRIER + 1);
  EXPECT_EQ(unisono_query(UNISONO_SIZE_OF_CALL), static_cast<std::int64_t>(sizeof(unisono_call)));
  EXPECT_GE(unisono_query(UNISONO_NUM_GPUS), 0);
  EXPECT_EQ(unisono_query(77), -1);
}

// Layouts are part of the interface.
static_assert(sizeof(void*) != 8 || (sizeof(unisono_call) == 128 && sizeof(unisono_options) == 40 &&
                                     sizeof(unisono_bootstrap) == 32 && sizeof(unisono_outgoing) == 24));

}  // namespace
}  // namespace unisono::test
