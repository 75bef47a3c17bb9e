// Tests the transport over MPI, against a fake MPI between threads that truncates, fails and ends.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <latch>
#include <span>

#include "fake_mpi.hpp"
#include "nodes_world.hpp"
#include "unisono/mpi_transport.hpp"

#if defined(__SANITIZE_ADDRESS__)
// The transport never frees memory that MPI may still touch.
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:MpiTransport"; }
#endif

namespace unisono::test {
namespace {

using Mpi = MpiTransport<FakeApi>;

// Transports of several ranks over one fake MPI, all used by the test's thread.
class MpiTransports : public testing::Test {
 protected:
  MpiTransports() {
    for (int rank = 0; rank < 4; ++rank)
      ranks_.push_back(std::make_unique<Mpi>(FakeApi{mpi_, rank}, rank, 4));
  }
  Transport& rank(int number) { return *ranks_[static_cast<std::size_t>(number)]; }
  std::unique_ptr<Transport::Pending> send(int from, int to, const Bytes& data) {
    const Outgoing one{data.data(), data.size(), to};
    return rank(from).exchange({&one, 1}, {});
  }
  std::unique_ptr<Transport::Pending> receive(int to, int from, Bytes& data) {
    const Incoming one{data.data(), data.size(), from};
    return rank(to).exchange({}, {&one, 1});
  }
  void fail_in(const std::string& function, int peer) {
    mpi_->fails = [=](const std::string& called, int, int called_for) {
      return called == function && called_for == peer ? FakeMpi::kFailed : FakeMpi::kSuccess;
    };
  }

  std::shared_ptr<FakeMpi> mpi_ = std::make_shared<FakeMpi>();
  std::vector<std::unique_ptr<Mpi>> ranks_;
};

TransportError error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const TransportError& error) { return error; }
  ADD_FAILURE() << "no error";
  return {-1, ""};
}

TEST_F(MpiTransports, CarriesMessagesInTheOrderOfExchanges) {
  const Bytes first = random_bytes(100, 1), second = random_bytes(100, 2), back = random_bytes(7, 3);
  Bytes a(100), b(100), c(7);
  const Outgoing forth{first.data(), first.size(), 1};
  const Incoming from_1{c.data(), c.size(), 1};
  const auto both = rank(0).exchange({&forth, 1}, {&from_1, 1});
  const auto next = send(0, 1, second);
  EXPECT_FALSE(both->test());
  EXPECT_EQ(both->open(), std::vector{1});
  const auto in_first = receive(1, 0, a), in_second = receive(1, 0, b), out = send(1, 0, back);
  EXPECT_TRUE(in_second->test() && in_first->test() && out->test() && both->test() && next->test());
  EXPECT_EQ(a, first);
  EXPECT_EQ(b, second);
  EXPECT_EQ(c, back);
  EXPECT_TRUE(both->open().empty());
  EXPECT_EQ(rank(0).name(), "MPI");
}

// MPI counts bytes in int.
TEST_F(MpiTransports, CutsMessagesPastAGibibyte) {
  constexpr std::size_t kBytes = (std::size_t{2} << 30) + 5;
  mpi_->copies = false;
  void* memory = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const Outgoing out{memory, kBytes, 1};
  const Incoming in{memory, kBytes, 0};
  const auto sent = rank(0).exchange({&out, 1}, {});
  std::vector<int> lengths;
  for (const auto& one : mpi_->sends[{0, 1, 1}]) {
    EXPECT_EQ(one->data, static_cast<std::byte*>(memory) + (lengths.size() << 30));
    lengths.push_back(one->bytes);
  }
  EXPECT_EQ(lengths, (std::vector{1 << 30, 1 << 30, 5}));
  const auto landed = rank(1).exchange({}, {&in, 1});
  EXPECT_TRUE(landed->test());
  EXPECT_TRUE(sent->test());
  ::munmap(memory, kBytes);
}

// Only late peers are open. Messages that have arrived in the meantime stay as they are.
TEST_F(MpiTransports, NamesPeersThatAreOpen) {
  Bytes from_1(10), from_2(20);
  const Bytes to_1(5);
  const Outgoing out{to_1.data(), to_1.size(), 1};
  const Incoming in[] = {{from_2.data(), from_2.size(), 2}, {from_1.data(), from_1.size(), 1}};
  const auto pending = rank(0).exchange({&out, 1}, in);
  EXPECT_FALSE(pending->test());
  EXPECT_EQ(pending->open(), (std::vector{1, 2}));
  Bytes received(5);
  const Bytes data_1 = random_bytes(10, 1), data_2 = random_bytes(20, 2);
  const auto s1 = send(1, 0, data_1), r1 = receive(1, 0, received);
  EXPECT_EQ(pending->open(), std::vector{2});
  EXPECT_FALSE(pending->test());
  EXPECT_EQ(pending->open(), std::vector{2});
  const auto s2 = send(2, 0, data_2);
  EXPECT_TRUE(pending->test());
  EXPECT_EQ(from_1, data_1);
  EXPECT_EQ(from_2, data_2);
}

