// Tests failures across nodes: transports that fail, peers that are late or differ, and calls out of turn.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <latch>
#include <mutex>
#include <numeric>

#include "nodes_world.hpp"
#include "processes.hpp"

namespace unisono::test {
namespace {

constexpr std::size_t kCount = 200;            // elements of a rank: three blocks of kSmall's chain
constexpr std::size_t kChained = 1100 * 1000;  // bytes of a broadcast along the chain, for up to two rails

using Operation = std::function<void(Communicator::Impl&)>;

// Buffers of calls that may fail. A peer may still finish a direct write into one after the buffer's rank has
// heard of the failure. All are therefore kept until every rank has ended.
class Kept {
 public:
  Bytes& make(std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    return all_.emplace_back(bytes);
  }

 private:
  std::mutex mutex_;
  std::deque<Bytes> all_;
} everything;
thread_local Kept* kept = &everything;  // of this thread's world

Operation collective(Collective which, std::string_view algorithm = {}, int root = 1,
                     std::size_t count = kCount, DType dtype = DType::f32, Wire wire = Wire::exact,
                     Op op = Op::sum) {
  return [=](Communicator::Impl& comm) {
    const std::size_t bytes = count * size_of(dtype) * static_cast<std::size_t>(comm.size());
    Bytes &x = kept->make(bytes), &y = kept->make(bytes);
    comm.run(request(comm, which,
                     {.in = x.data(),
                      .out = y.data(),
                      .count = count,
                      .dtype = dtype,
                      .op = op,
                      .root = root,
                      .algorithm = algorithm,
                      .wire = wire}));
  };
}

void barrier(Communicator::Impl& comm) { comm.barrier(); }

// Every rank sends `count` bytes to every other, and expects as many.
Operation parts(bool batch, const std::function<std::size_t(int from, int to)>& count) {
  return [=](Communicator::Impl& comm) {
    const int n = comm.size(), me = comm.rank();
    std::vector<std::size_t> sent, received;
    for (int r = 0; r < n; ++r) {
      sent.push_back(count(me, r));
      received.push_back(me == r ? sent.back() : count(r, me));
    }
    // one more byte each: even an empty part of a batch needs an address
    const auto total = [n](const std::vector<std::size_t>& all) {
      return std::accumulate(all.begin(), all.end(), static_cast<std::size_t>(n));
    };
    Bytes &x = kept->make(total(sent)), &y = kept->make(total(received));
    const Call call{.in = batch ? nullptr : x.data(), .out = batch ? nullptr : y.data(), .dtype = DType::u8};
    if (!batch) return comm.run({call, me, n, sent, received});
    std::vector<Outgoing> sends;
    std::vector<Incoming> receives;
    byte *from = x.data(), *to = y.data();
    for (int r = 0; r < n; ++r) {
      const auto at = static_cast<std::size_t>(r);
      sends.push_back({from, sent[at], r});
      receives.push_back({to, received[at], r});
      from += sent[at];
      to += received[at];
    }
    comm.run({call, me, n, sends, receives});
  };
}

// Every rank sends to the next one.
Operation ring(const std::function<Call(int rank)>& call_of) {
  return [=](Communicator::Impl& comm) {
    const int n = comm.size(), me = comm.rank(), ahead = (me + 1) % n, behind = (me + n - 1) % n;
    Call call = call_of(me);
    Bytes &x = kept->make(call.count * 4), &y = kept->make(call.count * 4);
    call.in = x.data();
    call.out = y.data();
    comm.run_pair({Collective::send_recv, call, me, n, ahead, behind}, ahead, behind);
  };
}

// The error that ends a call; empty texts: none.
struct Ended {
  std::string type, text;
};
Ended end_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const MismatchError& error) {
    return {"mismatch", error.what()};
  } catch (const TimeoutError& error) {
    return {"timeout", error.what()};
  } catch (const PeerLostError& error) { return {"lost", error.what()}; } catch (const UsageError& error) {
    return {"usage", error.what()};
  } catch (const ResourceError& error) {
    return {"resource", error.what()};
  } catch (const std::exception& error) { return {"other", error.what()}; }
  return {};
}

