// Faults of a NIC and its library: each ends in an error that says what to do, and never in a wrong result.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

#include "fabric_here.hpp"
#include "ranks.hpp"

namespace unisono::test {
namespace {

// Set before libfabric is opened. A share is less than the tests' messages, so that policy multi splits them.
const int chosen =
    ::setenv("UNISONO_LIBFABRIC", FAULTY_LIBFABRIC, 1) + ::setenv("UNISONO_FABRIC_SHARE", "100000", 1);

class Faults : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    ASSERT_EQ(chosen, 0);
    try {
      fabric_provider(GetParam());
    } catch (const Error& error) { GTEST_SKIP() << error.what(); }
    void* const library = ::dlopen(FAULTY_LIBFABRIC, RTLD_NOW | RTLD_LOCAL);
    ask = reinterpret_cast<void (*)(const char*)>(::dlsym(library, "unisono_test_fault"));
    busy = reinterpret_cast<std::size_t (*)()>(::dlsym(library, "unisono_test_busy"));
    ASSERT_TRUE(ask && busy);
  }
  void TearDown() override {
    if (ask) ask("");
  }
  Communicator::Options options() const {
    return {.timeout_s = 20, .fabric = Communicator::Fabric{GetParam(), 1, ChannelPolicy::single, false}};
  }
  void (*ask)(const char*) = nullptr;
  std::size_t (*busy)() = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Providers, Faults, testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Faults, RefusedRegistrationSaysWhatToDo) {
  on_ranks(2, options(), [&](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 0) ask("registration");
    comm.barrier();
    const std::string text = text_of<ResourceError>([&] { comm.empty(1 << 20); });
    EXPECT_TRUE(has(text, "1048576 bytes")) << text;
    EXPECT_TRUE(has(text, "ulimit -l") || has(text, "see its error")) << text;
    float x = static_cast<float>(comm.rank() + 1);
    comm.all_reduce({.in = &x, .out = &x, .count = 1});  // the communicator goes on without that memory
    EXPECT_EQ(x, 3);
    EXPECT_NE(comm.empty(1 << 20).data(), nullptr);
  });
}

// A transfer over two channels begins at the usual channel of its pair.
TEST_P(Faults, MultiUsesAllChannels) {
  constexpr int kRanks = 4, kChannels = 4;
  Communicator::Options many = options();
  many.fabric = Communicator::Fabric{GetParam(), kChannels, ChannelPolicy::multi, false};
  busy();
  on_ranks(kRanks, many, [&](Communicator& comm) {
    constexpr std::size_t kCount = 200000;
    const Buffer in = comm.empty(kCount * kRanks), out = comm.empty(kCount * kRanks);
    comm.all_to_all(
        {.in = in.data(), .out = out.data(), .count = kCount, .dtype = DType::u8, .algorithm = "direct"});
  });
  EXPECT_EQ(busy(), std::size_t{kRanks} * kChannels);
}

// Asks for the fault after both ranks' first call. Expects an error with all of `parts`.
void expect_failure(Communicator& comm, const std::function<void()>& ask, std::barrier<>& met,
                    const std::vector<const char*>& parts) {
  comm.barrier();
  met.arrive_and_wait();
  if (comm.rank() == 0) ask();
  std::vector<float> x(100000, 1), out(x.size());
  auto call = [&] {
    for (int i = 0; i < 50; ++i) {
      comm.all_reduce({.in = x.data(), .out = out.data(), .count = x.size()});
      for (const float sum : out) ASSERT_EQ(sum, 2);
    }
  };
  try {
    call();
    ADD_FAILURE() << "no error on rank " << comm.rank();
  } catch (const ResourceError& error) {
    for (const char* part : parts) EXPECT_TRUE(has(error.what(), part)) << part << " in: " << error.what();
  } catch (const PeerLostError& error) {}  // the other rank left before it could say why
}

TEST_P(Faults, OverrunSaysWhatToDo) {
  std::barrier met(2);
  on_ranks(2, options(), [&](Communicator& comm) {
    expect_failure(comm, [&] { ask("overrun"); }, met,
                   {"completion queue has overrun", "UNISONO_FABRIC_COMPLETIONS"});
  });
}

TEST_P(Faults, DuplicateImmediateIsRefused) {
  std::barrier met(2);
  on_ranks(2, options(), [&](Communicator& comm) {
    expect_failure(comm, [&] { ask("duplicate"); }, met, {"immediate", "which is refused", "duplicate"});
  });
}

TEST_P(Faults, StaleImmediateIsRefused) {
  std::barrier met(2);
  on_ranks(2, options(), [&](Communicator& comm) {
    expect_failure(comm, [&] { ask("stale"); }, met, {"immediate", "which is refused", "stale"});
  });
}

// Returns what rank 0 says of a call in which a write to rank 1 has failed, while rank 1 calls `meanwhile`.
std::string text_of_failed_write(const Communicator::Options& options, void (*ask)(const char*),
                                 const std::function<void(Communicator&)>& meanwhile) {
  std::string text;
  std::barrier met(2);
  on_ranks(2, options, [&](Communicator& comm) {
    comm.barrier();
    met.arrive_and_wait();
    float x = 1;
    if (comm.rank() == 0) {
      ask("write");
      text = text_of<PeerLostError>([&] { comm.all_reduce({.in = &x, .out = &x, .count = 1}); });
    } else {
      meanwhile(comm);
    }
    met.arrive_and_wait();  // until here rank 1 does not close
  });
  return text;
}

TEST_P(Faults, FailedWriteNamesItsPeer) {
  const std::string text = text_of_failed_write(options(), ask, [](Communicator& comm) {
    EXPECT_THROW(comm.barrier(), Error);  // meets rank 0's all_reduce
  });
  EXPECT_TRUE(has(text, "rank 1") && has(text, "does not take writes any more")) << text;
}

// A rank that has failed, and has ended since, has told why. Its peers say that, and not that it is gone.
TEST_P(Faults, FailedWriteLetsItsPeerSayWhy) {
  const std::string text = text_of_failed_write(options(), ask, [](Communicator& comm) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 knows of the write by then
    comm.abort("rank 7 has died");
    EXPECT_THROW(comm.barrier(), Error);  // which tells the others
  });
  EXPECT_TRUE(has(text, "rank 7 has died")) << text;
}

// A rank may not call libfabric for long after a call. The peers must complete the call nevertheless.
TEST_P(Faults, NoCallEndsBeforeItsNotesHaveLeft) {
  std::barrier met(2);
  on_ranks(2, options(), [&](Communicator& comm) {
    comm.barrier();
    met.arrive_and_wait();
    if (comm.rank() == 0) {
      ask("full");
      // rank 1's note comes before this rank's
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    std::exception_ptr error;
    try {
      comm.barrier();
    } catch (...) { error = std::current_exception(); }
    met.arrive_and_wait();  // until here rank 0 does not call libfabric
    ask("");
    if (error) std::rethrow_exception(error);
  });
}

}  // namespace
}  // namespace unisono::test
