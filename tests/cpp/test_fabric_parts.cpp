// The parts of the fabric lane: immediates, tasks, announcements, memory, the files of shm, providers.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>

#include "fabric/channel.hpp"
#include "fabric/immediate.hpp"
#include "fabric/memory.hpp"
#include "fabric/provider.hpp"
#include "fabric/shm_file.hpp"
#include "fabric/task.hpp"
#include "fabric_here.hpp"
#include "programs.hpp"

namespace unisono::test {
namespace {

using fabric::Announcement;
using fabric::Arrivals;
using fabric::Immediate;
using fabric::Kind;
using fabric::Task;

TEST(Immediates, KeepRankKindAndNumber) {
  std::set<std::uint32_t> words;
  for (const int rank : {0, 1, 1023})
    for (int kind = 0; kind < fabric::kKinds; ++kind)
      for (const std::uint32_t number : {0u, 1u, Immediate::kNumbers - 1}) {
        const std::uint32_t word = Immediate{rank, static_cast<Kind>(kind), number}.word();
        const Immediate back = Immediate::of(word);
        EXPECT_EQ(back.rank, rank);
        EXPECT_EQ(static_cast<int>(back.kind), kind);
        EXPECT_EQ(back.number, number);
        EXPECT_TRUE(words.insert(word).second);
      }
}

TEST(Arrivals, MayComeInAnyOrderAndOnce) {
  std::mt19937 random(5);
  Arrivals arrivals;
  std::uint64_t first = 0;
  for (int lap = 0; lap < 600; ++lap) {  // more than the numbers' 19 bits
    std::vector<std::uint64_t> numbers(1000);
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = first + i;
    std::shuffle(numbers.begin(), numbers.end(), random);
    EXPECT_FALSE(arrivals.has(first, first + 1));
    for (const std::uint64_t number : numbers)
      ASSERT_TRUE(arrivals.accept(static_cast<std::uint32_t>(number) % Immediate::kNumbers));
    first += numbers.size();
    ASSERT_TRUE(arrivals.has(first - numbers.size(), first));
    ASSERT_EQ(arrivals.count(), first);
    ASSERT_FALSE(arrivals.accept(static_cast<std::uint32_t>(numbers.front()) % Immediate::kNumbers))
        << "a duplicate";
  }
}

TEST(Arrivals, RefuseDuplicatesAndNumbersOutsideTheWindow) {
  Arrivals arrivals;
  EXPECT_TRUE(arrivals.accept(7));
  EXPECT_FALSE(arrivals.accept(7));
  EXPECT_FALSE(arrivals.accept(Arrivals::kWindow));
  EXPECT_FALSE(arrivals.accept(Immediate::kNumbers - 1)) << "stale";
  EXPECT_EQ(arrivals.count(), 1u);
  EXPECT_TRUE(arrivals.has(7, 8));
  EXPECT_FALSE(arrivals.has(6, 8));
}

TEST(Task, RethrowsTheExceptionThatHasEndedIt) {
  auto fail = []() -> Task {
    throw UsageError("said so");
    co_return;
  };
  const Task task = fail();
  EXPECT_EQ(text_of<UsageError>([&] { task.done(); }), "said so");
}

// An address or a length from a peer decides where this rank writes.
TEST(Announcements, AreRefusedIfImpossible) {
  const Announcement good{0x7f0000001000, 4096, {1, 2}};
  for (const auto& [offset, bytes, held] : {std::tuple<std::uint64_t, std::uint64_t, bool>{0, 4096, true},
                                            {4096, 0, true},
                                            {4095, 1, true},
                                            {4095, 2, false},
                                            {4097, 0, false},
                                            {~std::uint64_t{0}, 1, false},
                                            {1, ~std::uint64_t{0}, false}})
    EXPECT_EQ(good.holds(offset, bytes), held) << offset << ' ' << bytes;
  auto read = [](const Announcement& one, std::size_t cut, std::uint64_t least) {
    std::string message;
    one.write(message);
    std::string_view rest = std::string_view(message).substr(0, message.size() - cut);
    return Announcement::read(rest, 2, least, "rank 3");
  };
  EXPECT_EQ(read(good, 0, 4096).keys, good.keys);
  for (const std::string& text :
       {text_of<UsageError>([&] { read(good, 1, 0); }), text_of<UsageError>([&] { read(good, 0, 4097); }),
        text_of<UsageError>([&] { read({~std::uint64_t{0} - 5, 4096, {1, 2}}, 0, 0); }),
        text_of<UsageError>([&] { read({4096, ~std::uint64_t{0}, {1, 2}}, 0, 0); })})
    EXPECT_TRUE(has(text, "rank 3")) << text;
}

// The libfabric of this machine was built without CUDA, or finds no GPU.
TEST(FabricMemory, OfAGpuIsRefusedWithAdvice) {
  if (device_count() > 0) GTEST_SKIP() << "there is a GPU: tests/gpu/test_fabric.py";
  fabric::Info nic;
  try {
    nic = fabric::provider_named("shm", true).nics[0];
  } catch (const Error& error) { GTEST_SKIP() << error.what(); }
  fabric::Calls calls;
  fabric::Port port(nic, 1, [](int, const std::string& why) { FAIL() << why; }, calls, 0);
  fabric::Channel channel(port);
  const auto memory = fabric::host_memory(8192);
  const cuda::Dmabuf dmabuf(::memfd_create("no dmabuf", 0), memory.get());
  const std::string text = text_of<ResourceError>([&] { channel.enroll(memory.get(), 8192, 0, dmabuf); });
  EXPECT_TRUE(has(text, "8192 bytes of GPU memory with provider shm") && has(text, "built with CUDA"))
      << text;
}

TEST(FabricMemory, OfAMissingGpuIsRefusedWithAdvice) {
  if (device_count() > 0) GTEST_SKIP() << "there is a GPU: tests/gpu/test_fabric.py";
  auto make = [](const Communicator::Options& options) {
    Communicator(thread_bootstraps(1, std::chrono::seconds(5)).front(), options);
  };
  Communicator::Options pinned{.fabric = Communicator::Fabric{}}, device = pinned;
  pinned.fabric->pinned = true;
  device.device = 0;
  for (const auto& options : {pinned, device}) {
    const std::string text = text_of<ResourceError>([&] { make(options); });
    EXPECT_TRUE(has(text, "pinned and GPU memory") && has(text, "leave device= and pinned= out")) << text;
  }
}

// A process that removes left-over files may find the file of an endpoint that is just being made.
TEST(FabricShm, KeepsTheFilesOfLivingEndpoints) {
  fabric::Info nic;
  try {
    nic = fabric::provider_named("shm").nics[0];
  } catch (const Error& error) { GTEST_SKIP() << error.what(); }
  std::atomic<bool> over = false;
  const std::jthread remover([&] {
    for (int i = 0; i < 60; ++i) fabric::remove_left_files();  // fewer times than a channel tries to open
    over = true;
  });
  fabric::Calls calls;
  fabric::Port port(nic, 1, [](int, const std::string& why) { FAIL() << why; }, calls, 0);
  auto there = [](std::string address) {
    return ::access(address.replace(0, sizeof "fi_shm://" - 1, "/dev/shm/").c_str(), F_OK) == 0;
  };
  for (int i = 0; i < 10 || !over; ++i) {
    std::string address;
    {
      fabric::Channel channel(port);
      address = channel.address();
      EXPECT_TRUE(there(address)) << address;
    }
    EXPECT_FALSE(there(address)) << address;
  }
}

TEST(FabricProviders, AreListedIfAnUnknownOneIsNamed) {
  std::vector<FabricProvider> present;
  try {
    present = fabric_providers();
  } catch (const ResourceError& error) { GTEST_SKIP() << error.what(); }
  const std::string text = text_of<UsageError>([] { fabric::provider_named("infinitebrand"); });
  EXPECT_TRUE(has(text, "infinitebrand")) << text;
  for (const FabricProvider& one : present) EXPECT_TRUE(has(text, one.name)) << one.name << " in: " << text;
}

}  // namespace
}  // namespace unisono::test
