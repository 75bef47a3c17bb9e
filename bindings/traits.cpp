// The properties of collectives, algorithms and dtypes: base/traits.hpp and types.hpp for Python.
#include "base/traits.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "module.hpp"

namespace unisono::python {
namespace {

AlgorithmTraits algorithm_named(std::string_view name) {
  if (const auto known = from_name<Algorithm>(name, kAlgorithms)) return traits_of(*known);
  throw UsageError("there is no algorithm '" + std::string(name) +
                   "': Communicator.algorithms lists those of a collective.");
}

std::string_view pieces_of(const AlgorithmTraits& traits) {
  switch (traits.pieces) {
    case Pieces::packets: return "packets";
    case Pieces::lines: return "lines";
    default: return "chunks";
  }
}

}  // namespace

void bind_traits(nb::module_& module) {
  using namespace nb::literals;
  using A = AlgorithmTraits;
  using C = CollectiveTraits;
  nb::class_<A>(module, "AlgorithmTraits", "The properties of an algorithm.")
      .def_ro("name", &A::name)
      .def_ro("direct", &A::direct, "Whether it reaches into the peers' buffers.")
      .def_prop_ro("pieces", &pieces_of, "The unit that carries data: `chunks`, `packets` or `lines`.");
  nb::class_<C>(module, "CollectiveTraits", "The properties of a collective.")
      .def_prop_ro("name", [](const C& self) { return name_of(self.collective); })
      .def_ro("combines", &C::combines, "Whether it takes an op.")
      .def_prop_ro("rooted", &C::rooted, "Whether it takes a root.")
      .def_prop_ro("by_blocks", &C::by_blocks, "Whether the larger buffer has a block for each rank.")
      .def_prop_ro("by_parts", &C::by_parts, "Whether each pair of ranks has a length of its own.")
      .def_ro("two_ended", &C::two_ended, "Whether it is between two ranks.")
      .def_ro("swaps", &C::swaps,
              "Whether, in place, arriving data takes the place of data that has yet to leave. There is no "
              "direct "
              "algorithm then.")
      .def_prop_ro(
          "stores_only", [](const C& self) { return stores_only(self.collective); },
          "Whether its direct algorithm only writes to peers, as a NIC does.");
  module.def("algorithm_traits", &algorithm_named, "name"_a,
             "Returns the properties of an algorithm. Raises UsageError for an unknown name.");
  module.def(
      "collective_traits", [](std::string_view name) { return traits_of(read_collective(name)); }, "name"_a,
      "Returns the properties of a collective. Raises UsageError for an unknown name.");
  module.def(
      "dtype_sizes",
      [] {
        std::map<std::string, std::size_t> sizes;
        for (int i = 0; i < kDTypes; ++i)
          sizes.emplace(name_of(static_cast<DType>(i)), size_of(static_cast<DType>(i)));
        return sizes;
      },
      "Returns the bytes of an element of each dtype, by its name.");
  module.def(
      "op_names",
      [] {
        std::vector<std::string> names;
        for (int i = 0; i < kOps; ++i) names.emplace_back(name_of(static_cast<Op>(i)));
        return names;
      },
      "Returns the names of the ops.");
  module.def(
      "has_op",
      [](std::string_view dtype, std::string_view op, bool on_gpu) {
        return has_op(dtype_named(dtype), read_op(op), on_gpu ? Memory::device : Memory::host);
      },
      "dtype"_a, "op"_a, "on_gpu"_a = false,
      "Returns whether elements of that dtype are combined by that op. Raises UsageError for an unknown "
      "name.");
}

}  // namespace unisono::python
