// The kernels of the CUDA lane: every program, for every dtype and op where it combines.
#pragma once

#include "core/plan.hpp"
#include "cuda/layout.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

// A kernel, for cudaLaunchKernel: its one parameter is a Launch, its threads are whole warps of up to
// kMaxThreads.
using Kernel = void (*)(Launch);

// The kernel that runs a call, or null where the collective has no such algorithm (over packets:
// exchange.hpp). `dtype` and `op` are looked at where the collective combines. send and recv are halves of
// send_recv; empty has none.
Kernel kernel(Collective collective, Algorithm algorithm, DType dtype, Op op);

// The kernel of an all_reduce that quantises, or null where the dtype has none. A piece of its rounds is in
// the wire form.
Kernel quantised_kernel(DType dtype, Wire wire);

}  // namespace unisono::cuda
