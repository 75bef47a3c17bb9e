#include "cuda/memory.hpp"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "cuda/api.hpp"
#include "lane/lane.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

using cuda::check;
using cuda::driver;

constexpr std::size_t kHostPage = 4096;  // bytes; whole pages are pinned

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

// Returns a copy of another process's descriptor. Requires the right to inspect that process, as a debugger.
int descriptor_of(int pid, int fd) {
  const int process = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  const int copy = process < 0 ? -1 : static_cast<int>(::syscall(SYS_pidfd_getfd, process, fd, 0));
  const int error = errno;
  if (process >= 0) ::close(process);
  if (copy < 0)
    throw ResourceError("the GPU memory of process " + std::to_string(pid) + " cannot be shared (" +
                        std::strerror(error) +
                        "): run the ranks as one user, or set UNISONO_CUDA_MEMORY=ipc.");
  return copy;
}

// Lets the GPUs of this process reach what cudaMalloc gives on `device`.
void open_to(const std::vector<int>& devices, int device) {
  for (const int one : devices) {
    if (one == device) continue;
    const cuda::OnDevice there(one);
    if (const cudaError_t result = cudaDeviceEnablePeerAccess(device, 0);
        result != cudaErrorPeerAccessAlreadyEnabled)
      check(result, "letting the GPUs reach each other's memory");
    else cudaGetLastError();
  }
}

// Returns the begin and the length of the allocation that holds `at`.
std::pair<std::byte*, std::size_t> allocation_of(const std::byte* at, int device) {
  const cuda::OnDevice on(device);
  // the driver asks for a current context: a call of the runtime makes the device's this thread's
  check(cudaFree(nullptr), "cudaFree");
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  check(driver().address_range(&begin, &bytes, reinterpret_cast<CUdeviceptr>(at)),
        "asking CUDA for the allocation that memory lies in");
  return {reinterpret_cast<std::byte*>(begin), bytes};
}

}  // namespace

// The memory that this process has made. Ranks that are its threads use it directly, and keep it alive.
class DeviceMemory::Own {
 public:
  void add(const std::shared_ptr<DeviceMemory>& one) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
    by_address_[reinterpret_cast<std::uint64_t>(one->data_)] = one;
  }
  std::shared_ptr<DeviceMemory> find(std::uint64_t address) {
    const std::scoped_lock lock(mutex_);
    const auto found = by_address_.find(address);
    auto one = found == by_address_.end() ? nullptr : found->second.lock();
    if (!one) throw ResourceError("a rank of this process has given back the GPU memory that it shares.");
    return one;
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<DeviceMemory>> by_address_;
};

DeviceMemory::Own& DeviceMemory::own() {
  static Own memory;
  return memory;
}

void DeviceMemory::map(int device, const std::vector<int>& devices) {
  CUdeviceptr at = 0;
  check(driver().reserve(&at, mapped_, 0, 0, 0), "reserving addresses for GPU memory");
  data_ = reinterpret_cast<std::byte*>(at);
  check(driver().map(at, mapped_, 0, allocation_, 0), "mapping GPU memory");
  std::vector<CUmemAccessDesc> access;
  auto allow = [&](int one) {
    CUmemAccessDesc description{};
    description.location = {CU_MEM_LOCATION_TYPE_DEVICE, one};
    description.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access.push_back(description);
  };
  allow(device);
  for (const int one : devices)
    if (one != device) allow(one);
  check(driver().set_access(at, mapped_, access.data(), access.size()),
        "letting the GPUs reach each other's memory (UNISONO_PEER_ACCESS=0 does without)");
}

// Pins the segment. Threads of a process share the segment, and its owner's pinning.
void DeviceMemory::pin() {
  if (!other_thread_)
    check(cudaHostRegister(segment_->data(), segment_->bytes(),
                           cudaHostRegisterPortable | cudaHostRegisterMapped),
          "pinning shared memory");
  data_ = segment_->data();
  void* at = nullptr;
  check(cudaHostGetDevicePointer(&at, segment_->data(), 0), "mapping pinned memory");
  data_ = static_cast<std::byte*>(at);
}

