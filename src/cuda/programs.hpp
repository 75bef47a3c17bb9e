// The kernels of the CUDA lane: every program, for every dtype and op if it combines.
#pragma once

#include "core/plan.hpp"
#include "cuda/layout.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

// A kernel for cudaLaunchKernel, with a Launch as its one parameter. A block: whole warps, to kMaxThreads.
using Kernel = void (*)(Launch);

// Returns the kernel that runs a call, or null if the collective has no such algorithm. Algorithms over
// packets are in exchange.hpp. dtype and op matter only if the collective combines. send and recv are halves
// of send_recv; empty has no kernel.
Kernel kernel(Collective collective, Algorithm algorithm, DType dtype, Op op);

// Returns the kernel of an all_reduce that quantises, or null if the dtype has none. A piece of its rounds is
// in the wire form.
Kernel quantised_kernel(DType dtype, Wire wire);

}  // namespace unisono::cuda
