// The ways to run a call: over the memory of one machine (host_norm.cpp), by the communicator's own
// collectives (composed_norm.cpp), or on a GPU (cuda/gpu_norm.cpp).
#pragma once

#include "core/backend.hpp"
#include "fused/tail.hpp"

namespace unisono::fused {

// Calls come within a turn of the communicator (Impl::turn), alike on every rank, and have rows.
//
// Returns false if a row has no room in a piece of the lane. Nothing has been sent then, on any rank.
bool run_on_machine(Group& group, const Task& task, bool two_steps);
void run_composed(Communicator::Impl& impl, const Task& task);
// Enqueues the call on its stream. planned: by the plan.
void run_on_gpu(Communicator::Impl& impl, const Task& task, Algorithm planned);

// Loads the kernels, once for a communicator. Requires: it has a GPU.
void load_for_gpu(Communicator::Impl& impl);
// Throws UsageError for a call that is not for GPU memory.
void check_for_gpu(Communicator::Impl& impl, const Task& task);

}  // namespace unisono::fused
