#include "cuda/space.hpp"

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/wire.hpp"
#include "cuda/nodes.hpp"
#include "unisono/communicator.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {
namespace {

constexpr std::size_t kLeast = std::size_t{1}
                               << 16;         // bytes of scratch: small calls do not grow it each time
constexpr std::size_t kWord = sizeof(uint4);  // bytes of a thread's widest load
constexpr std::size_t kBlocksOfSm = 8;        // of kSumThreads threads: as many as an SM holds

// Sets what this thread may do during a capture, for its own lifetime.
class CaptureMode {
 public:
  explicit CaptureMode(cudaStreamCaptureMode mode) : before_(mode) {
    check(cudaThreadExchangeStreamCaptureMode(&before_), "setting what a thread may do during a capture");
  }
  ~CaptureMode() { cudaThreadExchangeStreamCaptureMode(&before_); }
  CaptureMode(const CaptureMode&) = delete;

 private:
  cudaStreamCaptureMode before_;
};

// The state of a thread that works beside the calls.
struct Beside {
  explicit Beside(int device) : on(device), mode(cudaStreamCaptureModeThreadLocal) {}
  OnDevice on;
  CaptureMode mode;
};

// Returns the most blocks of a kernel.
std::size_t most_blocks_of(int device) {
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "asking the GPU for its size");
  return static_cast<std::size_t>(sms) * kBlocksOfSm;
}

// Returns the bitwise or of all addresses that a kernel loads from or stores to.
template <class... More>
std::uintptr_t bits_of(std::span<const byte* const> sources, const More*... more) {
  std::uintptr_t all = (reinterpret_cast<std::uintptr_t>(more) | ... | 0);
  for (const byte* source : sources) all |= reinterpret_cast<std::uintptr_t>(source);
  return all;
}

void require_aligned(std::uintptr_t bits, std::size_t to, std::string_view what) {
  if (bits % to != 0)
    throw UsageError(std::string(what) + " on a GPU begins at an address that is no multiple of " +
                     std::to_string(to) + " bytes: pass one that does.");
}

}  // namespace