std::shared_ptr<DeviceMemory> DeviceMemory::create(std::size_t bytes, int device,
                                                   const std::vector<int>& devices, Kind kind) {
  const cuda::OnDevice on(device);
  std::shared_ptr<DeviceMemory> made(new DeviceMemory);
  made->kind_ = kind;
  made->device_ = device;
  made->bytes_ = bytes;
  const std::string what =
      "an allocation of " + std::to_string(bytes) + " bytes on GPU " + std::to_string(device);
  if (kind == Kind::host) {
    made->segment_ = Segment::create(round_up(bytes, kHostPage));
    made->pin();
    return made;
  }
  if (kind == Kind::vmm) {
    check(cudaFree(nullptr), "starting CUDA");  // makes the device's context
    const CUmemAllocationProp asked = properties(device);
    std::size_t granularity = 0;
    check(driver().granularity(&granularity, &asked, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), what);
    made->mapped_ = round_up(bytes, granularity);
    check(driver().create(reinterpret_cast<CUmemGenericAllocationHandle*>(&made->allocation_), made->mapped_,
                          &asked, 0),
          what);
    made->map(device, devices);
    // other processes copy the descriptor as a debugger would: this permits it to a rank's siblings
    ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    check(driver().export_handle(&made->fd_, made->allocation_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "sharing GPU memory");
  } else {
    void* at = nullptr;
    made->mapped_ = round_up(bytes, std::size_t{2} << 20);  // pages of its own: a handle shares whole ones
    check(cudaMalloc(&at, made->mapped_), what);
    made->data_ = static_cast<std::byte*>(at);
    if (kind != Kind::local) open_to(devices, device);
  }
  check(cudaMemset(made->data_, 0, made->mapped_), "clearing GPU memory");
  check(cudaDeviceSynchronize(), "clearing GPU memory");
  own().add(made);
  return made;
}

std::shared_ptr<DeviceMemory> DeviceMemory::lend(std::byte* at, std::size_t bytes, int device,
                                                 const std::vector<int>& devices,
                                                 std::shared_ptr<const void> owner) {
  const cuda::OnDevice on(device);
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, at), "asking CUDA where memory lies");
  if (found.type == cudaMemoryTypeManaged)
    throw UsageError("it is managed memory, which peers cannot map: use memory of cudaMalloc.");
  if (found.type != cudaMemoryTypeDevice)
    throw UsageError("it is not a GPU's memory: register it as memory of the host.");
  if (found.device != device)
    throw UsageError("it lies on GPU " + std::to_string(found.device) + ", but this rank's is " +
                     std::to_string(device) + ": use memory of that one.");
  std::byte* begin = nullptr;
  std::string problem;
  try {
    const auto allocation = allocation_of(at, device);
    begin = allocation.first;
    const auto before = static_cast<std::size_t>(at - begin);
    if (before > allocation.second || bytes > allocation.second - before)
      problem = "it lies in several allocations";
    cudaIpcMemHandle_t ipc{};
    check(cudaIpcGetMemHandle(&ipc, begin), "sharing GPU memory");
  } catch (const ResourceError& error) { problem = error.what(); }
  if (!problem.empty())
    throw ResourceError(
        "CUDA does not share it with other processes, as it does not share memory of pools, of virtual "
        "memory "
        "management, or of torch's expandable segments: use memory of cudaMalloc, or Communicator::empty (" +
        problem + ").");
  std::shared_ptr<DeviceMemory> made(new DeviceMemory);
  made->kind_ = Kind::lent;
  made->device_ = device;
  made->bytes_ = bytes;
  made->owner_ = std::move(owner);
  made->data_ = at;
  made->allocation_begin_ = begin;
  open_to(devices, device);
  own().add(made);
  return made;
}

// The driver counts the handles of an allocation that this process opens, and maps it once.
void DeviceMemory::map_lent(const Handle& handle) {
  const auto [begin, length] = allocation_of(allocation_begin_, device_);
  if (begin != allocation_begin_ || handle.offset > length || bytes_ > length - handle.offset)
    throw ResourceError(
        "a peer announces GPU memory outside of the allocation that it shares: start every rank with the "
        "same version of Unisono.");
  data_ = begin + handle.offset;
}