TEST_F(MpiTransports, LengthsThatDiffer) {
  const Bytes data(40);
  Bytes shorter(30), longer(50);
  const auto first = send(1, 0, data), second = send(1, 0, data);
  const auto truncated = receive(0, 1, shorter), less = receive(0, 1, longer);
  EXPECT_EQ(truncated->open(), std::vector{1}) << "open() leaves an error to test()";
  TransportError error = error_of([&] { truncated->test(); });
  EXPECT_TRUE(error.other_length());
  EXPECT_EQ(error.peer(), 1);
  EXPECT_EQ(error.sent(), std::nullopt) << "MPI does not say";
  EXPECT_EQ(error.expected(), 30U);
  error = error_of([&] { less->test(); });
  EXPECT_TRUE(error.other_length());
  EXPECT_EQ(error.sent(), 40U);
  EXPECT_EQ(error.expected(), 50U);
}

TEST_F(MpiTransports, CallsThatFail) {
  const Bytes data(40);
  Bytes landing(40);
  const Outgoing out[] = {{data.data(), 40, 1}, {data.data(), 40, 2}};
  fail_in("isend", 2);
  TransportError error = error_of([&] { rank(0).exchange(out, {}); });
  EXPECT_EQ(error.peer(), 2);
  EXPECT_STREQ(error.what(), "fake MPI error 7");
  EXPECT_FALSE(error.other_length());
  EXPECT_EQ(mpi_->abandoned, 1) << "the message to rank 1 is on its way";
  fail_in("irecv", 2);
  EXPECT_EQ(error_of([&] { receive(0, 2, landing); }).peer(), 2);
  EXPECT_EQ(mpi_->abandoned, 1) << "no message had begun";
  fail_in("test", 2);
  const auto pending = receive(0, 2, landing);
  EXPECT_EQ(error_of([&] { pending->test(); }).peer(), 2);
}

// MPI may still write to a request, and to a message, that nobody waits for.
TEST_F(MpiTransports, AbandonedExchanges) {
  Bytes landing(40);
  receive(0, 1, landing).reset();
  EXPECT_EQ(mpi_->abandoned, 1);
  const Bytes data(40);
  const auto sent = send(1, 0, data);
  EXPECT_TRUE(sent->test()) << "the receive is still there";
  Bytes next(40);
  auto complete = receive(0, 1, next);
  const auto also = send(1, 0, data);
  EXPECT_TRUE(complete->test());
  complete.reset();
  EXPECT_EQ(mpi_->abandoned, 1);
}

TEST_F(MpiTransports, TellsAFailure) {
  EXPECT_EQ(rank(1).heard(), std::nullopt);
  rank(0).tell("2rank 0 has lost its way");
  EXPECT_EQ(mpi_->abandoned, 1);
  EXPECT_EQ(rank(0).heard(), std::nullopt);
  for (const int other : {1, 2}) {
    EXPECT_EQ(rank(other).heard(), "2rank 0 has lost its way");
    EXPECT_EQ(rank(other).heard(), std::nullopt);
  }
  rank(2).tell(std::string(5000, 'x'));
  EXPECT_EQ(rank(1).heard(), std::string(999, 'x')) << "a text is cut to what a message holds";
  mpi_->fails = [](const std::string&, int, int) { return FakeMpi::kFailed; };
  rank(1).tell("nobody hears");
  EXPECT_EQ(rank(0).heard(), std::nullopt);
  mpi_->fails = {};
  EXPECT_EQ(rank(0).heard(), std::string(999, 'x'));
  rank(3).close();
  const int calls = mpi_->calls;
  rank(3).tell("closed");
  EXPECT_EQ(rank(3).heard(), std::nullopt);
  EXPECT_EQ(mpi_->calls, calls) << "a closed transport leaves MPI alone";
}

TEST_F(MpiTransports, AfterMpiHasEnded) {
  Bytes landing(40);
  auto pending = receive(0, 1, landing);
  mpi_->running = false;
  const int calls = mpi_->calls;
  const std::string sentence =
      "MPI has been finalized, but a communicator over it is in use: close the communicator before "
      "MPI_Finalize.";
  EXPECT_EQ(text_of<ResourceError>([&] { receive(0, 1, landing); }), sentence);
  rank(0).tell("too late");
  EXPECT_EQ(rank(0).heard(), std::nullopt);
  pending.reset();
  rank(0).close();
  EXPECT_EQ(mpi_->calls, calls) << "MPI has been called after its end";
}

std::span<const std::byte> bytes_of(const Bytes& all) { return std::as_bytes(std::span(all)); }

