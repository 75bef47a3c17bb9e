// The settings of a rank on the fabric lane: the caller's, else the environment's, else those of the NICs.
#pragma once

#include "fabric/endpoint.hpp"
#include "unisono/communicator.hpp"

namespace unisono::fabric {

// device: the provider is for GPU memory. Throws UsageError for what the provider does not give.
FabricEndpoint::Settings settings_of(const Communicator::Fabric& asked, int ranks, bool device,
                                     double timeout_s);

}  // namespace unisono::fabric
