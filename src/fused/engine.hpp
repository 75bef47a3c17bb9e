// The ways to run a call: over the memory of one machine, by chunks (host_norm.cpp) or from array to array
// (direct_norm.cpp), by the communicator's own collectives (composed_norm.cpp), or on a GPU
// (cuda/gpu_norm.cpp).
#pragma once

#include "core/backend.hpp"
#include "fused/tail.hpp"
#include "host/host_thread.hpp"

namespace unisono::fused {

// Calls come within a turn of the communicator (Impl::turn), alike on every rank, and have rows.
//
// Returns the plan's algorithm of a call on memory that is not symmetric.
Algorithm by_plan(Communicator::Impl& impl, const Task& task);
// Takes the way that the call or the plan names.
void run_on_machine(LocalCommunicator& machine, const Task& task);
// args: its inputs are the x of all ranks, its outputs their residual_out; with a sharded residual their out.
// Requires: no quantisation.
void run_direct(HostThread& lane, const Task& task, const Args& args);
void run_composed(Communicator::Impl& impl, const Task& task);
// Enqueues the call on its stream. planned: by the plan.
void run_on_gpu(Communicator::Impl& impl, const Task& task, Algorithm planned);

// Loads the kernels, once for a communicator. Requires: it has a GPU.
void load_for_gpu(Communicator::Impl& impl);
// Throws UsageError for a call that is not for GPU memory.
void check_for_gpu(Communicator::Impl& impl, const Task& task);

}  // namespace unisono::fused
