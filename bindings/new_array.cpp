#include "new_array.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "dtypes.hpp"
#include "objects.hpp"
#include "unisono/error.hpp"

namespace unisono::python {

nb::object empty_like(nb::handle like, const Shape& shape) {
  const nb::tuple extents = tuple_of(shape);
  if (nb::hasattr(like, "new_empty")) return like.attr("new_empty")(extents);
  const bool on_gpu = nb::hasattr(like, "__cuda_array_interface__");
  if (on_gpu && nb::hasattr(like, "dtype"))
    if (const nb::object library = cupy(); !library.is_none())
      return library.attr("empty")(extents, like.attr("dtype"));
  if (on_gpu || !nb::hasattr(like, "dtype"))
    throw UsageError(std::string("x is a ") + nb::type_name(like.type()).c_str() +
                     ", from which no new array can be made: pass out.");
  return nb::module_::import_("numpy").attr("empty")(extents, like.attr("dtype"));
}

nb::object empty_like(nb::handle like, const Shape& shape, DType dtype) {
  using namespace nb::literals;
  const nb::tuple extents = tuple_of(shape);
  if (nb::hasattr(like, "new_empty"))
    return like.attr("new_empty")(extents, "dtype"_a = nb::module_::import_("torch").attr(numpy_name(dtype)));
  if (!nb::hasattr(like, "__cuda_array_interface__"))
    return nb::module_::import_("numpy").attr("empty")(extents, numpy_dtype(dtype));
  if (const nb::object library = cupy(); !library.is_none())
    return library.attr("empty")(extents, numpy_dtype(dtype));
  throw UsageError(std::string("x is a ") + nb::type_name(like.type()).c_str() +
                   ", from which no new array can be made: pass out.");
}

namespace {

// Calls `make` with the stream as the library's current one. None: as it is.
template <class Make>
nb::object made_on(nb::handle like, int device, nb::handle stream, const Make& make) {
  const bool torch = nb::hasattr(like, "new_empty");
  if (stream.is_none() || (!torch && (cupy().is_none() || !nb::hasattr(like, "__cuda_array_interface__"))))
    return make();
  const nb::object cuda =
      torch ? nb::object(nb::module_::import_("torch").attr("cuda")) : nb::object(cupy().attr("cuda"));
  const auto handle = reinterpret_cast<std::uintptr_t>(stream_handle(stream));
  // torch would make a new stream from ExternalStream(0)
  const nb::object own_stream = torch && handle == 0
                                    ? nb::object(cuda.attr("default_stream")(device))
                                    : nb::object(cuda.attr("ExternalStream")(handle, device));
  const nb::object within = torch ? nb::object(cuda.attr("stream")(own_stream)) : own_stream;
  within.attr("__enter__")();
  nb::object made;
  try {
    made = make();
  } catch (...) {
    within.attr("__exit__")(nb::none(), nb::none(), nb::none());
    throw;
  }
  within.attr("__exit__")(nb::none(), nb::none(), nb::none());
  return made;
}

}  // namespace

nb::object empty_like_on(nb::handle like, const Shape& shape, int device, nb::handle stream) {
  return made_on(like, device, stream, [&] { return empty_like(like, shape); });
}
nb::object empty_like_on(nb::handle like, const Shape& shape, DType dtype, int device, nb::handle stream) {
  return made_on(like, device, stream, [&] { return empty_like(like, shape, dtype); });
}

Library imported_library() {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  auto has = [&](const char* name) { return nb::cast<bool>(modules.attr("__contains__")(name)); };
  return has("torch") ? Library::torch : has("cupy") ? Library::cupy : Library::other;
}

nb::object array_over(void* data, Memory memory, int device, DType type, const Shape& extents,
                      Library library, const nb::capsule& owner) {
  const bool on_gpu = memory == Memory::device;
  if (on_gpu && library == Library::other)
    return nb::cast(nb::ndarray<nb::array_api, nb::device::cuda>(data, extents.size(), extents.data(), owner,
                                                                 nullptr, dlpack_of(type),
                                                                 nb::device::cuda::value, device));
  std::size_t bytes = size_of(type);
  for (const std::size_t extent : extents) bytes *= extent;
  // as bytes, since not every version of a library takes each dtype
  nb::object array;
  if (library == Library::other) {
    array = nb::cast(nb::ndarray<nb::numpy, std::uint8_t>(data, {bytes}, owner));
  } else {
    const nb::ndarray<std::uint8_t> flat(data, {bytes}, owner, {}, nb::dtype<std::uint8_t>(),
                                         on_gpu ? nb::device::cuda::value : nb::device::cpu::value, device);
    array = nb::module_::import_(library == Library::torch ? "torch" : "cupy")
                .attr("from_dlpack")(nb::cast(flat));
  }
  const nb::object dtype = library == Library::torch
                               ? nb::object(nb::module_::import_("torch").attr(numpy_name(type)))
                               : numpy_dtype(type);
  return array.attr("view")(dtype).attr("reshape")(tuple_of(extents));
}

}  // namespace unisono::python