std::shared_ptr<DeviceMemory> DeviceMemory::open(const Handle& handle, std::size_t bytes, int device,
                                                 Kind kind) {
  if (handle.bytes != bytes)
    throw ResourceError("a peer shares " + std::to_string(handle.bytes) + " bytes of GPU memory instead of " +
                        std::to_string(bytes) + ": start every rank with the same version of Unisono.");
  const cuda::OnDevice on(device);
  std::shared_ptr<DeviceMemory> made(new DeviceMemory);
  made->kind_ = kind;
  made->device_ = device;
  made->bytes_ = bytes;
  made->mine_ = false;
  made->other_thread_ = handle.pid == ::getpid();
  if (kind == Kind::host) {
    made->segment_ = Segment::open(handle.segment, round_up(bytes, kHostPage));
    made->pin();
  } else if (made->other_thread_) {
    const auto theirs = own().find(handle.address);
    made->data_ = theirs->data_;
    made->owner_ = theirs;
  } else if (kind == Kind::vmm) {
    check(cudaFree(nullptr), "starting CUDA");
    const int fd = descriptor_of(handle.pid, handle.fd);
    const CUresult imported = driver().import_handle(
        reinterpret_cast<CUmemGenericAllocationHandle*>(&made->allocation_),
        reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    ::close(fd);
    check(imported, "taking up a peer's GPU memory");
    const CUmemAllocationProp asked = properties(device);
    std::size_t granularity = 0;
    check(driver().granularity(&granularity, &asked, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "sharing GPU memory");
    made->mapped_ = round_up(bytes, granularity);
    made->map(device, {});
  } else {
    cudaIpcMemHandle_t ipc;
    static_assert(sizeof ipc == sizeof handle.ipc);
    std::memcpy(&ipc, handle.ipc, sizeof ipc);
    void* at = nullptr;
    check(cudaIpcOpenMemHandle(&at, ipc, cudaIpcMemLazyEnablePeerAccess), "taking up a peer's GPU memory");
    made->data_ = static_cast<std::byte*>(at);
    made->allocation_begin_ = made->data_;
    if (kind == Kind::lent) made->map_lent(handle);
  }
  return made;
}

DeviceMemory::Handle DeviceMemory::handle() const {
  Handle handle;
  handle.pid = ::getpid();
  handle.fd = fd_;
  handle.address = reinterpret_cast<std::uint64_t>(data_);
  handle.bytes = bytes_;
  if (segment_) handle.segment = segment_->handle();
  if (kind_ == Kind::ipc || kind_ == Kind::lent) {
    const cuda::OnDevice on(device_);
    cudaIpcMemHandle_t ipc;
    std::byte* const begin = kind_ == Kind::lent ? allocation_begin_ : data_;
    check(cudaIpcGetMemHandle(&ipc, begin), "sharing GPU memory");
    handle.offset = static_cast<std::uint64_t>(data_ - begin);
    std::memcpy(handle.ipc, &ipc, sizeof ipc);
  }
  return handle;
}

// NOLINTNEXTLINE(bugprone-exception-escape): where there is an allocation, the driver was found already
DeviceMemory::~DeviceMemory() {
  if (fd_ >= 0) ::close(fd_);
  if (other_thread_ || (kind_ == Kind::lent && mine_)) return;
  if (!data_) {
    if (allocation_) driver().release(allocation_);  // mapping has failed
    return;
  }
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) return;  // CUDA is gone
  if (kind_ == Kind::host) {
    cudaDeviceSynchronize();
    cudaHostUnregister(segment_->data());
  } else if (kind_ != Kind::vmm) {
    if (mine_) cudaFree(data_);
    else cudaIpcCloseMemHandle(allocation_begin_);
  } else {
    cudaDeviceSynchronize();
    const auto at = reinterpret_cast<CUdeviceptr>(data_);
    driver().unmap(at, mapped_);
    driver().release(allocation_);
    driver().free(at, mapped_);
  }
  cudaSetDevice(before);
}

}  // namespace unisono
