// The communicator on the fabric lane.
#pragma once

#include <memory>

#include "unisono/communicator.hpp"

namespace unisono::fabric {

// ResourceError where this build or this machine has no libfabric.
std::unique_ptr<Communicator::Impl> make_communicator(Bootstrap& bootstrap,
                                                      const Communicator::Options& options);

}  // namespace unisono::fabric
