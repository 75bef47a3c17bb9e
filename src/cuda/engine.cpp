#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <set>

#include "base/env.hpp"
#include "base/text.hpp"
#include "core/allocation.hpp"
#include "cuda/gpu_engine.hpp"
#include "cuda/window.hpp"
#include "unisono/communicator.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {
namespace {

// The facts that ranks exchange before they share memory.
struct Card {
  std::int32_t pid, device;
  char uuid[16], pci[20];
  std::int32_t blocks;
  std::uint32_t name;  // hashed
  bool usable;
};

// Whether a GPU may touch another's memory, and whether NVLink lies between them.
struct Path {
  bool reached, nvlink;
};

// From `device` of this process to that GPU. One that this process does not see counts as reached, since
// mapping its memory will tell; nothing would tell of NVLink, so that only a `known` card counts as joined.
Path path(int device, const char* pci, bool known) {
  int other = 0, reached = 0, atomics = 0;
  if (cudaDeviceGetByPCIBusId(&other, pci) != cudaSuccess) {
    cudaGetLastError();
    return {true, known};
  }
  if (other == device) return {true, true};
  check(cudaDeviceCanAccessPeer(&reached, device, other), "cudaDeviceCanAccessPeer");
  // what NVLink has and PCIe lacks
  check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other),
        "cudaDeviceGetP2PAttribute");
  return {reached != 0, atomics != 0};
}

}  // namespace

GpuEngine::GpuEngine(Group& group, const Options& options)
    : group_(group), device_(options.device), timeout_s_(options.timeout_s) {
  try {
    open(options);
  } catch (...) {
    release();
    throw;
  }
}

void GpuEngine::open(const Options& options) {
  meet_cards(options);
  const int n = group_.size();
  layout_ = Layout(n, blocks_, chunk_bytes());
  scratch_ = share(layout_.bytes, peer_access_ ? kind_for_peers() : DeviceMemory::Kind::host);
  const OnDevice on(device_);
  void* record = nullptr;
  check(cudaHostAlloc(&record, sizeof(Failure), cudaHostAllocPortable | cudaHostAllocMapped),
        "pinning memory");
  failure_ = new (record) Failure{};
  void* seen = nullptr;
  check(cudaHostGetDevicePointer(&seen, record, 0), "mapping pinned memory");
  base_.rank = group_.rank();
  base_.layout = layout_;
  for (const auto& part : scratch_) bases_.push_back(part->data());
  if (!many()) std::copy(bases_.begin(), bases_.end(), base_.bases);
  base_.failure = static_cast<Failure*>(seen);
  base_.counts_up = nvlink_;
  load_kernels();
  for (cudaStream_t* stream : {&side_, &tell_})
    check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream");
  for (cudaEvent_t* event : events())
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
  group_.exchange(char{});  // nobody launches before everyone has cleared and mapped
  watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

GpuEngine::~GpuEngine() { release(); }

void GpuEngine::release() noexcept {
  watcher_ = {};
  if (!failure_) return;
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) return;
  cudaDeviceSynchronize();  // waits of kernels in flight end by their deadline
  drop_registered();
  free_dropped([] {});
  for (const cudaEvent_t* event : events())
    if (*event) cudaEventDestroy(*event);
  for (cudaStream_t stream : {side_, tell_})
    if (stream) cudaStreamDestroy(stream);
  cudaFreeHost(failure_);
  cudaSetDevice(before);
}

