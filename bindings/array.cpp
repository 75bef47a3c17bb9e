#include "array.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

#include "dtypes.hpp"
#include "objects.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

// Returns " (why)", in a library's own words.
std::string reason(const nb::python_error& error) { return " (" + readable(nb::str(error.value())) + ")"; }

// Returns why an array cannot be read by DLPack.
std::string refusal(nb::handle array) {
  try {
    array.attr("__dlpack__")();
  } catch (const nb::python_error& error) { return reason(error); }
  return {};
}

}  // namespace

void forget_libraries() {
  forget_numpy();
  forget_torch();
}

void refuse_read_only(const char* what) {
  throw UsageError(std::string(what) + " is read-only: pass an array that may be written.");
}

void refuse_gaps(const char* what, const char* copies) {
  throw UsageError(std::string(what) + " is not contiguous: pass a C-contiguous array (" + copies +
                   " copies).");
}

bool contiguous(std::size_t dims, const std::int64_t* extents, const std::int64_t* strides) {
  std::int64_t expected = 1;
  bool fits = true;
  for (std::size_t i = dims; i-- > 0; expected *= extents[i])
    fits = fits && (extents[i] == 1 || strides[i] == expected);
  return fits || expected == 0;
}

// Defined here, or Array() would first write zeros over the whole object.
Array::Array() = default;

// Delegates to the default constructor, so that the destructor runs if this one throws.
Array::Array(nb::handle array, const char* what, bool written) : Array() {
  if (from_torch_table(array)) return;
  if (from_numpy(array, what, written)) return;
  if (from_buffer(array, what, written)) return;
  std::string why;
  try {
    if (from_others(array, what, written)) return;
  } catch (const std::bad_cast&) {
    why = ", whose description of its memory is malformed";
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw;
    why = ", whose description of its memory is malformed" + reason(error);
  }
  const bool is_class = PyType_Check(array.ptr());
  throw UsageError(std::string(what) + (is_class ? " is the class " : " is a ") +
                   nb::type_name(is_class ? array : array.type()).c_str() + why +
                   ": pass a numpy or cupy array, or a torch tensor.");
}

bool Array::from_others(nb::handle array, const char* what, bool written) {
  if (PyType_Check(array.ptr())) return false;  // a class has the attributes of its arrays, but no memory
  if (has(array, names().data_ptr) && has(array, names().is_contiguous)) from_torch(array, what, written);
  else if (nb::hasattr(array, "__cuda_array_interface__")) from_cuda(array, what, written);
  else if (has(array, names().array_struct)) from_array_struct(array, what, written);
  else if (nb::hasattr(array, "__dlpack__")) from_dlpack(array, what, written);
  else return false;
  return true;
}

Array::Array(Array&& other) noexcept
    : data(other.data),
      memory(other.memory),
      device(other.device),
      dtype(other.dtype),
      shape(other.shape),
      count(other.count),
      library_(other.library_),
      owner_(std::move(other.owner_)),
      view_(other.view_),
      held_(other.held_) {
  other.held_ = false;
}

bool Array::from_buffer(nb::handle array, const char* what, bool written) {
  if (!PyObject_CheckBuffer(array.ptr())) return false;
  if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_FULL_RO) != 0) {
    PyErr_Clear();
    return false;
  }
  held_ = true;
  const auto known = find_dtype(view_.format, view_.itemsize);
  if (!known)
    refuse_dtype(has(array, names().dtype) ? nb::cast<std::string>(nb::str(get(array, names().dtype)))
                                           : std::string("'") + (view_.format ? view_.format : "?") + "'",
                 what);
  if (!PyBuffer_IsContiguous(&view_, 'C')) refuse_gaps(what, "numpy.ascontiguousarray");
  if (written && view_.readonly) refuse_read_only(what);
  dtype = *known;
  data = view_.buf;
  count = shape.assign(view_.shape, static_cast<std::size_t>(view_.ndim));
  return true;
}

