// Stands in for nic.cpp in a build without CUDA.
#include "cuda/nic.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

std::unique_ptr<NicGpu> NicGpu::make(std::optional<int>) {
  throw ResourceError(
      "this build of Unisono has no CUDA lane, which pinned and GPU memory need: install it where a CUDA "
      "compiler (nvcc 12.8 or newer) is found, or leave device= and pinned= out.");
}

}  // namespace unisono::cuda