void GpuEngine::meet_cards(const Options& options) {
  Card mine{::getpid(), device_, {}, {}, 0, 0, false};
  std::string problem;
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess)
    problem = std::string("no GPU, or no driver for it, is here (") + cudaGetErrorString(counted) +
              "): see what nvidia-smi says, or leave device= out.";
  else if (device_ < 0 || device_ >= count)
    problem = "device " + std::to_string(device_) + " is not among the " + std::to_string(count) +
              " GPUs that this process sees: give another, or check CUDA_VISIBLE_DEVICES.";
  else {
    cudaDeviceProp card;
    check(cudaGetDeviceProperties(&card, device_), "cudaGetDeviceProperties");
    std::memcpy(mine.uuid, card.uuid.bytes, sizeof mine.uuid);
    check(cudaDeviceGetPCIBusId(mine.pci, sizeof mine.pci, device_), "cudaDeviceGetPCIBusId");
    card_ = card.name;
    mine.name = static_cast<std::uint32_t>(std::hash<std::string>{}(card_));
    const int max_sms = options.max_sms > 0 ? options.max_sms : env().max_sms;
    mine.blocks = std::min({kMostBlocks, card.multiProcessorCount, max_sms > 0 ? max_sms : kMostBlocks});
    mine.usable = true;
    // one that waits holds SMs: another's of a GPU that is shared, or more than max_sms
    early_ = card.major >= 9 && !env().share_device && max_sms == 0;
    clusters_ = card.major >= 9;
  }
  if (group_.size() > kMaxRanks && problem.empty()) {
    problem = "the CUDA lane joins up to " + std::to_string(kMaxRanks) + " ranks of one machine, not " +
              std::to_string(group_.size()) + ".";
    mine.usable = false;
  }
  const auto cards = group_.exchange(mine);
  if (!problem.empty()) throw UsageError(problem);
  blocks_ = mine.blocks;
  Path all{options.peer_access && env().peer_access, true};
  auto join = [&](const Path& one) { all = {all.reached && one.reached, all.nvlink && one.nvlink}; };
  for (int r = 0; r < group_.size(); ++r) {
    const Card& its = cards[static_cast<std::size_t>(r)];
    if (!its.usable)
      throw UsageError("rank " + std::to_string(group_.number(r)) + " cannot use its GPU: see its error.");
    for (int q = 0; q < r; ++q)
      if (std::memcmp(its.uuid, cards[static_cast<std::size_t>(q)].uuid, sizeof its.uuid) == 0 &&
          !env().share_device)
        throw UsageError("ranks " + std::to_string(group_.number(q)) + " and " +
                         std::to_string(group_.number(r)) +
                         " have the same GPU: give each its own, by device= or CUDA_VISIBLE_DEVICES.");
    blocks_ = std::min(blocks_, its.blocks);
    if (its.name != mine.name) card_.clear();
    if (its.pid == mine.pid && its.device != device_) neighbours_.push_back(its.device);
    join(path(device_, its.pci, Plan::has_table(card_)));
  }
  for (const Path& of_rank : group_.exchange(all)) join(of_rank);
  peer_access_ = all.reached;
  nvlink_ = all.reached && all.nvlink;
  if (!peer_access_) blocks_ = std::min(blocks_, kMostStagedBlocks);
  if (many()) blocks_ = std::min(blocks_, kMostBlocksOfMany);
}

std::size_t GpuEngine::chunk_bytes() const {
  constexpr std::size_t kKiB = 1024;
  if (!many()) return (group_.size() > 4 ? 32 : 64) * kKiB;
  const auto pairs = static_cast<std::size_t>(group_.size()) * static_cast<std::size_t>(blocks_);
  return std::clamp(kMostRings / (pairs * kChunks) / kKiB * kKiB, 4 * kKiB, 32 * kKiB);
}

void GpuEngine::load_kernels() {
  std::set<const void*> loaded;
  auto load = [&](const void* one) {
    if (!one || !loaded.insert(one).second) return;
    const int version = cuda::load(one).ptxVersion;
    // follow_last_kernel and meet_cluster: code for older GPUs does not wait
    early_ = early_ && version >= 90;
    clusters_ = clusters_ && version >= 90;
  };
  load(window_begin_kernel());
  load(window_wait_kernel());
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const Wire wire : {Wire::fp8, Wire::int8}) {
      load(quantised_kernel(dtype, wire, many()));
      if (!many()) load(reinterpret_cast<const void*>(wire_kernel(dtype, wire, group_.size())));
    }
  for (int d = 0; d < kDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int c = 0; c < kCollectives; ++c)
      for (int a = 0; a < kAlgorithms; ++a)
        load(kernel(static_cast<Collective>(c), static_cast<Algorithm>(a), dtype, Op::sum, many()));
    if (many()) continue;
    for (const Step step : {Step::move, Step::combine, Step::two_shot, Step::relay})
      for (const bool lines : {false, true})
        for (const bool whole : {false, true})
          load(reinterpret_cast<const void*>(
              exchange_kernel(step, lines, whole, group_.size(), dtype, Op::sum)));
  }
}

