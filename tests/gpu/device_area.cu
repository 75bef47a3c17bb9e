// The tests of device areas: kernels of the user's own, compiled against the public headers alone. Ranks are
// threads. tests/gpu/test_device_area.py compiles and runs it.
//   device_area CASE RANKS    exit status 0: all is as expected; 1: not, as stderr says; 77: too few GPUs
//   here
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "unisono/communicator.hpp"
#include "unisono/device/area.hpp"
#include "unisono/device/verbs.cuh"
#include "unisono/error.hpp"

namespace {

namespace device = unisono::device;
using device::Handle;
using Bytes = std::vector<unsigned char>;

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}
void expect(bool right, const std::string& what) {
  if (!right) throw std::runtime_error(what);
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Rank {
  int rank, ranks;
  unisono::Communicator comm;
  cudaStream_t streams[3] = {};
  std::vector<void*> made;
  std::function<void(const std::string&)> tell;  // a text that is to be the same on every rank

  const bool shared;  // the ranks share a GPU

  Rank(const std::shared_ptr<unisono::Bootstrap>& bootstrap, const unisono::Communicator::Options& options,
       bool shared)
      : rank(bootstrap->rank()), ranks(bootstrap->size()), comm(bootstrap, options), shared(shared) {
    for (cudaStream_t& stream : streams)
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  }
  template <class T>
  T* zeroed(std::size_t count) {
    void* at = nullptr;
    check(cudaMalloc(&at, count * sizeof(T)), "memory");
    check(cudaMemset(at, 0, count * sizeof(T)), "memory");
    made.push_back(at);
    return static_cast<T*>(at);
  }
  template <class T>
  std::vector<T> read(const T* at, std::size_t count) {
    std::vector<T> host(count);
    check(cudaMemcpyAsync(host.data(), at, count * sizeof(T), cudaMemcpyDeviceToHost, streams[1]), "a copy");
    check(cudaStreamSynchronize(streams[1]), "a copy");
    return host;
  }
  void write(void* at, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(at, from, bytes, cudaMemcpyHostToDevice, streams[1]), "a copy");
    check(cudaStreamSynchronize(streams[1]), "a copy");
  }
  // Work of the GPU as a whole, such as freeing memory, is done: no kernel waits for it.
  void ready() {
    check(cudaDeviceSynchronize(), "getting ready");
    comm.barrier();
  }
  // Lets a launch on the first stream follow another. Streams of ranks that share a GPU may share a queue,
  // in which a launch behind a kernel that waits holds up those of other ranks.
  void follow() {
    if (!shared) return;
    comm.synchronize(streams[0]);
    comm.barrier();
  }
  void finish() {
    comm.barrier();
    for (void* at : made) cudaFree(at);
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }
};

// ---- put, of all alignments and lengths
// ------------------------------------------------------------------------

struct Piece {
  std::size_t offset, source, bytes;
};

__global__ void put_to_all(const __grid_constant__ Handle handle, const unsigned char* data, Piece piece,
                           std::size_t region, std::uint32_t round, int* arrived) {
  for (int i = 0; i < handle.ranks; ++i) {
    const int peer = (handle.rank + i) % handle.ranks;
    device::put(handle, peer, region * handle.rank + piece.offset, data + piece.source, piece.bytes);
    device::signal(handle, peer, handle.rank);
  }
  for (int r = 0; r < handle.ranks; ++r)
    if (!device::wait(handle, r, round, r)) return;
  *arrived = static_cast<int>(round);
}

unsigned char byte_of(std::size_t i, int rank, std::uint32_t round) {
  return static_cast<unsigned char>((i * 7 + static_cast<std::size_t>(rank) * 31 + round * 13) % 255 + 1);
}

