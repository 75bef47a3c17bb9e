// The C interface: errors, their texts, and what the library says about itself.
#include <array>
#include <cstddef>
#include <limits>

#include "c_ranks.hpp"
#include "processes.hpp"
#include "unisono/types.hpp"

namespace unisono::test {
namespace {

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
      {UNISONO_ALL_REDUCE, [](unisono_call& c) { c.factor = 2; },
       "factor is for f32, f64, f16 and bf16, not i32"},
      {UNISONO_BROADCAST, [](unisono_call& c) { c.factor = 2; }, "broadcast has no sum"},
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

// A program of the first version, whose struct ends before the factor. What lies behind it is not read.
TEST(C, EarlierStructsHaveNoFactor) {
  on_c_ranks(2, [](unisono_comm* comm, int me) {
    const float x = static_cast<float>(me + 1);
    float y = 0;
    unisono_call call = call_of(&x, &y, 1, UNISONO_F32);
    call.factor = 100;
    call.size = offsetof(unisono_call, factor);
    ok(unisono_run(comm, UNISONO_ALL_REDUCE, &call));
    EXPECT_EQ(y, 3);
    call.size = offsetof(unisono_call, factor) - 1;
    expect_error(unisono_run(comm, UNISONO_ALL_REDUCE, &call), UNISONO_ERROR_USAGE,
                 "set it to sizeof(unisono_call)");
  });
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

}  // namespace
}  // namespace unisono::test
