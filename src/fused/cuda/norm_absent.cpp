// Stands in for gpu_norm.cpp in a build without CUDA. No communicator there has a GPU.
#include "fused/engine.hpp"
#include "unisono/error.hpp"

namespace unisono::fused {

void check_for_gpu(Communicator::Impl&, const Task&) {
  throw UsageError(
      "this build of Unisono has no CUDA lane: use host memory, or install it where nvcc is found.");
}
void run_on_gpu(Communicator::Impl&, const Task&, Algorithm) {}
void load_for_gpu(Communicator::Impl&) {}

}  // namespace unisono::fused