// Runs `operation(comm)` on every rank, and then a barrier. Returns each rank's error, in rank order. A rank
// may complete its part of the first call before a peer fails, but not the barrier.
std::vector<Ended> ends_of(const World& world, const Operation& operation) {
  std::vector<Ended> ends(world.layout.size());
  Kept of_all;
  world.run([&](Communicator::Impl& comm) {
    kept = &of_all;
    Ended& mine = ends[static_cast<std::size_t>(comm.rank())];
    mine = end_of([&] { operation(comm); });
    const Ended again = end_of([&] { comm.barrier(); });
    if (mine.type.empty()) mine = again;
    else if (!comm.closed()) {
      EXPECT_EQ(again.text, mine.text) << "the next call on rank " << comm.rank();
      EXPECT_EQ(again.type, mine.type) << "the next call on rank " << comm.rank();
    }
  });
  return ends;
}

void expect_same(const std::vector<Ended>& ends, const std::string& type, const std::string& part,
                 const std::string& where) {
  for (const Ended& end : ends) {
    EXPECT_EQ(end.type, type) << where << ": " << end.text;
    EXPECT_EQ(end.text, ends[0].text) << where;
    EXPECT_TRUE(has(end.text, part)) << where << ": " << end.text;
  }
}

std::string who(const std::string& layout, int rank) {
  std::string letters;
  for (const char one : layout)
    if (letters.find(one) == std::string::npos) letters += one;
  return "rank " + std::to_string(rank) + " (node " +
         std::to_string(letters.find(layout[static_cast<std::size_t>(rank)])) + ")";
}

// Runs the tasks on several threads, since each task waits most of the time.
void at_once(const std::vector<std::function<void()>>& tasks) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 16; ++i)
    threads.emplace_back([&] {
      for (std::size_t task; (task = next++) < tasks.size();) tasks[task]();
    });
}

struct Named {
  const char* name;
  Operation run;
  bool uniform = false;  // needs a uniform layout
};
std::vector<Named> operations() {
  const auto parts_bytes = [](int from, int to) {
    return 1 + 7 * static_cast<std::size_t>(from) + 3 * static_cast<std::size_t>(to);
  };
  const auto pair = [](int) { return Call{.count = kCount}; };
  return {
      {"all_reduce one_shot", collective(Collective::all_reduce, "one_shot")},
      {"all_reduce two_shot", collective(Collective::all_reduce, "two_shot")},
      {"all_reduce chain", collective(Collective::all_reduce, "chain"), true},
      {"all_reduce int8", collective(Collective::all_reduce, {}, 0, kCount, DType::f32, Wire::int8)},
      {"reduce one_shot", collective(Collective::reduce, "one_shot")},
      {"reduce two_shot", collective(Collective::reduce, "two_shot")},
      {"reduce chain", collective(Collective::reduce, "chain", 0), true},
      {"reduce_scatter two_shot", collective(Collective::reduce_scatter, "two_shot")},
      {"reduce_scatter chain", collective(Collective::reduce_scatter, "chain"), true},
      {"broadcast", collective(Collective::broadcast)},
      {"broadcast chain", collective(Collective::broadcast, {}, 1, kChained, DType::u8)},
      {"all_gather", collective(Collective::all_gather)},
      {"gather", collective(Collective::gather)},
      {"scatter", collective(Collective::scatter)},
      {"all_to_all", collective(Collective::all_to_all)},
      {"all_to_all_v", parts(false, parts_bytes)},
      {"batch_send_recv", parts(true, parts_bytes)},
      {"send_recv", ring(pair)},
      {"barrier", barrier},
  };
}

