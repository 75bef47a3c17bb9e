#include "cuda/nic.hpp"

#include <cstring>
#include <string>

#include "cuda/api.hpp"
#include "cuda/memory.hpp"
#include "lane/lane.hpp"
#include "unisono/communicator.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {
namespace {

class Gpu final : public NicGpu {
 public:
  explicit Gpu(int device) : device_(device) {
    const OnDevice on(device_);
    auto told = [&](cudaDeviceAttr attribute) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, attribute, device_), "asking the GPU how NICs may write to it");
      return value;
    };
    flushes_ = told(cudaDevAttrGPUDirectRDMASupported) != 0 &&
               told(cudaDevAttrGPUDirectRDMAWritesOrdering) < cudaGPUDirectRDMAWritesOrderingOwner;
  }

  std::shared_ptr<std::byte> memory(std::size_t bytes) const override {
    const auto made = DeviceMemory::create(bytes, device_, {}, DeviceMemory::Kind::local);
    return {made, made->data()};
  }

  std::shared_ptr<std::byte> pinned(std::size_t bytes) const override {
    const OnDevice on(device_);
    void* at = nullptr;
    check(cudaHostAlloc(&at, bytes, cudaHostAllocPortable),
          "pinning " + std::to_string(bytes) + " bytes of host memory");
    std::memset(at, 0, bytes);
    return {static_cast<std::byte*>(at), cudaFreeHost};
  }

  Dmabuf dmabuf(const std::byte* at, std::size_t bytes) const override {
    const OnDevice on(device_);
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<CUdeviceptr>(at);
    const CUdeviceptr begin = address / page * page;
    int descriptor = -1;
    if (driver().range_handle(&descriptor, begin, round_up(address + bytes - begin, page),
                              CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) != CUDA_SUCCESS)
      return {};
    return {descriptor, reinterpret_cast<std::byte*>(begin)};
  }

  std::shared_ptr<void> current() const override { return std::make_shared<OnDevice>(device_); }

  bool idle(void* stream) const override {
    const OnDevice on(device_);
    auto* const asked = static_cast<cudaStream_t>(stream);
    if (is_capturing(asked))
      throw UsageError(
          "a call of the fabric lane waits for its NICs and cannot be captured in a CUDA graph: call it "
          "outside.");
    const cudaError_t state = cudaStreamQuery(asked);
    if (state == cudaErrorNotReady) cudaGetLastError();  // so that the process's next look does not find it
    else check(state, "work on the GPU before a call of the fabric lane");
    return state == cudaSuccess;
  }

  void copy(const std::byte* from, std::byte* to, std::size_t bytes, void* stream) const override {
    const OnDevice on(device_);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
          "copying a rank's own block");
  }

  void take_in() const override {
    if (!flushes_) return;
    const OnDevice on(device_);
    check(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                             cudaFlushGPUDirectRDMAWritesToOwner),
          "ordering what NICs have written to the GPU");
  }

 private:
  int device_;
  bool flushes_ = false;  // whether the GPU itself leaves NICs' writes and its next reads unordered
};

}  // namespace

std::unique_ptr<NicGpu> NicGpu::make(std::optional<int> device) {
  const int count = device_count();
  if (count == 0)
    throw ResourceError(
        "CUDA sees no GPU here, which pinned and GPU memory need: see nvidia-smi, or leave device= and "
        "pinned= out.");
  int chosen = 0;
  if (!device) check(cudaGetDevice(&chosen), "cudaGetDevice");
  else chosen = *device;
  if (chosen < 0 || chosen >= count)
    throw UsageError("device " + std::to_string(chosen) + " is not among the " + std::to_string(count) +
                     " GPUs that this process sees: give another, or check CUDA_VISIBLE_DEVICES.");
  return std::make_unique<Gpu>(chosen);
}

}  // namespace unisono::cuda
