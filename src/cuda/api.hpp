// Checked calls of CUDA. The driver's functions are looked up at their first use, so that the library loads
// on machines without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <source_location>
#include <string_view>

namespace unisono::cuda {

// Throws ResourceError with CUDA's text and the place, unless the call has succeeded.
void check(cudaError_t result, std::string_view what,
           std::source_location where = std::source_location::current());
void check(CUresult result, std::string_view what,
           std::source_location where = std::source_location::current());

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemGetHandleForAddressRange) range_handle;
  decltype(&cuMemGetAddressRange) address_range;
  decltype(&cuStreamWriteValue32) write_value;
  decltype(&cuGetErrorString) error_string;
};
const Driver& driver();

// Loads a kernel, and returns what it is: one that is loaded at its first launch may wait for a kernel that
// waits for this rank.
cudaFuncAttributes load(const void* kernel);
// Also lets a launch ask for as much shared memory as there is. A limit is the kernel's, of all
// communicators: it is never that of one.
cudaFuncAttributes load_with_shared(const void* kernel);
// Returns how many blocks of so many threads an SM runs at once.
int resident_blocks(const void* kernel, int threads);

// Returns whether a graph is captured from the stream.
bool is_capturing(cudaStream_t stream);

// Sets a word, of this GPU or a peer, when all before it on the stream is complete. The driver does so,
// without a kernel: a kernel would wait for SMs that others have.
void write_signal(const std::uint32_t* word, std::uint32_t value, cudaStream_t stream);

// Makes `device` the thread's current GPU for its own lifetime.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace unisono::cuda
