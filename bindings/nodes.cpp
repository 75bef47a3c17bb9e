// What the collectives across nodes take from the core: arrays as bytes, and sums that go on elsewhere.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "array.hpp"
#include "lane/host/move.hpp"
#include "module.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;
using ConstBytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;

DType dtype_named(const std::string& name) {
  if (const auto dtype = from_name<DType>(name, kDTypes)) return *dtype;
  throw UsageError("there is no dtype '" + name + "'.");
}

nb::tuple describe(nb::handle x, const char* what, bool written) {
  const Array array(x, what, written);
  nb::object view = nb::none();
  if (array.memory == Memory::host)
    view = nb::cast(Bytes(array.data, {array.count * size_of(array.dtype)}, x));
  const std::string_view dtype = name_of(array.dtype);
  nb::object stream = nb::none();
  if (array.memory == Memory::device)
    stream = nb::int_(reinterpret_cast<std::uintptr_t>(stream_handle(array.stream(nb::none()))));
  return nb::make_tuple(view, nb::str(dtype.data(), dtype.size()), nb::tuple(nb::cast(array.shape)),
                        reinterpret_cast<std::uintptr_t>(array.data), stream);
}

void combine(const Bytes& out, const std::optional<ConstBytes>& prior, const std::vector<ConstBytes>& sources,
             const std::string& dtype_name, const std::string& op_name, int ranks) {
  const DType dtype = dtype_named(dtype_name);
  const Op op = read_op(op_name);
  const host::Kernels& kernels = host::kernels();
  const std::size_t narrow = size_of(dtype), wide = kernels.wide_bytes[static_cast<int>(dtype)];
  const std::size_t count = out.size() / (ranks == 0 ? wide : narrow);
  bool fits = out.size() == count * (ranks == 0 ? wide : narrow) && (prior || !sources.empty());
  if (prior) fits = fits && prior->size() == count * wide;
  std::vector<const byte*> from;
  for (const ConstBytes& source : sources) {
    fits = fits && source.size() == count * narrow;
    from.push_back(reinterpret_cast<const byte*>(source.data()));
  }
  if (!fits) throw UsageError("the buffers of a sum differ in length.");
  const nb::gil_scoped_release released;
  if (!prior && ranks == static_cast<int>(from.size())) {  // the whole sum at once
    const Dst to{reinterpret_cast<byte*>(out.data())};
    return kernels.reduce[static_cast<int>(dtype)][static_cast<int>(op)](&to, 1, from.data(), ranks,
                                                                         out.size());
  }
  kernels.resume[static_cast<int>(dtype)][static_cast<int>(op)](
      reinterpret_cast<byte*>(out.data()), prior ? reinterpret_cast<const byte*>(prior->data()) : nullptr,
      from.data(), static_cast<int>(from.size()), count, ranks);
}

}  // namespace

void bind_nodes(nb::module_& module) {
  using namespace nb::literals;
  module.def("describe", &describe, "x"_a, "what"_a, "written"_a,
             nb::sig("def describe(x: object, what: str, written: bool)"
                     " -> tuple[object, str, tuple[int, ...], int, int | None]"),
             "(an array in the host's memory as bytes without a copy, else None; dtype; shape; address; "
             "on a GPU its library's current stream). Raises UsageError for what a call would not take; "
             "`what` is the array's name there.");
  module.def(
      "empty_like",
      [](nb::handle like, const Shape& shape, int device, nb::handle stream) {
        return empty_like_on(like, shape, device, stream);
      },
      "like"_a, "shape"_a, "device"_a = 0, "stream"_a = nb::none(),
      "A new array of the kind and type of `like`; where a stream of that GPU is given, by its allocator.");
  module.def(
      "wide_bytes",
      [](const std::string& dtype) {
        return host::kernels().wide_bytes[static_cast<int>(dtype_named(dtype))];
      },
      "dtype"_a, "Bytes of an element in the type in which a dtype is combined.");
  module.def("combine", &combine, "out"_a, "prior"_a.none(), "sources"_a, "dtype"_a, "op"_a, "ranks"_a,
             "Combines sources in order, after `prior`, which is wide; see host::Continue. All are bytes.");
}

}  // namespace unisono::python
