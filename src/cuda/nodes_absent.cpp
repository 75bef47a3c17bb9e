// Stands in for space.cpp in a build without CUDA.
#include "cuda/nodes.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

std::unique_ptr<nodes::GpuSpace> make_space(int) {
  throw ResourceError(
      "this build of Unisono has no CUDA lane: install it where a CUDA compiler (nvcc 12.8 or newer) is "
      "found, or leave device= out.");
}

}  // namespace unisono::cuda
