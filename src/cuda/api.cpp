#include "cuda/api.hpp"

#include <string>

#include "unisono/error.hpp"

namespace unisono::cuda {
namespace {

// result: a code of the runtime or the driver. Both give the codes that are compared here the same numbers.
[[noreturn]] void refuse(std::string_view what, int result, const std::string& why,
                         const std::source_location& where) {
  std::string cure;
  if (result == cudaErrorMemoryAllocation) cure = ": see nvidia-smi for the free memory of the GPU.";
  else if (result == cudaErrorNoKernelImageForDevice)
    cure = ": build Unisono for this GPU, with CMAKE_CUDA_ARCHITECTURES=native.";
  else cure = ".";
  throw ResourceError(std::string(what) + " failed: " + why + " (" + where.function_name() + ")" + cure);
}

template <class F>
void look_up(F& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
  if (!found)
    throw ResourceError(std::string("the CUDA driver has no ") + name + ": install one of 12.0 or newer.");
  function = reinterpret_cast<F>(found);
}

}  // namespace

void check(cudaError_t result, std::string_view what, std::source_location where) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // reported here, so that the next call does not find it again
  refuse(what, result, cudaGetErrorString(result), where);
}

void check(CUresult result, std::string_view what, std::source_location where) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().error_string(result, &text);
  refuse(what, static_cast<int>(result), text ? text : "error " + std::to_string(result), where);
}

const Driver& driver() {
  static const Driver once = [] {
    Driver d{};
    look_up(d.granularity, "cuMemGetAllocationGranularity");
    look_up(d.create, "cuMemCreate");
    look_up(d.release, "cuMemRelease");
    look_up(d.reserve, "cuMemAddressReserve");
    look_up(d.free, "cuMemAddressFree");
    look_up(d.map, "cuMemMap");
    look_up(d.unmap, "cuMemUnmap");
    look_up(d.set_access, "cuMemSetAccess");
    look_up(d.export_handle, "cuMemExportToShareableHandle");
    look_up(d.import_handle, "cuMemImportFromShareableHandle");
    look_up(d.range_handle, "cuMemGetHandleForAddressRange");
    look_up(d.address_range, "cuMemGetAddressRange");
    look_up(d.write_value, "cuStreamWriteValue32");
    look_up(d.error_string, "cuGetErrorString");
    return d;
  }();
  return once;
}

cudaFuncAttributes load(const void* kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  return attributes;
}

cudaFuncAttributes load_with_shared(const void* kernel) {
  cudaFuncAttributes attributes = load(kernel);
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "asking for shared memory");
  attributes.maxDynamicSharedSizeBytes = most - static_cast<int>(attributes.sharedSizeBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             attributes.maxDynamicSharedSizeBytes),
        "asking for shared memory");
  return attributes;
}

int resident_blocks(const void* kernel, int threads) {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0), "asking for blocks");
  return blocks;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess)
    cudaGetLastError();  // the legacy stream, while another is captured: work that is enqueued there fails
  return status != cudaStreamCaptureStatusNone;
}

void write_signal(const std::uint32_t* word, std::uint32_t value, cudaStream_t stream) {
  check(
      driver().write_value(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
      "a signal");
}

}  // namespace unisono::cuda
