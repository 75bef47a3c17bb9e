// The communicator on the fabric lane.
#pragma once

#include <memory>

#include "unisono/communicator.hpp"

namespace unisono::fabric {

// ResourceError where this build or this machine has no libfabric.
std::unique_ptr<Communicator::Impl> make_communicator(Bootstrap& bootstrap,
                                                      const Communicator::Options& options);

// Of libfabric's settings, those that the lane rests on, where the environment has no others. libfabric reads
// them once, also one that MPI brings: to be called before either is opened.
UNISONO_API void set_library_defaults();

}  // namespace unisono::fabric
