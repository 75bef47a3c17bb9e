// The fabric backend.
#pragma once

#include <memory>

#include "unisono/communicator.hpp"

namespace unisono::fabric {

// Makes the fabric backend. Throws ResourceError if this build or this machine has no libfabric.
std::unique_ptr<Communicator::Impl> make_communicator(Bootstrap& bootstrap,
                                                      const Communicator::Options& options);

// Sets the environment variables of libfabric that the lane relies on, except those that are set already.
// libfabric reads them once, also if MPI brings it: call this before either is opened.
UNISONO_API void set_library_defaults();

}  // namespace unisono::fabric
