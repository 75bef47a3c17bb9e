#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "module.hpp"
#include "norm_docstrings.hpp"
#include "py_norm.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

// Returns the value of an enumeration that has a name. None: its first. kind, choices: for the message.
template <class E>
E read_name(const std::optional<std::string>& name, int values, const char* kind, const char* choices) {
  if (!name) return E{};
  const std::optional<E> found = from_name<E>(*name, values);
  if (!found || *found == E{})
    throw UsageError("there is no " + std::string(kind) + " \"" + *name + "\": use " + choices +
                     ", or leave it out.");
  return *found;
}

bool read_sharded(const std::string& residual) {
  if (residual != "replicated" && residual != "sharded")
    throw UsageError("a residual cannot be \"" + residual + "\": use replicated or sharded.");
  return residual == "sharded";
}

// Returns nothing for the first value.
template <class E>
std::optional<std::string> name_or_none(E value) {
  if (value == E{}) return std::nullopt;
  return std::string(name_of(value));
}

}  // namespace

void bind_norm(nb::module_& module) {
  using namespace nb::literals;
  const auto none = nb::none();
  using O = PyNormOptions;
  nb::class_<O>(module, "NormOptions", doc::kNormOptions)
      .def(
          "__init__",
          [](O* self, nb::object out, nb::object residual_out, const std::optional<std::string>& quant,
             std::optional<double> scale, nb::object scales_out, const std::string& residual,
             const std::optional<std::string>& algorithm) {
            new (self)
                O{std::move(out),
                  std::move(residual_out),
                  std::move(scales_out),
                  read_name<NormQuant>(quant, kNormQuants, "quant", "fp8, fp8_token, fp8_128 or mx"),
                  scale,
                  read_sharded(residual),
                  read_name<NormAlgorithm>(algorithm, kNormAlgorithms, "algorithm",
                                           "one_shot, two_shot, apart, one_shot_ll128 or two_shot_ll128")};
          },
          "out"_a.none() = none, "residual_out"_a.none() = none, "quant"_a = none, "scale"_a = none,
          "scales_out"_a.none() = none, "residual"_a = "replicated", "algorithm"_a = none)
      .def_ro("out", &O::out)
      .def_ro("residual_out", &O::residual_out)
      .def_prop_ro("quant", [](const O& self) { return name_or_none(self.quant); })
      .def_ro("scale", &O::scale)
      .def_ro("scales_out", &O::scales_out)
      .def_prop_ro("residual", [](const O& self) { return self.sharded ? "sharded" : "replicated"; })
      .def_prop_ro("algorithm", [](const O& self) { return name_or_none(self.algorithm); });
}

}  // namespace unisono::python
