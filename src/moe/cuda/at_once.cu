#include "moe/cuda/at_once.hpp"

#include <cuda_runtime.h>

#include "cuda/api.hpp"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/routes.cuh"
#include "moe/cuda/rows.cuh"

namespace unisono::moe::gpu {
namespace {

AtOnce kernel_of(const Dims& dims, const Space& space) {
  return dims.expert_major() ? at_once_by_expert(dims, space) : at_once_by_rank(dims, space);
}

}  // namespace

std::size_t at_once_shared_bytes(const Dims& dims, const Space& space) {
  return kernel_of(dims, space).shared_bytes + kWarps * sizeof(Targets) + 2048;
}

void load_at_once(const Dims& dims, const Space& space) {
  cuda::load_with_shared(kernel_of(dims, space).kernel);
}

cudaError_t dispatch_at_once(const Work& work, const Dispatch& dispatch, int blocks, cudaStream_t stream) {
  const AtOnce of = kernel_of(work.dims, work.space);
  const auto all = static_cast<unsigned>(blocks);
  Shares shares(work.dims);
  constexpr unsigned kStep = 512;  // bytes of a row that a warp takes at once
  Segments share =
      Segments::even(work.tokens, (work.dims.expert_major() ? all : senders_by_rank(all)) * kWarps,
                     static_cast<unsigned>(work.dims.row_bytes + kStep - 1) / kStep);
  void* parameters[] = {const_cast<Work*>(&work), const_cast<Dispatch*>(&dispatch), &shares, &share};
  return cudaLaunchKernel(of.kernel, dim3(all), dim3(kThreads), parameters, of.shared_bytes, stream);
}

}  // namespace unisono::moe::gpu