void puts(Rank& here) {
  constexpr std::size_t kRegion = 8192, kData = 8192;
  const std::size_t all = kRegion * static_cast<std::size_t>(here.ranks);
  unisono::DeviceArea area(here.comm, all, here.ranks);
  expect(area.bytes() == all && area.signals() == here.ranks, "the area's size");
  expect(reinterpret_cast<std::uintptr_t>(area.local()) % 256 == 0, "the memory's alignment");
  auto* const data = here.zeroed<unsigned char>(kData);
  auto* const arrived = here.zeroed<int>(1);
  std::vector<Piece> pieces = {{0, 0, 0}, {0, 0, 1}, {0, 0, 16}, {3, 3, 7}, {0, 0, 8192}, {16, 0, 4097}};
  for (const std::size_t offset : {0, 1, 2, 8, 15})
    for (const std::size_t source : {0, 1, 4, 12})
      pieces.push_back({offset, source, 15 + 97 * offset + 513 * source});
  std::uint32_t round = 0;
  for (const Piece& piece : pieces) {
    ++round;
    Bytes mine(kData);
    for (std::size_t i = 0; i < kData; ++i) mine[i] = byte_of(i, here.rank, round);
    here.write(data, mine.data(), kData);
    check(cudaMemsetAsync(area.local(), 0, all, here.streams[1]), "clearing");
    check(cudaStreamSynchronize(here.streams[1]), "clearing");
    here.comm.barrier();
    const dim3 threads = round % 2 ? dim3(256) : dim3(8, 4, 2);
    put_to_all<<<1, threads, 0, here.streams[0]>>>(area.handle(), data, piece, kRegion, round, arrived);
    here.comm.synchronize(here.streams[0]);
    expect(here.read(arrived, 1)[0] == static_cast<int>(round), "a wait has failed");
    const Bytes got = here.read(static_cast<const unsigned char*>(area.local()), all);
    for (int r = 0; r < here.ranks; ++r)
      for (std::size_t i = 0; i < kRegion; ++i) {
        const bool written = i >= piece.offset && i < piece.offset + piece.bytes;
        const unsigned char wanted = written ? byte_of(i - piece.offset + piece.source, r, round) : 0;
        expect(got[static_cast<std::size_t>(r) * kRegion + i] == wanted,
               "byte " + std::to_string(i) + " from rank " + std::to_string(r) + " of a put to " +
                   std::to_string(piece.offset) + " from " + std::to_string(piece.source) + " of " +
                   std::to_string(piece.bytes) + " bytes");
      }
  }
}

// ---- signals: none is lost
// ------------------------------------------------------------------------------------

__global__ void raise_and_wait(const __grid_constant__ Handle handle, int times, std::uint32_t count,
                               int* arrived) {
  for (int k = 0; k < times; ++k)
    for (int r = 0; r < handle.ranks; ++r) device::thread_signal(handle, r, 2);
  if (device::wait(handle, 2, count) && threadIdx.x == 0) atomicAdd(arrived, 1);
}

void signals(Rank& here) {
  unisono::DeviceArea area(here.comm, 0, 5);
  auto* const arrived = here.zeroed<int>(1);
  here.ready();
  const int times = 20, blocks = 2, threads = 64;
  const auto each = static_cast<std::uint32_t>(here.ranks * times * blocks * threads);
  for (std::uint32_t call = 1; call <= 3; ++call) {
    raise_and_wait<<<blocks, threads, 0, here.streams[0]>>>(area.handle(), times, call * each, arrived);
    here.comm.synchronize(here.streams[0]);
    here.comm.barrier();
  }
  expect(here.read(arrived, 1)[0] == 3 * blocks, "a wait has failed");
  const auto all = here.read(area.handle().signal[here.rank], 5);
  for (std::size_t slot = 0; slot < all.size(); ++slot)
    expect(all[slot].count == (slot == 2 ? 3 * each : 0) && all[slot].taken == 0,
           "signal " + std::to_string(slot) + " was raised " + std::to_string(all[slot].count) + " times");
}

// ---- synchronise and take, also from a graph
// -------------------------------------------------------------------

__global__ void rounds(const __grid_constant__ Handle handle, int count, std::uint32_t* epoch, int* wrong) {
  const std::uint32_t first = *epoch;
  const auto ranks = static_cast<unsigned>(handle.ranks);
  for (int k = 0; k < count; ++k) {
    const std::uint32_t value = 1000 * (first + static_cast<std::uint32_t>(k));
    const unsigned half = (first + static_cast<unsigned>(k)) % 2 * ranks;
    for (unsigned p = threadIdx.x; p < ranks; p += blockDim.x)
      static_cast<std::uint32_t*>(handle.memory[p])[half + handle.rank] = value + handle.rank;
    if (!device::synchronise(handle, 0)) {
      if (threadIdx.x == 0) *wrong = -1;
      return;
    }
    for (unsigned p = threadIdx.x; p < ranks; p += blockDim.x)
      if (device::load_relaxed(static_cast<std::uint32_t*>(handle.memory[handle.rank]) + half + p) !=
          value + p)
        atomicAdd(wrong, 1);
  }
  if (threadIdx.x == 0) *epoch = first + static_cast<std::uint32_t>(count);
}