// Reads version 3 of the interface, as cupy and others offer it: typestr is numpy's, and strides are left out
// if the array is C-contiguous.
void Array::from_cuda(nb::handle array, const char* what, bool written) {
  const nb::dict interface = nb::cast<nb::dict>(array.attr("__cuda_array_interface__"));
  const std::string type = nb::cast<std::string>(nb::str(interface["typestr"]));
  std::optional<DType> known;
  for (const auto& [name, one] :
       {std::pair("f4", DType::f32), std::pair("f8", DType::f64), std::pair("f2", DType::f16),
        std::pair("i1", DType::i8), std::pair("u1", DType::u8), std::pair("i4", DType::i32),
        std::pair("i8", DType::i64)})
    if (type.size() == 3 && type[0] != '>' && type.substr(1) == name) known = one;
  if (!known) refuse_dtype("'" + type + "'", what);
  const nb::tuple address = nb::cast<nb::tuple>(interface["data"]);
  if (address.size() != 2) throw std::bad_cast();
  if (written && nb::cast<bool>(address[1])) refuse_read_only(what);
  const auto extents = nb::cast<std::vector<std::size_t>>(nb::list(interface["shape"]));
  count = shape.assign(extents.data(), extents.size());
  dtype = *known;
  if (interface.contains("strides") && !interface["strides"].is_none() && count > 0) {
    const auto strides = nb::cast<std::vector<std::int64_t>>(nb::list(interface["strides"]));
    if (strides.size() != shape.size()) throw std::bad_cast();
    auto expected = static_cast<std::int64_t>(size_of(dtype));
    for (std::size_t i = shape.size(); i-- > 0; expected *= static_cast<std::int64_t>(shape[i]))
      if (shape[i] > 1 && strides[i] != expected) refuse_gaps(what, "cupy.ascontiguousarray");
  }
  data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(address[0]));
  memory = Memory::device;
  const bool numbered = nb::hasattr(array, "device") && nb::hasattr(array.attr("device"), "id");
  library_ = numbered && !cupy().is_none() ? Library::cupy : Library::other;
  device = numbered ? nb::cast<int>(array.attr("device").attr("id")) : -1;
}

void Array::from_dlpack(nb::handle array, const char* what, bool written) {
  nb::ndarray<nb::ro> view;
  if (!nb::try_cast(array, view))
    throw UsageError(std::string(what) + " cannot be taken by DLPack" + refusal(array) +
                     ": pass a C-contiguous numpy, torch or cupy array.");
  if (nb::ndarray<> writable; written && !nb::try_cast(array, writable)) refuse_read_only(what);
  const nb::dlpack::dtype type = view.dtype();
  const auto known = find_dtype(type);
  if (!known)
    refuse_dtype("DLPack code " + std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits",
                 what);
  if (!contiguous(view.ndim(), view.shape_ptr(), view.stride_ptr()))
    refuse_gaps(what, "its library's ascontiguousarray");
  count = shape.assign(view.shape_ptr(), view.ndim());
  dtype = *known;
  data = const_cast<void*>(static_cast<const void*>(view.data()));
  memory = view.device_type() == nb::device::cpu::value ? Memory::host : Memory::device;
  device = view.device_id();
  owner_ = nb::cast(view);
}

nb::object Array::stream(nb::handle asked) const {
  if (memory == Memory::host) {
    if (!asked.is_none()) throw UsageError("stream= is for arrays on a GPU: leave it out.");
    return nb::none();
  }
  if (!asked.is_none()) return nb::borrow(asked);
  if (library_ == Library::torch) return current_torch_stream(device);
  if (library_ == Library::cupy) return cupy().attr("cuda").attr("get_current_stream")();
  return nb::none();
}

void* stream_handle(nb::handle stream) {
  if (stream.is_none()) return nullptr;
  if (PyLong_Check(stream.ptr())) return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(stream));
  for (const char* name : {"cuda_stream", "ptr", "handle"})
    if (const nb::object handle = nb::getattr(stream, name, nb::none()); !handle.is_none())
      return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(handle));
  throw UsageError(std::string(nb::repr(stream).c_str()) +
                   " is not a stream: pass a torch or cupy stream, or the handle as a number.");
}

std::string text(const Shape& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

nb::tuple tuple_of(const Shape& shape) {
  nb::list extents;
  for (const std::size_t extent : shape) extents.append(extent);
  return nb::tuple(extents);
}

}  // namespace unisono::python
