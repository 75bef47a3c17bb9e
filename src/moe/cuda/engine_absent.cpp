// Stands in for engine.cpp in a build without CUDA. No communicator there has a GPU.
#include "moe/engine.hpp"
#include "unisono/error.hpp"

namespace unisono::moe {

std::unique_ptr<Engine> make_gpu_engine(Communicator::Impl&, const Dims&, bool) {
  throw UsageError(
      "this build of Unisono has no CUDA lane: use host memory, or install it where nvcc is found.");
}

}  // namespace unisono::moe
