// Stands in for space.cpp in a build without CUDA.
#include "cuda/nodes.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

namespace {

[[noreturn]] void refuse() {
  throw ResourceError(
      "this build of Unisono has no CUDA lane: install it where a CUDA compiler (nvcc 12.8 or newer) is "
      "found, or leave device= out.");
}

}  // namespace

std::unique_ptr<nodes::GpuSpace> make_space(int) { refuse(); }
void combine(int, void*, const nodes::Combine&) { refuse(); }

}  // namespace unisono::cuda
