// The space of a rank's GPU, for collectives across nodes.
#pragma once

#include <memory>

#include "core/gpu_space.hpp"

namespace unisono::cuda {

// Returns the space of a GPU. device: its CUDA ordinal.
// Throws UsageError if there is no such GPU; ResourceError if there is no GPU, or no CUDA in this build.
std::unique_ptr<nodes::GpuSpace> make_space(int device);

}  // namespace unisono::cuda
