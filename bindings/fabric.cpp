#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "arguments.hpp"
#include "docstrings.hpp"
#include "fabric/communicator.hpp"
#include "module.hpp"
#include "unisono/communicator.hpp"

namespace unisono::python {

void bind_fabric(nb::module_& module) {
  using namespace nb::literals;
  using F = Communicator::Fabric;
  fabric::set_library_defaults();
  nb::class_<F>(module, "Fabric", doc::kFabric)
      .def(
          "__init__",
          [](F* self, std::string provider, std::optional<int> channels, const std::string& policy,
             bool pinned) { new (self) F{std::move(provider), channels, read_policy(policy), pinned}; },
          "provider"_a = "", "channels"_a = nb::none(), "policy"_a = "round-robin", "pinned"_a = false)
      .def_ro("provider", &F::provider)
      .def_ro("channels", &F::channels)
      .def_prop_ro("policy", [](const F& fabric) { return std::string(name_of(fabric.policy)); })
      .def_ro("pinned", &F::pinned);
  nb::class_<FabricProvider>(module, "FabricProvider", "A provider that libfabric offers here.")
      .def_ro("name", &FabricProvider::name)
      .def_ro("nics", &FabricProvider::nics)
      .def_ro("most_channels", &FabricProvider::most_channels)
      .def_ro("line_gbps", &FabricProvider::line_gbps, "Gbit/s of a NIC; None if it does not say.")
      .def_ro("device_memory", &FabricProvider::device_memory);
  const nb::call_guard<nb::gil_scoped_release> released;  // looking up names may take long
  module.def("fabric_providers", &fabric_providers, released, doc::kFabricProviders);
  module.def(
      "fabric_provider", &fabric_provider, released, "name"_a = "",
      "Returns the one of fabric_providers() that a communicator takes for that name. Raises UsageError, "
      "which lists those present, if there is none.");
  module.def("fabric_version", &fabric_version,
             "Returns libfabric's version. Raises ResourceError if there is no libfabric.");
}

}  // namespace unisono::python
