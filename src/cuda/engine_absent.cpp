// Stands in for engine.cpp in a build without CUDA.
#include "cuda/engine.hpp"
#include "unisono/communicator.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

std::unique_ptr<Engine> Engine::make(Group&, const Options&) {
  throw ResourceError(
      "this build of Unisono has no CUDA lane: install it where a CUDA compiler (nvcc 12.8 or newer) is "
      "found, or leave device= out.");
}

}  // namespace unisono::cuda

int unisono::device_count() { return 0; }
