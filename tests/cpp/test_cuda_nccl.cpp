// Tests the transport over NCCL on a GPU. Two processes share the GPU, and NCCL takes them for different
// hosts. Skipped without a GPU or NCCL. The test's own process leaves CUDA alone, since it forks.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/api.hpp"
#include "cuda/nodes.hpp"
#include "nodes/transport_nccl.hpp"
#include "processes.hpp"
#include "ranks.hpp"
#include "reference.hpp"
#include "unisono/communicator.hpp"
#include "unisono/error.hpp"

namespace unisono::nodes {
namespace {

using cuda::check;
using test::Bytes;
using test::has;
using test::text_of;

constexpr int kSkipped = 77;

// The bootstrap of two processes, over a pipe in each direction.
class Pair final : public Bootstrap {
 public:
  Pair(int rank, test::Pipe& out, test::Pipe& in) : rank_(rank), out_(out), in_(in) {}
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  std::vector<std::string> all_gather(const std::string& data) override {
    Message mine{data.size(), {}};
    std::memcpy(mine.bytes, data.data(), data.size());
    out_.send(mine);
    const auto other = in_.receive<Message>();
    std::vector<std::string> all{data, {other.bytes, other.size}};
    if (rank_ == 1) std::swap(all[0], all[1]);
    return all;
  }
  // Returns once both ranks have called it.
  void meet() { all_gather("met"); }

