#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "dtypes.hpp"
#include "module.hpp"
#include "moe_docstrings.hpp"
#include "py_moe.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

// In the order of MoeLayout and MoeScales.
constexpr std::string_view kLayouts[] = {"flat", "rank_major", "expert_major"};
constexpr std::string_view kScales[] = {"none", "e4m3_128", "mx"};

MoeLayout read_layout(const std::string& name) {
  for (std::size_t i = 0; i < std::size(kLayouts); ++i)
    if (name == kLayouts[i]) return static_cast<MoeLayout>(i);
  throw UsageError("there is no layout \"" + name + "\": use flat, rank_major or expert_major.");
}

MoeScales read_scales(const std::optional<std::string>& name) {
  if (!name) return MoeScales::none;
  for (std::size_t i = 1; i < std::size(kScales); ++i)
    if (*name == kScales[i]) return static_cast<MoeScales>(i);
  throw UsageError("there are no scales \"" + *name + "\": use e4m3_128 or mx, or leave them out.");
}

std::optional<std::string> scales_of(const PyMoeOptions& self) {
  if (self.options.scales == MoeScales::none) return std::nullopt;
  return std::string(kScales[static_cast<int>(self.options.scales)]);
}

}  // namespace

void bind_moe(nb::module_& module) {
  using namespace nb::literals;
  const auto none = nb::none();
  using O = PyMoeOptions;
  nb::class_<O>(module, "MoeOptions", doc::kMoeOptions)
      .def(
          "__init__",
          [](O* self, const std::string& layout, int alignment, const std::optional<std::string>& scales,
             std::optional<long long> capacity, bool host_counts, bool drop, long long more_bytes,
             int handles, std::optional<std::string> device) {
            MoeOptions options{.layout = read_layout(layout),
                               .alignment = alignment,
                               .scales = read_scales(scales),
                               .drop = drop,
                               .more_bytes = read_size("more_bytes", more_bytes),
                               .handles = handles,
                               .host_counts = host_counts};
            if (capacity) options.capacity = read_size("capacity", *capacity);
            if (device) read_device(*device);
            new (self) O{options, std::move(device)};
          },
          "layout"_a = "flat", "alignment"_a = 1, "scales"_a = none, "capacity"_a = none,
          "host_counts"_a = false, "drop"_a = false, "more_bytes"_a = 0, "handles"_a = 4, "device"_a = none)
      .def_prop_ro("layout",
                   [](const O& self) { return std::string(kLayouts[static_cast<int>(self.options.layout)]); })
      .def_prop_ro("alignment", [](const O& self) { return self.options.alignment; })
      .def_prop_ro("scales", &scales_of)
      .def_prop_ro("capacity", [](const O& self) { return self.options.capacity; })
      .def_prop_ro("host_counts", [](const O& self) { return self.options.host_counts; })
      .def_prop_ro("drop", [](const O& self) { return self.options.drop; })
      .def_prop_ro("more_bytes", [](const O& self) { return self.options.more_bytes; })
      .def_prop_ro("handles", [](const O& self) { return self.options.handles; })
      .def_ro("device", &O::device);

  nb::class_<PyMoeHandle>(module, "MoeHandle", doc::kMoeHandle).def("__repr__", [](const PyMoeHandle& self) {
    return "<MoeHandle " + std::to_string(self.handle.number) + " of Moe " + std::to_string(self.handle.moe) +
           ">";
  });

  using R = PyMoeReceived;
  nb::class_<R>(module, "MoeReceived", doc::kMoeReceived)
      .def_prop_ro(
          "x", &R::get<R::x>,
          "(rows_held, hidden), in the Moe's dtype, or as x was given; with scales in float8_e4m3fn.")
      .def_prop_ro("more", &R::more, "The payloads, a tuple: (rows_held, ...) each.")
      .def_prop_ro("scales", &R::get<R::scales>,
                   "(rows_held, ceil(hidden / 128)), float32; mx: uint8, and the second extent is rounded up "
                   "to a multiple of 4. None without scales.")
      .def_prop_ro("topk_idx", &R::get<R::topk_idx>,
                   "(rows_held, top_k), int32: the token's experts as numbers within this rank. -1: another "
                   "rank's or none, and in rank_major a row that no token fills. None with expert_major.")
      .def_prop_ro("topk_weights", &R::get<R::topk_weights>,
                   "(rows_held, top_k), float32, 0 where topk_idx is -1; expert_major: (rows_held,). None "
                   "without weights.")
      .def_prop_ro("counts", &R::get<R::counts>,
                   "(L,), int32: the (token, expert) pairs of each expert of this rank.")
      .def_prop_ro("offsets", &R::get<R::offsets>,
                   "(L + 1,), int32: the place at which each expert's pairs begin, with the alignment.")
      .def_prop_ro("source_rows", &R::get<R::source_rows>,
                   "(ranks,), int32: the tokens that each rank has sent here.")
      .def_prop_ro("expert_rows", &R::get<R::expert_rows>,
                   "(rows_held * top_k,), int32, of which offsets[L] are filled: the row of each pair, by "
                   "(expert, row). None with expert_major.")
      .def_prop_ro("row_expert", &R::get<R::row_expert>,
                   "(rows_held,), int32: each row's expert within this rank, -1 if no token fills the row. "
                   "None except with expert_major.")
      .def_prop_ro("rows", &R::get<R::rows>,
                   "An int32 array without axes: the rows up to the last that a token fills.")
      .def_prop_ro("dropped", &R::get<R::dropped>,
                   "An int32 array without axes: the rows that were left out for want of capacity.")
      .def_prop_ro(
          "rows_now", &R::rows_now,
          "`rows` as an int if the host knows it, which it does except on a GPU without host_counts; "
          "else None.")
      .def_prop_ro("handle", &R::handle, "The MoeHandle.");

  using M = PyMoe;
  nb::class_<M>(module, "Moe", nb::is_weak_referenceable(), doc::kMoe)
      .def("dispatch", &M::dispatch, "x"_a, "topk_idx"_a = none, "topk_weights"_a = none, nb::kw_only(),
           "handle"_a = none, "out"_a = none, "max_tokens"_a = none, "stream"_a = none, doc::kMoeDispatch)
      .def("dispatch_begin", &M::dispatch_begin, "x"_a, "topk_idx"_a = none, "topk_weights"_a = none,
           nb::kw_only(), "handle"_a = none, "out"_a = none, "max_tokens"_a = none, "stream"_a = none,
           doc::kMoeDispatchBegin)
      .def("dispatch_end", &M::dispatch_end, doc::kMoeDispatchEnd)
      .def("combine", &M::combine, "y"_a, "handle"_a, nb::kw_only(), "topk_weights"_a = none, "bias"_a = none,
           "out"_a = none, "stream"_a = none, doc::kMoeCombine)
      .def("combine_begin", &M::combine_begin, "y"_a, "handle"_a, nb::kw_only(), "topk_weights"_a = none,
           "bias"_a = none, "out"_a = none, "stream"_a = none, doc::kMoeCombineBegin)
      .def("combine_end", &M::combine_end, doc::kMoeCombineEnd)
      .def_prop_ro("num_experts", [](const M& self) { return self.moe().shape().experts; })
      .def_prop_ro("top_k", [](const M& self) { return self.moe().shape().top_k; })
      .def_prop_ro("hidden", [](const M& self) { return self.moe().shape().hidden; })
      .def_prop_ro("max_tokens", [](const M& self) { return self.moe().shape().max_tokens; })
      .def_prop_ro(
          "dtype", [](const M& self) { return numpy_name(self.moe().shape().dtype); },
          "The name of the dtype of x, as numpy and torch have it.")
      .def_prop_ro("options", &M::options, nb::rv_policy::copy)
      .def_prop_ro("communicator", &M::communicator, nb::sig("def communicator(self) -> Communicator"))
      .def_prop_ro(
          "local_experts", [](const M& self) { return self.moe().local_experts(); },
          "L, the number of experts of a rank.")
      .def_prop_ro(
          "rows_held", [](const M& self) { return self.moe().rows_held(); },
          "The rows of every received array.")
      .def("__repr__", [](const M& self) {
        const MoeShape& shape = self.moe().shape();
        return "<Moe: top " + std::to_string(shape.top_k) + " of " + std::to_string(shape.experts) +
               " experts, " + std::to_string(shape.hidden) + " x " + numpy_name(shape.dtype) + ">";
      });
}

}  // namespace unisono::python