// Makes the k-th exchange of one rank fail, and expects the same error on every rank.
void expect_lost(const std::string& layout, const Named& operation, int victim, int k, bool breaks) {
  const int n = static_cast<int>(layout.size());
  int peer = victim;
  while (layout[static_cast<std::size_t>(peer)] == layout[static_cast<std::size_t>(victim)])
    peer = (peer + 1) % n;
  const World world{.layout = layout, .limits = kSmall, .fails = [=](int rank, int exchange) {
                      if (rank == victim && exchange == k) throw TransportError(peer, "the cable is cut");
                    }};
  world.post->breaks = breaks;
  expect_same(
      ends_of(world, operation.run), "lost",
      who(layout, victim) + " has lost " + who(layout, peer) + " over threads (the cable is cut): look at",
      std::string(operation.name) + ", exchange " + std::to_string(k) + " of rank " + std::to_string(victim) +
          (breaks ? ", which breaks its connections" : ""));
}

class Faults : public testing::TestWithParam<const char*> {};

TEST_P(Faults, EachExchangeOfEachRank) {
  const std::string layout = GetParam();
  const int n = static_cast<int>(layout.size());
  const bool uniform = layout != "abb" && layout != "abab";
  std::vector<std::function<void()>> tasks;
  const std::vector<Named> all = operations();
  for (const Named& operation : all) {
    if (operation.uniform && !uniform) continue;
    std::vector<std::atomic<int>> exchanges(static_cast<std::size_t>(n));
    World{.layout = layout,
          .limits = kSmall,
          .fails = [&](int rank, int) { ++exchanges[static_cast<std::size_t>(rank)]; }}
        .run(operation.run);
    EXPECT_GT(std::accumulate(exchanges.begin(), exchanges.end(), 0), 0) << operation.name;
    for (int victim = 0; victim < n; ++victim)
      for (int k = 0; k < exchanges[static_cast<std::size_t>(victim)]; ++k)
        for (const bool breaks : {false, true})
          // of more ranks every other exchange breaks: both at each take ten seconds and more
          if (n <= (UNISONO_SANITIZED ? 2 : 3) || breaks == ((victim + k) % 2 == 1))
            tasks.emplace_back([&layout, &operation, victim, k, breaks] {
              expect_lost(layout, operation, victim, k, breaks);
            });
  }
  at_once(tasks);
}

INSTANTIATE_TEST_SUITE_P(Nodes, Faults, testing::Values("ab", "abc", "aabb", "abab", "abb"));

// An exception of a user's own transport passes through the call, and closes that rank's communicator.
TEST(NodesFaults, AnotherException) {
  for (const std::string layout : {"ab", "aabb"}) {
    auto fail = [](int rank, int) {
      if (rank == 1) throw std::runtime_error("not of the library");
    };
    const World world{.layout = layout, .timeout_s = 2, .fails = fail};
    world.run([&](Communicator::Impl& comm) {
      const Operation call = collective(Collective::all_gather);
      Ended end = end_of([&] { call(comm); });
      if (comm.rank() == 1) {
        EXPECT_EQ(end.type, "other") << end.text;
        EXPECT_EQ(end.text, "not of the library");
        EXPECT_TRUE(comm.closed());
        EXPECT_TRUE(has(end_of([&] { call(comm); }).text, "the communicator is closed"));
      } else {
        if (end.type.empty()) end = end_of([&] { call(comm); });
        EXPECT_TRUE(end.type == "timeout" || end.type == "lost") << end.type << ": " << end.text;
        EXPECT_TRUE(has(end.text, "rank 1")) << end.text;
      }
    });
  }
}

