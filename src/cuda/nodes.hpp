// The space of a rank's GPU, for collectives across nodes; and a sum that needs no space.
#pragma once

#include <memory>

#include "core/gpu_space.hpp"

namespace unisono::cuda {

// Returns the space of a GPU. device: its CUDA ordinal.
// Throws UsageError if there is no such GPU; ResourceError if there is no GPU, or no CUDA in this build.
std::unique_ptr<nodes::GpuSpace> make_space(int device);

// Enqueues a sum, as Space::combine does, on a stream of a GPU. Throws as make_space does.
void combine(int device, void* stream, const nodes::Combine& sum);

}  // namespace unisono::cuda
