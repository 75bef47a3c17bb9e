// Which backend carries the calls of a communicator.
#include "core/backend.hpp"
#include "cuda/backend.hpp"
#include "fabric/communicator.hpp"
#include "host/backend.hpp"

namespace unisono {

std::unique_ptr<Communicator::Impl> make_backend(const std::shared_ptr<Bootstrap>& bootstrap,
                                                 const Communicator::Options& options) {
  if (options.fabric) return fabric::make_communicator(*bootstrap, options);
  if (options.device) return std::make_unique<GpuCommunicator>(*bootstrap, options);
  return std::make_unique<LocalCommunicator>(*bootstrap, options);
}

}  // namespace unisono