TEST(NodesFaults, LengthsThatDiffer) {
  for (const std::string layout : {"ab", "abc"}) {
    const auto ends = ends_of({.layout = layout, .timeout_s = 20}, [](Communicator::Impl& comm) {
      const auto count = 40 * (1 + static_cast<std::size_t>(comm.rank()));
      collective(Collective::all_gather, {}, 0, count, DType::u8)(comm);
    });
    for (const Ended& end : ends) {
      EXPECT_EQ(end.type, "mismatch") << end.text;
      EXPECT_TRUE(has(end.text, ": make the same call on every rank")) << end.text;
      bool named = false;
      for (int a = 0; a < static_cast<int>(layout.size()); ++a)
        for (int b = 0; b < static_cast<int>(layout.size()); ++b)
          named = named || (a != b && has(end.text, who(layout, a) + " sent " + std::to_string(40 * (1 + a)) +
                                                        " bytes where " + who(layout, b) + " expects " +
                                                        std::to_string(40 * (1 + b)) + " bytes"));
      EXPECT_TRUE(named) << end.text;
    }
  }
}

// Every rank, the late one included, raises the same error, which names the late rank alone.
TEST(NodesFaults, APeerThatIsLate) {
  for (const std::string layout : {"ab", "abc", "aabb"}) {
    const int n = static_cast<int>(layout.size()), late = n - 1;
    std::latch given_up(n - 1);
    const auto ends = ends_of({.layout = layout, .timeout_s = 1}, [&](Communicator::Impl& comm) {
      const bool first = comm.rank() == late;
      if (first) given_up.wait();
      try {
        collective(Collective::all_gather)(comm);
      } catch (const Error&) {
        if (!first) given_up.count_down();
        throw;
      }
    });
    for (const Ended& end : ends) {
      EXPECT_EQ(end.type, "timeout") << end.text;
      EXPECT_TRUE(has(end.text, " has waited 1 s for " + who(layout, late) + " over threads: see what"))
          << end.text;
    }
  }
}

// With check=true, rank 1 makes another call than the rest.
TEST(NodesFaults, CallsThatDiffer) {
  const auto sum = [](std::size_t count, Op op, std::string_view algorithm) {
    return collective(Collective::all_reduce, algorithm, 0, count, DType::f32, Wire::exact, op);
  };
  struct Difference {
    Operation most, one;
    std::string text;
  };
  const std::vector<Difference> differences{
      {sum(8, Op::sum, ""), sum(8, Op::max, ""),
       "of 8 f32 by one_shot, but rank 1 called all_reduce(max) of 8 f32 by one_shot: make the same call"},
      {sum(8, Op::sum, ""), sum(9, Op::sum, ""),
       "of 8 f32 by one_shot, but rank 1 called all_reduce(sum) of 9 f32 by one_shot: make the same call"},
      {sum(8, Op::sum, "one_shot"), sum(8, Op::sum, "two_shot"),
       "of 8 f32 by one_shot, but rank 1 called all_reduce(sum) of 8 f32 by two_shot: make the same call"},
      {collective(Collective::broadcast, {}, 0), collective(Collective::broadcast, {}, 1),
       "rank 0 called broadcast of 200 f32 with root 0, but rank 1 called broadcast of 200 f32 with root 1"},
      {collective(Collective::all_gather), barrier,
       "rank 0 called all_gather of 200 f32, but rank 1 called barrier: make the same call"},
  };
  for (const std::string layout : {"ab", "aabb", "abb"})
    for (const Difference& each : differences)
      expect_same(ends_of({.layout = layout, .timeout_s = 20, .check = true},
                          [&](Communicator::Impl& comm) { (comm.rank() == 1 ? each.one : each.most)(comm); }),
                  "mismatch", each.text, layout);
}

