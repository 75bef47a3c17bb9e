// The ways to run a call: over the memory of one machine (host_norm.cpp), by the communicator's own
// collectives (composed_norm.cpp), or so on a GPU (cuda/composed_norm.cpp).
#pragma once

#include "core/backend.hpp"
#include "fused/tail.hpp"

namespace unisono::fused {

// Calls come within a turn of the communicator (Impl::turn), alike on every rank, and have rows.
//
// Returns false if a row has no room in a piece of the lane. Nothing has been sent then, on any rank.
bool run_on_machine(Group& group, const Task& task);
void run_composed(Communicator::Impl& impl, const Task& task);
// Enqueues the call on its stream.
void run_on_gpu(Communicator::Impl& impl, const Task& task);

// Throws UsageError for a call that is not for GPU memory.
void check_for_gpu(const Task& task);

}  // namespace unisono::fused