void GpuEngine::check() {
  if (__atomic_load_n(&failure_->stage, __ATOMIC_ACQUIRE) == 2) {
    const unisono::Failure failure = story();
    group_.fail(failure.kind, failure.text);
  }
  group_.check();
  if (__atomic_load_n(&failure_->cut, __ATOMIC_ACQUIRE) == 0) return;
  // another rank has failed: its text is on its way
  for (int i = 0; i < 2000; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(1))) group_.check();
  group_.fail(FailureKind::peer_lost, "another rank's GPU gave up a call: see that rank's own error.");
}

void GpuEngine::synchronize(void* stream) {
  const OnDevice on(device_);
  auto* const at = static_cast<cudaStream_t>(stream);
  for (std::uint64_t looks = 0;; ++looks) {
    const cudaError_t state = cudaStreamQuery(at);
    if (state == cudaSuccess) break;
    if (state != cudaErrorNotReady) check(state, "a call on the GPU");
    cudaGetLastError();  // not ready counts as one
    if (looks % 1024 == 1023) group_.let_caller_in();
    if (looks > 10000) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  check();
}

void GpuEngine::watch(const std::stop_token& stop) {
  cudaSetDevice(device_);
  for (bool told = false; !stop.stop_requested();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (__atomic_load_n(&failure_->stage, __ATOMIC_ACQUIRE) == 2) {
      const unisono::Failure failure = story();
      group_.record(failure.kind, failure.text);
    }
    if (told || !group_.broken()) continue;
    auto* const header = reinterpret_cast<Header*>(bases_[static_cast<std::size_t>(group_.rank())]);
    told = cudaMemcpyAsync(&header->failed, &failure_->yes, sizeof header->failed, cudaMemcpyDefault,
                           tell_) == cudaSuccess;
  }
}

std::string GpuEngine::who_has_waited() const {
  const Failure& f = *failure_;
  const std::string rank = "rank " + std::to_string(group_.number(f.rank));
  if (f.area == 0)
    return std::string(name_of(static_cast<Collective>(f.collective % kCollectives))) + " (call " +
           std::to_string(f.call) + " of " + rank + ")";
  const std::scoped_lock lock(symmetric_->mutex);
  const auto index = static_cast<std::size_t>(f.area) - 1;
  const std::string name = index < symmetric_->areas.size() ? symmetric_->areas[index].name : std::string();
  return (name.empty() ? "a kernel on device area " + std::to_string(f.area) : name) + " (" + rank + ")";
}

unisono::Failure GpuEngine::story() const {
  if (failure_->problem == 0) return {FailureKind::timeout, story_of_wait()};
  const std::scoped_lock lock(symmetric_->mutex);
  return symmetric_->areas.at(static_cast<std::size_t>(failure_->area) - 1).explain(*failure_);
}

std::string GpuEngine::story_of_wait() const {
  const Failure& f = *failure_;
  const bool of_area = f.area != 0, named = f.peer >= 0 && f.peer < group_.size();
  return who_has_waited() + " has waited " + brief(timeout_s_) + " s on the GPU for " +
         (named ? "rank " + std::to_string(group_.number(f.peer)) : "any rank") +
         (of_area ? " (signal " + std::to_string(f.slot)
                  : std::string(" (slot ") + kSlotNames[f.slot % kSlots]) +
         ", block " + std::to_string(f.block) + (of_area ? ", count expected " : ", epoch expected ") +
         std::to_string(f.expected) + ", seen " + std::to_string(f.seen) +
         "): see what that rank is doing, " + (of_area ? "" : "compare the calls with UNISONO_CHECK=1, ") +
         "or raise UNISONO_TIMEOUT_S.";
}

std::unique_ptr<Engine> Engine::make(Group& group, const Options& options) {
  return std::make_unique<GpuEngine>(group, options);
}

}  // namespace unisono::cuda

int unisono::device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}