void barriers(Rank& here) {
  unisono::DeviceArea area(here.comm, 2 * sizeof(std::uint32_t) * static_cast<std::size_t>(here.ranks), 1);
  auto* const epoch = here.zeroed<std::uint32_t>(1);
  auto* const wrong = here.zeroed<int>(1);
  here.ready();
  auto launch = [&] { rounds<<<1, 32, 0, here.streams[0]>>>(area.handle(), 7, epoch, wrong); };
  launch();
  here.follow();
  launch();
  here.comm.synchronize(here.streams[0]);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  check(cudaStreamBeginCapture(here.streams[0], cudaStreamCaptureModeThreadLocal), "a capture");
  launch();
  check(cudaStreamEndCapture(here.streams[0], &graph), "a capture");
  check(cudaGraphInstantiate(&ready, graph, 0), "a graph");
  check(cudaGraphUpload(ready, here.streams[0]), "a graph");
  here.ready();
  for (int replay = 0; replay < 10; ++replay) {
    check(cudaGraphLaunch(ready, here.streams[0]), "a graph");
    here.follow();
  }
  here.comm.synchronize(here.streams[0]);
  expect(here.read(wrong, 1)[0] == 0, "values that were not there after synchronise");
  expect(here.read(epoch, 1)[0] == 12 * 7, "rounds are missing");
  here.comm.barrier();
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
}

// ---- a signal that never comes
// --------------------------------------------------------------------------------

__global__ void wait_for_one(const __grid_constant__ Handle handle, int slot, int from, int* arrived) {
  const bool came = device::wait(handle, slot, 1, from);
  if (threadIdx.x == 0) *arrived = came ? 1 : 2;
}
__global__ void signal_one(const __grid_constant__ Handle handle, int peer, int slot) {
  device::signal(handle, peer, slot);
}

// Rank 0 has a deadline of 4 s, the others of 60 s: their kernels end with rank 0's.
void late(Rank& here) {
  unisono::DeviceArea other(here.comm, 64, 1);
  unisono::DeviceArea area(here.comm, 64, 4, "the late kernel");
  auto* const arrived = here.zeroed<int>(1);
  auto* const x = here.zeroed<float>(16);
  here.ready();
  wait_for_one<<<1, 64, 0, here.streams[0]>>>(area.handle(), 3, (here.rank + 1) % here.ranks, arrived);
  std::string text, again;
  try {
    here.comm.synchronize(here.streams[0]);
  } catch (const unisono::TimeoutError& error) { text = error.what(); }
  expect(has(text,
             "the late kernel (rank 0) has waited 4 s on the GPU for rank 1 (signal 3, block 0, count "
             "expected 1, seen 0)"),
         "the error says: " + text);
  try {
    here.comm.all_reduce(
        {.in = x, .out = x, .count = 16, .memory = unisono::Memory::device, .stream = here.streams[0]});
  } catch (const unisono::TimeoutError& error) { again = error.what(); }
  expect(again == text, "the next call says: " + again);
  expect(here.read(arrived, 1)[0] == 2, "the kernel does not know that its wait has failed");
  here.tell(text);
}

// ---- beside collectives
// ---------------------------------------------------------------------------------------

// A kernel that waits holds up no collective on another stream, whose buffers may lie in the area.
void beside(Rank& here) {
  constexpr std::size_t kCount = 50'000;
  unisono::DeviceArea area(here.comm, 2 * kCount * sizeof(float), 1);
  auto* const arrived = here.zeroed<int>(1);
  auto* const in = static_cast<float*>(area.local());
  auto* const out = in + kCount;
  here.ready();
  wait_for_one<<<1, 64, 0, here.streams[0]>>>(area.handle(), 0, device::kAnyRank, arrived);
  for (const char* algorithm : {"", "two_shot", "two_shot_direct", "two_shot_push"}) {
    const std::vector<float> mine(kCount, static_cast<float>(here.rank + 1));
    here.write(in, mine.data(), kCount * sizeof(float));
    here.comm.all_reduce({.in = in,
                          .out = out,
                          .count = kCount,
                          .memory = unisono::Memory::device,
                          .stream = here.streams[2],
                          .algorithm = algorithm});
    here.comm.synchronize(here.streams[2]);
    const float sum = static_cast<float>(here.ranks * (here.ranks + 1) / 2);
    for (const float one : here.read(out, kCount)) expect(one == sum, std::string("a sum by ") + algorithm);
  }
  expect(cudaStreamQuery(here.streams[0]) == cudaErrorNotReady, "the kernel has not waited");
  here.comm.barrier();
  signal_one<<<1, 32, 0, here.streams[2]>>>(area.handle(), (here.rank + 1) % here.ranks, 0);
  here.comm.synchronize(here.streams[0]);
  expect(here.read(arrived, 1)[0] == 1, "the signal has not come");
}