// With check=true, rank 0 sends rank 1 something else than rank 1 expects.
TEST(NodesFaults, EndsThatDiffer) {
  const auto odd = [](bool batch) -> Operation {
    return [batch](Communicator::Impl& comm) {
      const int me = comm.rank();
      parts(batch,
            [me](int from, int to) { return std::size_t{from == 0 && to == 1 && me == 1 ? 6U : 5U}; })(comm);
    };
  };
  struct Difference {
    Operation run;
    std::string text;
  };
  const std::vector<Difference> differences{
      {odd(false), "rank 1 called all_to_all_v of 6 u8, but rank 0 called all_to_all_v of 5 u8: make"},
      {odd(true), "rank 1 called batch_send_recv of 6 u8, but rank 0 called batch_send_recv of 5 u8: make"},
      {ring([](int rank) { return Call{.count = rank == 0 ? 5U : 6U}; }), "called send_recv of 5 f32"},
      {ring([](int rank) { return Call{.count = 5, .dtype = rank == 0 ? DType::i32 : DType::f32}; }),
       "called send_recv of 5 i32"},
  };
  for (const std::string layout : {"ab", "abb", "aabb"})
    for (const Difference& each : differences)
      for (const Ended& end : ends_of({.layout = layout, .timeout_s = 20, .check = true}, each.run)) {
        EXPECT_EQ(end.type, "mismatch") << layout << ": " << end.text;
        EXPECT_TRUE(has(end.text, each.text)) << layout << ": " << end.text;
      }
}

// Makes `call`, and runs `other` in a thread beside it once the call waits for another node.
void while_waiting(Communicator::Impl& comm, const Post& post, const std::function<void()>& other,
                   const Operation& call, Ended& end) {
  std::jthread beside([&] {
    while (post.exchanges == 0) std::this_thread::yield();
    other();
  });
  end = end_of([&] { call(comm); });
}

TEST(NodesFaults, ClosingEndsAWait) {
  std::latch over(1);
  const World world{.layout = "ab"};
  world.run([&](Communicator::Impl& comm) {
    if (comm.rank() == 1) return over.wait();
    Ended end;
    while_waiting(comm, *world.post, [&] { comm.close(); }, collective(Collective::all_gather), end);
    over.count_down();
    EXPECT_EQ(end.type, "usage");
    EXPECT_EQ(end.text, "the communicator was closed by another thread while it waited in all_gather.");
  });
}

TEST(NodesFaults, ACallOfAnotherThreadWaitsForItsTurn) {
  std::latch begun(1);
  const World world{.layout = "ab", .check = true};
  world.run([&](Communicator::Impl& comm) {
    const Operation call = collective(Collective::all_gather);
    if (comm.rank() == 1) {
      begun.wait();
      call(comm);
      return comm.barrier();
    }
    Ended inside;
    Work beside;
    while_waiting(
        comm, *world.post,
        [&] {
          beside = comm.begin(std::make_shared<Begun>(Collective::barrier, Call{}));
          begun.count_down();
        },
        call, inside);
    EXPECT_EQ(inside.text, "");
    beside.wait();
    comm.end_begun();
  });
}

TEST(NodesFaults, TwoCommunicatorsAtOnce) {
  auto sums = [](float step) {
    World{.layout = "aabb", .limits = kSmall}.run([step](Communicator::Impl& comm) {
      for (int round = 0; round < 50; ++round) {
        std::vector<float> x(kCount, step * static_cast<float>(comm.rank() + round)), y(kCount);
        comm.run(request(comm, Collective::all_reduce, {.in = x.data(), .out = y.data(), .count = kCount}));
        const std::vector<float> expected(kCount, step * static_cast<float>(6 + 4 * round));
        ASSERT_EQ(y, expected) << "round " << round << " on rank " << comm.rank();
      }
    });
  };
  std::jthread one([&] { sums(1); });
  sums(1000);
}

TEST(NodesFaults, AForkedChild) {
  if (UNISONO_SANITIZED) GTEST_SKIP() << "sanitizers do not follow a fork of several threads";
  World{.layout = "ab"}.run([](Communicator::Impl& comm) {
    if (comm.rank() == 0) {
      Child child([&] {
        const Ended end = end_of([&] { comm.barrier(); });
        comm.close();  // the parent's peers are not told
        return end.type == "usage" && has(end.text, "this process was forked from a rank") ? 7 : 8;
      });
      EXPECT_EQ(child.wait(), 7);
    }
    comm.barrier();
  });
}

}  // namespace
}  // namespace unisono::test