// Events that no mark uses, for reuse.
class CudaSpace::Events {
 public:
  ~Events() {
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  cudaEvent_t take() {
    {
      const std::scoped_lock lock(mutex_);
      if (!free_.empty()) {
        cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
  }
  void give(cudaEvent_t event) {
    const std::scoped_lock lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

class CudaSpace::EventMark final : public GpuSpace::Mark {
 public:
  EventMark(std::shared_ptr<Events> events, cudaStream_t stream)
      : events_(std::move(events)), event_(events_->take()) {
    if (const cudaError_t result = cudaEventRecord(event_, stream); result != cudaSuccess) {
      events_->give(event_);
      check(result, "marking a point of a stream");
    }
  }
  ~EventMark() override { events_->give(event_); }
  EventMark(const EventMark&) = delete;
  bool reached() const override {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) cudaGetLastError();  // so that the process's next look does not find it
    else check(state, "a call on the GPU");
    return state == cudaSuccess;
  }

 private:
  std::shared_ptr<Events> events_;
  cudaEvent_t event_;
};

CudaSpace::CudaSpace(int device) : device_(device), events_(std::make_shared<Events>()) {
  const OnDevice on(device_);
  most_blocks_ = most_blocks_of(device_);
  load_kernels();
  check(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "making an event");
}

CudaSpace::~CudaSpace() {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) return;  // CUDA is gone
  for (const auto& [key, kept] : kept_) cudaFree(kept.data);
  for (byte* data : replaced_) cudaFree(data);
  cudaEventDestroy(last_);
  cudaSetDevice(before);
}

void CudaSpace::load_kernels() const {
  auto load = [](const void* kernel) {
    if (kernel) cuda::load(kernel);
  };
  for (const bool many : {false, true}) {
    for (int d = 0; d < kDTypes; ++d) {
      const auto dtype = static_cast<DType>(d);
      for (int op = 0; op < kOps; ++op) load(combine_kernel(dtype, static_cast<Op>(op), many));
      for (int as = 0; as < kWires; ++as) load(requantise_kernel(dtype, static_cast<Wire>(as), many));
    }
  }
}

void CudaSpace::begin(void* stream) {
  on_.emplace(device_);
  stream_ = static_cast<cudaStream_t>(stream);
  capturing_ = is_capturing(stream_);
  ever_captured_ |= capturing_;
  if (!ended_one_ || capturing_) return;
  if (const cudaError_t result = cudaStreamWaitEvent(stream_, last_, 0); result != cudaSuccess) {
    on_.reset();  // no call has begun
    check(result, "ordering a call behind the one before");
  }
}

void CudaSpace::end() noexcept {
  if (!on_) return;
  if (!capturing_) {
    if (cudaEventRecord(last_, stream_) == cudaSuccess) ended_one_ = true;
    else cudaGetLastError();  // the next call reports what broke the stream
  }
  capturing_ = false;
  stream_ = nullptr;
  on_.reset();
}

std::unique_ptr<nodes::GpuSpace::Mark> CudaSpace::mark() {
  return std::make_unique<EventMark>(events_, stream_);
}

bool CudaSpace::idle(void* stream) const {
  const OnDevice on(device_);
  const cudaError_t state = cudaStreamQuery(static_cast<cudaStream_t>(stream));
  if (state == cudaErrorNotReady) cudaGetLastError();
  else check(state, "a call on the GPU");
  return state == cudaSuccess;
}

std::shared_ptr<void> CudaSpace::enter_thread() const { return std::make_shared<Beside>(device_); }

// Returns new memory. What a capture allocates by the stream is the graph's, and gone between its launches.
byte* CudaSpace::allocate(std::size_t bytes) const {
  const CaptureMode relaxed(cudaStreamCaptureModeRelaxed);
  void* made = nullptr;
  const std::string what =
      "an allocation of " + std::to_string(bytes) + " bytes of scratch on GPU " + std::to_string(device_);
  if (capturing_) check(cudaMalloc(&made, bytes), what);
  else check(cudaMallocAsync(&made, bytes, stream_), what);
  return static_cast<byte*>(made);
}

byte* CudaSpace::scratch(nodes::Scratch purpose, int slot, std::size_t bytes) {
  Kept& kept = kept_[{purpose, slot}];
  if (kept.bytes >= bytes && kept.data) return kept.data;
  const Kept before = std::exchange(kept, {});
  if (before.data && ever_captured_) replaced_.push_back(before.data);
  else if (before.data) check(cudaFreeAsync(before.data, stream_), "freeing scratch");
  const std::size_t size = std::max(bytes, kLeast);
  kept = {allocate(size), size};
  return kept.data;
}

void CudaSpace::copy(byte* to, const byte* from, std::size_t bytes) {
  if (to != from && bytes > 0)
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "copying on the GPU");
}

namespace {

// Returns whether there are more sources than fit into the shorter list.
bool are_many(std::span<const byte* const> sources) {
  if (sources.size() > kManySources)
    throw UsageError("a sum on a GPU takes up to " + std::to_string(kManySources) + " ranks, not " +
                     std::to_string(sources.size()) + ": use algorithm=chain, or fewer ranks.");
  return sources.size() > kFewSources;
}

// Starts a kernel whose threads have `units` units of work. task: its first parameter.
void start(const void* kernel, void* task, std::span<const byte* const> sources, std::size_t units,
           std::size_t most_blocks, cudaStream_t stream) {
  Sources<kFewSources> few;
  Sources<kManySources> many;
  const bool is_few = sources.size() <= kFewSources;
  std::copy(sources.begin(), sources.end(), is_few ? few.at : many.at);
  void* parameters[] = {task, is_few ? static_cast<void*>(&few) : static_cast<void*>(&many)};
  const std::size_t blocks = std::min((units + kSumThreads - 1) / kSumThreads, most_blocks);
  check(
      cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kSumThreads), parameters, 0, stream),
      "starting a sum");
}

void start_combine(const nodes::Combine& sum, std::size_t most_blocks, cudaStream_t stream) {
  if (sum.count == 0) return;
  const bool many = are_many(sum.sources);
  const std::uintptr_t bits = bits_of(sum.sources, sum.out, sum.prior);
  const std::size_t size = size_of(sum.dtype);
  require_aligned(bits, size, std::string("an array of ") + std::string(name_of(sum.dtype)));
  CombineTask task{sum.out,   sum.prior,        sum.count, static_cast<int>(sum.sources.size()),
                   sum.ranks, bits % kWord == 0};
  const std::size_t unit = task.packs ? kWord / size : 1;
  start(combine_kernel(sum.dtype, sum.op, many), &task, sum.sources, (sum.count + unit - 1) / unit,
        most_blocks, stream);
}

}  // namespace

void CudaSpace::combine(const nodes::Combine& sum) { start_combine(sum, most_blocks_, stream_); }

void combine(int device, void* stream, const nodes::Combine& sum) {
  const OnDevice on(device);
  start_combine(sum, most_blocks_of(device), static_cast<cudaStream_t>(stream));
}

void CudaSpace::requantise(const nodes::Requantise& sum) {
  if (sum.count == 0) return;
  const void* kernel = requantise_kernel(sum.dtype, sum.wire, are_many(sum.sources));
  if (!kernel)
    throw UsageError("elements of " + std::string(name_of(sum.dtype)) +
                     " have no quantised sum: leave wire= out.");
  std::uintptr_t elements = 0, pieces = 0;
  (sum.from_elements ? elements : pieces) |= bits_of(sum.sources);
  (sum.to_elements ? elements : pieces) |= reinterpret_cast<std::uintptr_t>(sum.out);
  require_aligned(elements, size_of(sum.dtype),
                  std::string("an array of ") + std::string(name_of(sum.dtype)));
  require_aligned(pieces, kWord, "a quantised piece");
  RequantiseTask task{sum.out,
                      sum.count,
                      static_cast<int>(sum.sources.size()),
                      sum.op == Op::avg,
                      sum.from_elements,
                      sum.to_elements,
                      elements % kWord == 0};
  start(kernel, &task, sum.sources, 2 * wire::blocks_of(sum.count), most_blocks_, stream_);
}

std::unique_ptr<nodes::GpuSpace> make_space(int device) {
  const int count = device_count();
  if (count == 0)
    throw ResourceError("CUDA sees no GPU here: see what nvidia-smi says, or leave device= out.");
  if (device < 0 || device >= count)
    throw UsageError("device " + std::to_string(device) + " is not among the " + std::to_string(count) +
                     " GPUs that this process sees: give another, or check CUDA_VISIBLE_DEVICES.");
  return std::make_unique<CudaSpace>(device);
}

}  // namespace unisono::cuda
