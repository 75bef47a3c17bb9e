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
  const nb::tuple extents = nb::tuple(nb::cast(shape));
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

nb::object empty_like_on(nb::handle like, const Shape& shape, int device, nb::handle stream) {
  const bool torch = nb::hasattr(like, "new_empty");
  if (stream.is_none() || (!torch && (cupy().is_none() || !nb::hasattr(like, "__cuda_array_interface__"))))
    return empty_like(like, shape);
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
    made = empty_like(like, shape);
  } catch (...) {
    within.attr("__exit__")(nb::none(), nb::none(), nb::none());
    throw;
  }
  within.attr("__exit__")(nb::none(), nb::none(), nb::none());
  return made;
}

nb::object device_array(void* data, std::size_t bytes, int device, DType type, const Shape& extents,
                        const nb::capsule& owner) {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  const bool torch = nb::cast<bool>(modules.attr("__contains__")("torch"));
  if (!torch && !nb::cast<bool>(modules.attr("__contains__")("cupy")))
    return nb::cast(nb::ndarray<nb::array_api, nb::device::cuda>(data, extents.size(), extents.data(), owner,
                                                                 nullptr, dlpack_of(type),
                                                                 nb::device::cuda::value, device));
  // as bytes, since not every version of torch and cupy takes each dtype
  const nb::ndarray<std::uint8_t, nb::device::cuda> flat(data, {bytes}, owner, {}, nb::dtype<std::uint8_t>(),
                                                         nb::device::cuda::value, device);
  const nb::module_ library = nb::module_::import_(torch ? "torch" : "cupy");
  const nb::object array = library.attr("from_dlpack")(nb::cast(flat));
  const nb::object dtype = torch ? nb::object(library.attr(numpy_name(type))) : numpy_dtype(type);
  return array.attr("view")(dtype).attr("reshape")(nb::tuple(nb::cast(extents)));
}

}  // namespace unisono::python
