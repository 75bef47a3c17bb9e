// Replaces the fabric backend in a build without libfabric.
#include "core/backend.hpp"
#include "fabric/communicator.hpp"
#include "fabric/records.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

[[noreturn]] void absent() {
  throw ResourceError(
      "this build of Unisono has no fabric lane: install libfabric's headers (Debian: libfabric-dev) and "
      "build it again.");
}

}  // namespace

std::unique_ptr<Communicator::Impl> fabric::make_communicator(Bootstrap&, const Communicator::Options&) {
  absent();
}
std::unique_ptr<fabric::Records> fabric::make_records(Bootstrap&, double) { absent(); }
void fabric::set_library_defaults() {}
std::vector<FabricProvider> fabric_providers() { absent(); }
FabricProvider fabric_provider(const std::string&) { absent(); }
std::string fabric_version() { absent(); }

}  // namespace unisono
