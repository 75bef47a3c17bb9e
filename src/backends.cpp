// Chooses the backend of a communicator.
#include "base/env.hpp"
#include "core/backend.hpp"
#include "cuda/backend.hpp"
#include "fabric/communicator.hpp"
#include "fused/engine.hpp"
#include "host/backend.hpp"
#include "nodes/backend.hpp"

namespace unisono {

std::unique_ptr<Communicator::Impl> make_machine_backend(Bootstrap& bootstrap,
                                                         const Communicator::Options& options,
                                                         const std::vector<int>& numbers) {
  if (options.device) {
    auto made = std::make_unique<GpuCommunicator>(bootstrap, options, numbers);
    fused::load_for_gpu(*made);
    return made;
  }
  return std::make_unique<LocalCommunicator>(bootstrap, options, numbers);
}

std::unique_ptr<Communicator::Impl> make_backend(const std::shared_ptr<Bootstrap>& bootstrap,
                                                 const Communicator::Options& options) {
  if (options.fabric) return fabric::make_communicator(*bootstrap, options);
  nodes::Topology place = nodes::meet(*bootstrap, options.node, options.check.value_or(env().check));
  if (place.count() == 1) return make_machine_backend(*bootstrap, options, {});
  return std::make_unique<nodes::NodesCommunicator>(*bootstrap, std::move(place), options);
}

}  // namespace unisono