// ---- what is refused
// ------------------------------------------------------------------------------------------

void differs(Rank& here) {
  try {
    unisono::DeviceArea area(here.comm, 4096, here.rank == 1 ? 5 : 4);
  } catch (const unisono::MismatchError& error) {
    expect(has(error.what(),
               "rank 0 asked for a device area of 4096 bytes and 4 signals, but rank 1 for one of 4096 "
               "bytes and 5 signals"),
           error.what());
    return here.tell(error.what());
  }
  expect(false, "ranks may differ");
}

void refused(Rank& here) {
  for (const int signals : {-1, 1 << 30}) {
    try {
      unisono::DeviceArea area(here.comm, 0, signals);
      expect(false, "an area of " + std::to_string(signals) + " signals");
    } catch (const unisono::UsageError&) {}
  }
  unisono::DeviceArea empty(here.comm, 0, 0);
  expect(empty.local() != nullptr, "an empty area has a place");
}

struct Case {
  void (*body)(Rank&);
  bool short_deadline = false, fails = false;
};
const std::map<std::string, Case> kCases = {
    {"puts", {puts}},         {"signals", {signals}},
    {"barriers", {barriers}}, {"late", {late, true, true}},
    {"beside", {beside}},     {"differs", {differs, false, true}},
    {"refused", {refused}},
};

void load_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, put_to_all), "loading");
  check(cudaFuncGetAttributes(&attributes, raise_and_wait), "loading");
  check(cudaFuncGetAttributes(&attributes, rounds), "loading");
  check(cudaFuncGetAttributes(&attributes, wait_for_one), "loading");
  check(cudaFuncGetAttributes(&attributes, signal_one), "loading");
}

}  // namespace

int main(int argc, char** argv) {
  const auto found = argc == 3 ? kCases.find(argv[1]) : kCases.end();
  if (found == kCases.end()) {
    std::fprintf(stderr, "device_area CASE RANKS; the cases are:");
    for (const auto& [name, one] : kCases) std::fprintf(stderr, " %s", name.c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  const Case& test = found->second;
  const int ranks = std::atoi(argv[2]);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32",
         0);  // else streams of ranks that share a GPU wait for each other
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const char* shares = std::getenv("UNISONO_SHARE_DEVICE");
  const int gpus = unisono::device_count();
  if (gpus == 0 || (gpus < ranks && !(shares && std::string(shares) == "1"))) return 77;
  const auto bootstraps = unisono::thread_bootstraps(ranks, std::chrono::seconds(60));
  std::mutex mutex;
  std::set<std::string> texts;
  int failures = 0;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const int gpu = gpus < ranks ? 0 : r;
      try {
        check(cudaSetDevice(gpu), "cudaSetDevice");
        load_kernels();
        const double timeout_s = test.short_deadline ? (r == 0 ? 4 : 60) : 20;
        Rank here(bootstraps[static_cast<std::size_t>(r)],
                  {.timeout_s = timeout_s, .device = gpu, .max_sms = gpus < ranks ? 64 / ranks : 0},
                  gpus < ranks);
        here.tell = [&](const std::string& text) {
          const std::scoped_lock lock(mutex);
          texts.insert(text);
        };
        test.body(here);
        if (!test.fails) here.finish();
      } catch (const std::exception& error) {
        const std::scoped_lock lock(mutex);
        std::fprintf(stderr, "rank %d: %s\n", r, error.what());
        ++failures;
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (texts.size() > 1) {
    std::fprintf(stderr, "the ranks say different things:\n");
    for (const std::string& text : texts) std::fprintf(stderr, "  %s\n", text.c_str());
  }
  return failures == 0 && texts.size() <= 1 ? 0 : 1;
}
