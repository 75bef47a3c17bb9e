// The kernels of the CUDA lane: every program, for every dtype and op where it combines.
#pragma once

#include "lane/cuda/layout.hpp"
#include "plan.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

// A kernel, for cudaLaunchKernel: its one parameter is a Launch, its threads are whole warps of up to
// kMaxThreads.
using Kernel = void (*)(Launch);

// The kernel that runs a call, or null where the collective has no such algorithm (over packets:
// exchange.hpp). `dtype` and `op` are looked at where the collective combines. send and recv are halves of
// send_recv; empty has none.
Kernel kernel(Collective collective, Algorithm algorithm, DType dtype, Op op);

}  // namespace unisono::cuda
