// Messages between nodes by the fabric lane: remote writes of libfabric, without an MPI.
#pragma once

#include <memory>

#include "unisono/communicator.hpp"

namespace unisono::nodes {

// Makes a communicator of all ranks on the fabric lane, whose provider and channels UNISONO_FABRIC_PROVIDER
// and UNISONO_FABRIC_CHANNELS name. Collective. Throws ResourceError where this build or machine has no
// libfabric.
std::shared_ptr<Transport> fabric_transport(Bootstrap& bootstrap, const Communicator::Options& options);

}  // namespace unisono::nodes
