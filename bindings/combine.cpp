#include "unisono/combine.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "arguments.hpp"
#include "module.hpp"
#include "output.hpp"

namespace unisono::python {
namespace {

constexpr const char* kCombine =
    R"(Returns what an all_reduce gives to ranks that have the arrays `xs`, in that order: the same bits. Not collective.

Args:
    xs: at least one; of one shape and dtype, all on the CPU or all on one GPU.
    op: sum, prod, min, max or avg; of integers, not on a GPU, also band, bor or bxor (of their bits).
    out: like them; None: a new array. May be one of xs.
    stream: as in the calls of a Communicator.

Raises:
    UsageError: the arrays do not fit each other.)";

nb::object combine(const std::vector<nb::object>& xs, const std::string& op, nb::handle out,
                   nb::handle stream) {
  if (xs.empty()) throw UsageError("xs is empty: give one array at least.");
  const Array first(xs[0], "xs[0]", false);
  const Output to(out, xs[0], first, first.shape, stream, "xs[0]");
  std::vector<Array> others;
  std::vector<const void*> places{first.data};
  for (std::size_t i = 1; i < xs.size(); ++i) {
    const std::string name = "xs[" + std::to_string(i) + "]";
    const Array& one = others.emplace_back(xs[i], name.c_str(), false);
    if (one.dtype != first.dtype || one.shape != first.shape || one.memory != first.memory ||
        one.device != first.device)
      throw UsageError(name + " has another shape, dtype or device than xs[0]: give arrays of one kind.");
    places.push_back(one.data);
  }
  const nb::object on = first.stream(stream);
  const Combination sum{.xs = places,
                        .out = to.array.data,
                        .count = first.count,
                        .dtype = first.dtype,
                        .op = read_op(op),
                        .memory = first.memory,
                        .device = first.device,
                        .stream = stream_handle(on)};
  {
    const nb::gil_scoped_release released;
    combine_arrays(sum);
  }
  return to.object;
}

}  // namespace

void bind_combine(nb::module_& module) {
  using namespace nb::literals;
  const auto none = nb::none();
  module.def("combine_arrays", &combine, "xs"_a, "op"_a = "sum", "out"_a.none() = none, "stream"_a = none,
             kCombine);
}

}  // namespace unisono::python
