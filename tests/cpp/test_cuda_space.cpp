// Tests scratch, copies and the order of calls on a GPU. Skipped without a GPU.
#include "gpu.hpp"

namespace unisono::cuda {
namespace {

TEST_F(Gpu, CopiesOnTheCallsStream) {
  const Bytes from = test::random_bytes(100'003, 1);
  const DeviceBytes source(from), to(from.size());
  call_and_wait([&] {
    space->copy(to.at(), source.at(), from.size());
    space->copy(to.at(), to.at(), from.size());
    space->copy(nullptr, source.at(), 0);
  });
  EXPECT_EQ(read_back(to.at(), from.size()), from);
}

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST_F(Gpu, ScratchIsKeptUntilALargerRequest) {
  byte *first = nullptr, *again = nullptr, *other = nullptr, *slot = nullptr;
  call_and_wait([&] {
    first = space->scratch(Scratch::packed, 0, kMiB);
    again = space->scratch(Scratch::packed, 0, kMiB / 2);
    other = space->scratch(Scratch::landed, 0, kMiB);
    slot = space->scratch(Scratch::packed, 1, kMiB);
  });
  EXPECT_TRUE(first && first == again);
  EXPECT_TRUE(other && other != first && slot && slot != first && slot != other);
}

TEST_F(Gpu, ScratchThatIsReplacedIsFreed) {
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, 0), "the GPU's pool");
  auto used = [&] {
    check(cudaDeviceSynchronize(), "a test's calls");
    std::uint64_t bytes = 0;
    check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &bytes), "the GPU's pool");
    return bytes;
  };
  const std::uint64_t before = used();
  for (std::size_t size = 2 * kMiB; size <= 128 * kMiB; size *= 2)
    call(streams[size / kMiB % 4 / 2], [&] { space->scratch(Scratch::packed, 0, size); });
  EXPECT_GE(used() - before, 128 * kMiB);
  EXPECT_LT(used() - before, 130 * kMiB);
}

TEST_F(Gpu, AGraphKeepsItsScratch) {
  constexpr std::size_t kSize = 64 * kMiB;
  cudaStream_t const stream = streams[0];
  call_and_wait([&] { space->scratch(Scratch::packed, 0, kSize); });
  cudaGraphExec_t graph = captured([&] {
    EXPECT_TRUE(space->captured());
    cudaMemsetAsync(space->scratch(Scratch::packed, 0, kSize), 1, kSize, stream);
  });
  call_and_wait(
      [&] { cudaMemsetAsync(space->scratch(Scratch::packed, 0, 2 * kSize), 2, 2 * kSize, stream); });
  std::vector<void*> others(3);
  for (void*& other : others) {
    check(cudaMallocAsync(&other, kSize, stream), "a test's memory");
    check(cudaMemsetAsync(other, 3, kSize, stream), "a test's memory");
  }
  check(cudaGraphLaunch(graph, stream), "a test's graph");
  check(cudaStreamSynchronize(stream), "a test's graph");
  for (void* other : others) {
    EXPECT_EQ(read_back(static_cast<byte*>(other), kSize), Bytes(kSize, std::byte{3}));
    cudaFreeAsync(other, stream);
  }
  cudaGraphExecDestroy(graph);
}

// Scratch grows even in a capture mode that forbids allocations.
TEST_F(Gpu, ScratchGrowsWithinACapture) {
  const Bytes a = test::random_bytes(4 * kMiB, 1), b = test::random_bytes(4 * kMiB, 2);
  const DeviceBytes input(a), out(a.size());
  call_and_wait([&] { space->scratch(Scratch::packed, 0, kMiB); });
  cudaGraphExec_t graph = captured([&] {
    byte* const kept = space->scratch(Scratch::packed, 0, a.size());
    space->copy(kept, input.at(), a.size());
    const byte* const source = kept;
    space->combine({out.at(), nullptr, {&source, 1}, a.size(), DType::u8, Op::sum, 1});
  });
  for (const Bytes& data : {a, b}) {
    input.write(data);
    check(cudaGraphLaunch(graph, streams[0]), "a test's graph");
    check(cudaStreamSynchronize(streams[0]), "a test's graph");
    EXPECT_EQ(read_back(out.at(), data.size()), data);
  }
  cudaGraphExecDestroy(graph);
}

// The later call waits for the earlier one, whose stream is still busy.
TEST_F(Gpu, CallsOnTwoStreamsShareTheirScratch) {
  constexpr std::size_t kSize = 4096;
  const DeviceBytes seen(kSize), after(kSize);
  call(streams[0], [&] {
    hold(streams[0]);
    cudaMemsetAsync(space->scratch(Scratch::packed, 0, kSize), 1, kSize, streams[0]);
  });
  call(streams[1], [&] {
    space->copy(seen.at(), space->scratch(Scratch::packed, 0, kSize), kSize);
    byte* const larger = space->scratch(Scratch::packed, 0, kMiB);
    cudaMemsetAsync(larger, 2, kMiB, streams[1]);
  });
  call(nullptr, [&] { space->copy(after.at(), space->scratch(Scratch::packed, 0, kSize), kSize); });
  EXPECT_FALSE(space->idle(streams[0]));
  held = false;
  check(cudaDeviceSynchronize(), "a test's calls");
  EXPECT_TRUE(space->idle(streams[0]));
  EXPECT_EQ(read_back(seen.at(), kSize), Bytes(kSize, std::byte{1}));
  EXPECT_EQ(read_back(after.at(), kSize), Bytes(kSize, std::byte{2}));
}

TEST_F(Gpu, MarksAreReachedInTheStreamsOrder) {
  std::unique_ptr<nodes::GpuSpace::Mark> before, behind;
  call(streams[0], [&] {
    before = space->mark();
    hold(streams[0]);
    behind = space->mark();
  });
  EXPECT_FALSE(behind->reached());
  held = false;
  std::thread([&] {
    const auto here = space->enter_thread();
    while (!behind->reached()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(before->reached());
  }).join();
}

}  // namespace
}  // namespace unisono::cuda