TEST_F(MpiTransports, CarriesRecordsOfAnyRankInOrder) {
  const Bytes head = random_bytes(40, 1), data = random_bytes(3000, 2), other = random_bytes(9, 3);
  std::vector<std::byte> got;
  Transport::Records& to = *rank(0).records();
  EXPECT_EQ(to.take(got), std::nullopt);
  EXPECT_TRUE(rank(1).records()->send(0, bytes_of(head), bytes_of(data)));
  EXPECT_TRUE(rank(1).records()->send(0, bytes_of(other), {}));
  EXPECT_TRUE(rank(2).records()->send(0, bytes_of(other), {}));
  EXPECT_EQ(rank(1).records()->under_way(0), 2u);
  EXPECT_EQ(rank(1).records()->under_way(2), 0u);
  Bytes both = head;
  both.insert(both.end(), data.begin(), data.end());
  std::vector<Bytes> of_1, of_2;
  while (const auto source = to.take(got)) {
    Bytes copy(got.size());
    std::memcpy(copy.data(), got.data(), got.size());
    (*source == 1 ? of_1 : of_2).push_back(copy);
  }
  EXPECT_EQ(of_1, (std::vector{both, other}));
  EXPECT_EQ(of_2, (std::vector<Bytes>{other}));
  EXPECT_EQ(rank(1).records()->under_way(0), 0u);
  EXPECT_EQ(rank(0).heard(), std::nullopt);
}

TEST_F(MpiTransports, HaveRoomForSomeRecordsToEachRank) {
  const Bytes data(10);
  Transport::Records& records = *rank(1).records();
  std::size_t sent = 0;
  while (records.send(0, bytes_of(data), {})) ++sent;
  EXPECT_EQ(records.under_way(0), sent);
  EXPECT_TRUE(records.send(2, bytes_of(data), {}));
  std::vector<std::byte> got;
  EXPECT_TRUE(rank(0).records()->take(got));
  EXPECT_TRUE(records.send(0, bytes_of(data), {}));
  EXPECT_FALSE(records.send(0, bytes_of(data), {}));
  ranks_[1].reset();  // MPI may still read what has not been taken
  EXPECT_EQ(mpi_->abandoned, 1);
  for (std::size_t i = 0; i < sent; ++i) EXPECT_TRUE(rank(0).records()->take(got)) << i;
}

TEST_F(MpiTransports, RecordsThatFail) {
  const Bytes data(10);
  std::vector<std::byte> got;
  auto send = [&] { rank(1).records()->send(0, bytes_of(data), {}); };
  auto take = [&] { rank(0).records()->take(got); };
  fail_in("isend", 0);
  EXPECT_EQ(error_of(send).peer(), 0);
  fail_in("probe_any", -1);
  EXPECT_TRUE(
      has(text_of<ResourceError>(take), "MPI does not say what messages have come: fake MPI error 7"));
  mpi_->fails = {};
  send();
  fail_in("irecv", 1);
  EXPECT_EQ(error_of(take).peer(), 1);
  fail_in("test", 1);
  EXPECT_EQ(error_of(take).peer(), 1);
  fail_in("test", 0);
  EXPECT_EQ(error_of(send).peer(), 0);
  mpi_->running = false;
  EXPECT_TRUE(has(text_of<ResourceError>(send), "MPI has been finalized"));
  EXPECT_TRUE(has(text_of<ResourceError>(take), "MPI has been finalized"));
}

class MpiWorld : public testing::Test {
 protected:
  World world(const std::string& layout) const {
    World made{layout};
    const int size = static_cast<int>(layout.size());
    made.transport = [mpi = mpi_, size](int rank) {
      return std::make_shared<Mpi>(FakeApi{mpi, rank}, rank, size);
    };
    return made;
  }
  static float sum(Communicator::Impl& comm) {
    const std::vector<float> x(1000, static_cast<float>(comm.rank() + 1));
    std::vector<float> y(1000);
    comm.run(request(comm, Collective::all_reduce, {.in = x.data(), .out = y.data(), .count = 1000}));
    return y[999];
  }
  std::shared_ptr<FakeMpi> mpi_ = std::make_shared<FakeMpi>();
};

TEST_F(MpiWorld, SumsAcrossNodes) {
  world("aabb").run([](Communicator::Impl& comm) {
    EXPECT_EQ(sum(comm), 10);
    EXPECT_EQ(comm.transport(), "MPI");
  });
  EXPECT_EQ(mpi_->abandoned, 0);
}

// One message fails. Every rank hears of it over MPI.
TEST_F(MpiWorld, AFailureReachesEveryRank) {
  mpi_->fails = [failed = false](const std::string& function, int rank, int peer) mutable {
    if (function != "isend" || rank != 1 || peer != 2 || std::exchange(failed, true))
      return FakeMpi::kSuccess;
    return FakeMpi::kFailed;
  };
  world("abc").run([](Communicator::Impl& comm) {
    EXPECT_EQ(text_of<PeerLostError>([&] { sum(comm), comm.barrier(); }),
              "rank 1 (node 1) has lost rank 2 (node 2) over MPI (fake MPI error 7): look at that process's "
              "own output, then start the ranks again.");
  });
}

TEST_F(MpiWorld, MpiEndsFirst) {
  std::latch summed(2);
  world("ab").run([&](Communicator::Impl& comm) {
    EXPECT_EQ(sum(comm), 3);
    summed.arrive_and_wait();
    {
      const std::scoped_lock lock(mpi_->mutex);
      mpi_->running = false;
    }
    EXPECT_TRUE(
        has(text_of<ResourceError>([&] { sum(comm); }), "MPI has been finalized, but a communicator"));
  });
}

}  // namespace
}  // namespace unisono::test