 private:
  struct Message {
    std::size_t size;
    char bytes[256];
  };
  int rank_;
  test::Pipe &out_, &in_;
};

std::string who(int rank) { return "rank " + std::to_string(rank) + " (node " + std::to_string(rank) + ")"; }

bool has_gpu_and_nccl() {
  try {
    nccl::library();
  } catch (const nccl::NcclError&) { return false; }
  return device_count() > 0;
}

struct Rank {
  Rank(Pair& pair, double timeout_s)
      : bootstrap(pair), space(cuda::make_space(0)), transport({pair, *space, timeout_s, who, [] {}}) {
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a test's stream");
  }
  ~Rank() {
    transport.close();
    for (byte* one : made) cudaFree(one);
    cudaStreamDestroy(stream);
  }
  byte* put(const Bytes& host) {
    void* at = nullptr;
    check(cudaMalloc(&at, host.size()), "a test's memory");
    made.push_back(static_cast<byte*>(at));
    write(made.back(), host);
    return made.back();
  }
  void write(byte* at, const Bytes& host) {
    check(cudaMemcpy(at, host.data(), host.size(), cudaMemcpyHostToDevice), "a test's copy");
    check(cudaDeviceSynchronize(),
          "a test's copy");  // the copy may still be under way, and other streams do not wait for it
  }
  Bytes get(const byte* at, std::size_t bytes) {
    Bytes host(bytes);
    check(cudaMemcpy(host.data(), at, bytes, cudaMemcpyDeviceToHost), "a test's copy");
    return host;
  }
  // Makes a call that exchanges `bytes` bytes with the other rank.
  void swap(const byte* from, byte* to, std::size_t bytes) {
    const int peer = 1 - bootstrap.rank();
    const Outgoing out{from, bytes, peer};
    const Incoming in{to, bytes, peer};
    space->begin(stream);
    try {
      EXPECT_TRUE(transport.exchange({&out, 1}, {&in, 1})->test());
    } catch (...) {
      space->end();
      throw;
    }
    space->end();
  }
  Pair& bootstrap;
  std::unique_ptr<GpuSpace> space;
  NcclTransport transport;
  cudaStream_t stream = nullptr;
  std::vector<byte*> made;
};

int in_a_process(const std::function<void()>& body) {
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (!has_gpu_and_nccl()) return kSkipped;
  try {
    body();
  } catch (const std::exception& error) { ADD_FAILURE() << error.what(); }
  std::fflush(nullptr);
  return testing::Test::HasFailure() ? 1 : 0;
}

// Runs body(rank, transport and space) in two processes. Returns kSkipped without a GPU or NCCL.
int on_two_ranks(double timeout_s, const std::function<void(int, Rank&)>& body) {
  test::Pipe up, down;
  auto rank = [&](int r) {
    return [&, r] {
      ::setenv("NCCL_HOSTID", ("host of rank " + std::to_string(r)).c_str(), 1);
      return in_a_process([&] {
        Pair pair(r, r == 0 ? up : down, r == 0 ? down : up);
        Rank made(pair, timeout_s);
        body(r, made);
      });
    };
  };
  test::Child first(rank(0)), second(rank(1));
  const int of_first = first.wait(), of_second = second.wait();
  EXPECT_TRUE(of_first == of_second && (of_first == 0 || of_first == kSkipped))
      << "rank 0 has ended with " << of_first << ", rank 1 with " << of_second;
  return of_first;
}

#define UNISONO_SKIP_WITHOUT_GPU(status) \
  if ((status) == kSkipped) GTEST_SKIP() << "needs a GPU and NCCL"

TEST(CudaNccl, CarriesEveryMessageOfAnExchange) {
  const int status = on_two_ranks(60, [](int me, Rank& rank) {
    for (const std::size_t bytes : {1, 1000, 1 << 20, 5'000'003}) {
      constexpr std::size_t kMessages = 3;
      std::vector<Outgoing> sends;
      std::vector<Incoming> receives;
      std::vector<byte*> got;
      for (std::size_t i = 0; i < kMessages; ++i) {
        const Bytes data = test::random_bytes(bytes + i, i + 10 * static_cast<std::size_t>(me));
        sends.push_back({rank.put(data), data.size(), 1 - me});
        got.push_back(rank.put(Bytes(bytes + i)));
        receives.push_back({got.back(), bytes + i, 1 - me});
      }
      rank.space->begin(rank.stream);
      rank.transport.exchange(sends, receives);
      rank.space->end();
      rank.transport.synchronize(rank.stream);
      for (std::size_t i = 0; i < kMessages; ++i)
        EXPECT_EQ(rank.get(got[i], bytes + i),
                  test::random_bytes(bytes + i, i + 10 * static_cast<std::size_t>(1 - me)));
    }
  });
  UNISONO_SKIP_WITHOUT_GPU(status);
}

constexpr std::size_t kCount = 300'001;  // elements of f32

// Receives the other rank's numbers into scratch, then sums both in rank order.
void sum(int me, Rank& rank, const byte* mine, byte* out) {
  rank.space->begin(rank.stream);
  byte* const come = rank.space->scratch(Scratch::landed, 0, kCount * sizeof(float));
  const Outgoing to{mine, kCount * sizeof(float), 1 - me};
  const Incoming from{come, kCount * sizeof(float), 1 - me};
  rank.transport.exchange({&to, 1}, {&from, 1});
  const byte* const sources[] = {me == 0 ? mine : come, me == 0 ? come : mine};
  rank.space->combine({out, nullptr, sources, kCount, DType::f32, Op::avg, 2});
  rank.space->end();
}
Bytes numbers(int rank, int round) {
  return test::random_bytes(kCount * sizeof(float),
                            static_cast<std::uint64_t>(rank) + 2 * static_cast<std::uint64_t>(round));
}
void expect_sum(Rank& rank, const byte* out, int round) {
  const Bytes a = numbers(0, round), b = numbers(1, round);
  const Bytes expected = test::reduced(DType::f32, Op::avg, {a.data(), b.data()}, kCount);
  const Bytes got = rank.get(out, expected.size());
  EXPECT_EQ(test::first_difference(DType::f32, got.data(), expected.data(), kCount), -1);
}

TEST(CudaNccl, SumsFollowTheirMessages) {
  const int status = on_two_ranks(60, [](int me, Rank& rank) {
    byte* const out = rank.put(Bytes(kCount * sizeof(float)));
    for (int round = 0; round < 10; ++round) {
      sum(me, rank, rank.put(numbers(me, round)), out);
      rank.transport.synchronize(rank.stream);
      expect_sum(rank, out, round);
    }
  });
  UNISONO_SKIP_WITHOUT_GPU(status);
}

TEST(CudaNccl, AGraphOfACallRunsOnFreshData) {
  const int status = on_two_ranks(60, [](int me, Rank& rank) {
    byte* const mine = rank.put(numbers(me, 0));
    byte* const out = rank.put(Bytes(kCount * sizeof(float)));
    sum(me, rank, mine, out);  // NCCL makes its connections
    rank.transport.synchronize(rank.stream);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    check(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "a test's capture");
    sum(me, rank, mine, out);
    check(cudaStreamEndCapture(rank.stream, &graph), "a test's capture");
    check(cudaGraphInstantiate(&ready, graph, 0), "a test's graph");
    for (int round = 1; round < 4; ++round) {
      rank.write(mine, numbers(me, round));
      check(cudaGraphLaunch(ready, rank.stream), "a test's graph");
      rank.transport.synchronize(rank.stream);
      expect_sum(rank, out, round);
    }
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
  });
  UNISONO_SKIP_WITHOUT_GPU(status);
}

// A rank that waits for its stream by CUDA alone comes back too, whether or not NCCL has made its
// connections.
TEST(CudaNccl, APeerThatStaysAway) {
  for (const bool connected : {true, false}) {
    const int status = on_two_ranks(3, [&](int me, Rank& rank) {
      constexpr std::size_t kBytes = 1 << 20;
      byte *const mine = rank.put(Bytes(kBytes)), *const other = rank.put(Bytes(kBytes));
      if (connected) rank.swap(mine, other, kBytes);
      rank.transport.synchronize(rank.stream);
      if (me == 1) return rank.bootstrap.meet();
      std::string text;
      try {
        rank.swap(mine, other, kBytes);
      } catch (const TimeoutError& error) { text = error.what(); }
      EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
      if (text.empty()) text = text_of<TimeoutError>([&] { rank.swap(mine, other, kBytes); });
      EXPECT_TRUE(has(text, "rank 0 (node 0) has waited 3 s on its GPU for rank 1 (node 1) over NCCL"))
          << text;
      rank.bootstrap.meet();
    });
    UNISONO_SKIP_WITHOUT_GPU(status);
  }
}

TEST(CudaNccl, SynchronizeEndsByTheDeadline) {
  const int status = on_two_ranks(3, [](int me, Rank& rank) {
    byte *const mine = rank.put(Bytes(100)), *const other = rank.put(Bytes(100));
    rank.swap(mine, other, 100);
    rank.transport.synchronize(rank.stream);
    if (me == 0) {
      rank.swap(mine, other, 100);
      const std::string text = text_of<TimeoutError>([&] { rank.transport.synchronize(rank.stream); });
      EXPECT_TRUE(has(text, "for rank 1 (node 1)")) << text;
    }
    rank.bootstrap.meet();
  });
  UNISONO_SKIP_WITHOUT_GPU(status);
}

TEST(CudaNccl, CloseWaitsForExchangesUnderWay) {
  const int status = on_two_ranks(60, [](int me, Rank& rank) {
    const Bytes mine(std::size_t{64} << 20, static_cast<byte>(1 + me));
    byte *const from = rank.put(mine), *const to = rank.put(Bytes(mine.size()));
    rank.swap(from, to, mine.size());
    rank.transport.close();
    check(cudaStreamSynchronize(rank.stream), "a test's call");
    EXPECT_EQ(rank.get(to, mine.size()), Bytes(mine.size(), static_cast<byte>(2 - me)));
  });
  UNISONO_SKIP_WITHOUT_GPU(status);
}

TEST(CudaNccl, NobodyJoins) {
  test::Child alone([&] {
    return in_a_process([&] {
      struct Ready final : Bootstrap {
        int rank() const override { return 0; }
        int size() const override { return 2; }
        std::vector<std::string> all_gather(const std::string& data) override { return {data, "ready"}; }
      } ready;
      const auto space = cuda::make_space(0);
      const std::string text = text_of<TimeoutError>([&] { NcclTransport({ready, *space, 3, who, [] {}}); });
      EXPECT_TRUE(has(text, "NCCL_SOCKET_IFNAME")) << text;
    });
  });
  const int status = alone.wait();
  EXPECT_TRUE(status == 0 || status == kSkipped) << status;
  UNISONO_SKIP_WITHOUT_GPU(status);
}

}  // namespace
}  // namespace unisono::nodes
