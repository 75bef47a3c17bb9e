// The kernels of the CUDA lane: every program, for every dtype and op if it combines.
#pragma once

#include "core/plan.hpp"
#include "cuda/layout.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

// Kernels for cudaLaunchKernel. The one parameter is a Launch; of `many`, for more than kFewRanks ranks, a
// LaunchOf<kMaxRanks>. A block: whole warps, to kMaxThreads.

// Returns the kernel that runs a call, or null if the collective has no such algorithm on so many ranks.
// Algorithms over packets are in exchange.hpp. dtype and op matter only if the collective combines. send and
// recv are halves of send_recv; empty has no kernel.
const void* kernel(Collective collective, Algorithm algorithm, DType dtype, Op op, bool many);

// Returns the kernel of an all_reduce that quantises, or null if the dtype has none. A piece of its rounds is
// in the wire form.
const void* quantised_kernel(DType dtype, Wire wire, bool many);

}  // namespace unisono::cuda
