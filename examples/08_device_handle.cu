// An all_gather in one kernel of one's own, on a device area: the kernel stores into every GPU's memory,
// signals, and waits for the others. Ranks are threads, one for each GPU.
//   nvcc -std=c++20 -arch=native 08_device_handle.cu -lunisono
//   ./a.out [RANKS]    more ranks than GPUs share them if UNISONO_SHARE_DEVICE=1
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

#include "unisono/communicator.hpp"
#include "unisono/device/area.hpp"
#include "unisono/device/verbs.cuh"

namespace {

namespace device = unisono::device;

constexpr int kBlocks = 4, kThreads = 256, kRounds = 5;
constexpr std::size_t kCount = 10'007;  // floats of a rank

// Every block gives its slice of this rank's floats to every rank, then waits for that slice of all others.
// The area has two halves, in turn: who signals round k has read the results of round k - 1.
__global__ void all_gather(const __grid_constant__ device::Handle handle, const float* mine,
                           std::uint32_t round) {
  const std::size_t slice = (kCount + gridDim.x - 1) / gridDim.x;
  const std::size_t begin = min(slice * blockIdx.x, kCount), count = min(slice, kCount - begin);
  const std::size_t half = (round % 2) * kCount * handle.ranks;
  const std::size_t to = half + kCount * handle.rank + begin;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  for (int i = 0; i < handle.ranks; ++i) {
    const int peer = (handle.rank + i) % handle.ranks;
    device::put(handle, peer, to * sizeof(float), mine + begin, count * sizeof(float));
    device::signal(handle, peer, handle.rank * blocks + block);
  }
  for (int rank = 0; rank < handle.ranks; ++rank)
    if (!device::wait(handle, rank * blocks + block, round, rank)) return;
}

void check(cudaError_t result) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(result));
  std::exit(1);
}

bool run(const std::shared_ptr<unisono::Bootstrap>& bootstrap, int gpus) {
  const int rank = bootstrap->rank(), ranks = bootstrap->size();
  check(cudaSetDevice(rank % gpus));
  unisono::Communicator comm(bootstrap, {.timeout_s = 30, .device = rank % gpus});
  const std::size_t half = kCount * static_cast<std::size_t>(ranks);
  const unisono::DeviceArea area(comm, 2 * half * sizeof(float), ranks * kBlocks, "all_gather");
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, all_gather));  // loads it
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  float* mine = nullptr;
  check(cudaMalloc(&mine, kCount * sizeof(float)));
  std::vector<float> data(kCount), all(half);
  comm.barrier();  // to load and to allocate may wait for the GPU: no kernel waits for a rank that does so
  bool right = true;
  for (int round = 1; round <= kRounds; ++round) {
    for (std::size_t i = 0; i < kCount; ++i)
      data[i] = static_cast<float>(1000 * round + 100 * rank) + 0.001f * static_cast<float>(i);
    check(cudaMemcpyAsync(mine, data.data(), kCount * sizeof(float), cudaMemcpyHostToDevice, stream));
    all_gather<<<kBlocks, kThreads, 0, stream>>>(area.handle(), mine, static_cast<std::uint32_t>(round));
    check(cudaGetLastError());
    const float* const result = static_cast<const float*>(area.local()) + (round % 2) * half;
    check(cudaMemcpyAsync(all.data(), result, half * sizeof(float), cudaMemcpyDeviceToHost, stream));
    comm.synchronize(stream);
    for (int r = 0; r < ranks; ++r)
      for (std::size_t i = 0; i < kCount; ++i)
        right = right && all[static_cast<std::size_t>(r) * kCount + i] ==
                             static_cast<float>(1000 * round + 100 * r) + 0.001f * static_cast<float>(i);
  }
  comm.barrier();  // no rank frees what another one's kernel still reads
  check(cudaFree(mine));
  check(cudaStreamDestroy(stream));
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  const int gpus = unisono::device_count();
  if (gpus == 0) {
    std::printf("this example needs a GPU\n");
    return 77;
  }
  const int ranks = argc > 1 ? std::atoi(argv[1]) : gpus;
  const auto bootstraps = unisono::thread_bootstraps(ranks, std::chrono::seconds(30));
  std::vector<int> right(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < bootstraps.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        right[r] = run(bootstraps[r], gpus);
      } catch (const std::exception& error) { std::fprintf(stderr, "rank %zu: %s\n", r, error.what()); }
    });
  for (std::thread& thread : threads) thread.join();
  const auto good = std::count(right.begin(), right.end(), 1);
  std::printf("%d of %d ranks have the others' floats\n", static_cast<int>(good), ranks);
  return good == ranks ? 0 : 1;
}
