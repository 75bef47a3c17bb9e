#include "array.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "unisono/error.hpp"

namespace unisono::python {
namespace {

struct Name {
  const char* numpy;  // torch's are the same
  DType dtype;
};
constexpr Name kNames[] = {
    {"float32", DType::f32},       {"float64", DType::f64}, {"float16", DType::f16},
    {"bfloat16", DType::bf16},     {"int8", DType::i8},     {"uint8", DType::u8},
    {"int32", DType::i32},         {"int64", DType::i64},   {"float8_e4m3fn", DType::f8e4m3},
    {"float8_e5m2", DType::f8e5m2}};

std::optional<DType> dtype_named(std::string_view name) {
  for (const Name& one : kNames)
    if (name == one.numpy) return one.dtype;
  return from_name<DType>(name, kDTypes);
}

[[noreturn]] void unknown(const std::string& name, const char* what) {
  throw UsageError(std::string(what) + " has elements of type " + name +
                   ": use f32, f64, f16, bf16, i8, u8, i32, i64, f8e4m3 or f8e5m2.");
}

std::optional<DType> dtype_of(const char* format, Py_ssize_t size) {
  if (!format || format[0] == '\0') return std::nullopt;
  const char* code = format[0] == '<' || format[0] == '=' || format[0] == '@' ? format + 1 : format;
  if (code[0] == '\0' || code[1] != '\0') return std::nullopt;
  switch (code[0]) {
    case 'f': return DType::f32;
    case 'd': return DType::f64;
    case 'e': return DType::f16;
    case 'b': return DType::i8;
    case 'B': return DType::u8;
    case 'i':
    case 'l':
    case 'q': return size == 4 ? DType::i32 : DType::i64;
    default: return std::nullopt;
  }
}

}  // namespace

Array::Array(nb::handle array, const char* what, bool written) {
  if (from_buffer(array, what, written)) return;
  if (nb::hasattr(array, "data_ptr")) from_torch(array, what);
  else if (nb::hasattr(array, "__array_interface__")) from_extension_type(array, what, written);
  else
    throw UsageError(std::string(what) + " is a " + nb::type_name(array.type()).c_str() +
                     ": pass a numpy array or a torch CPU tensor.");
}

Array::Array(Array&& other) noexcept
    : data(other.data),
      dtype(other.dtype),
      shape(std::move(other.shape)),
      count(other.count),
      view_(other.view_),
      held_(other.held_) {
  other.held_ = false;
}

Array::~Array() {
  if (held_) PyBuffer_Release(&view_);
}

void Array::measure() {
  count = 1;
  for (const std::size_t extent : shape) count *= extent;
}

bool Array::from_buffer(nb::handle array, const char* what, bool written) {
  if (!PyObject_CheckBuffer(array.ptr())) return false;
  if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_FULL_RO) != 0) {  // numpy has no format for bf16 and fp8
    PyErr_Clear();
    return false;
  }
  held_ = true;
  const auto known = dtype_of(view_.format, view_.itemsize);
  if (!known) unknown(std::string("'") + (view_.format ? view_.format : "?") + "'", what);
  if (!PyBuffer_IsContiguous(&view_, 'C'))
    throw UsageError(std::string(what) +
                     " is not contiguous: pass a C-contiguous array (numpy.ascontiguousarray copies).");
  if (written && view_.readonly)
    throw UsageError(std::string(what) + " is read-only: pass an array that may be written.");
  dtype = *known;
  data = view_.buf;
  shape.assign(view_.shape, view_.shape + view_.ndim);
  measure();
  return true;
}

void Array::from_extension_type(nb::handle array, const char* what, bool written) {
  const std::string name = nb::cast<std::string>(nb::str(array.attr("dtype").attr("name")));
  const auto known = dtype_named(name);
  if (!known) unknown(name, what);
  const nb::object flags = array.attr("flags");
  if (!nb::cast<bool>(flags.attr("c_contiguous")))
    throw UsageError(std::string(what) +
                     " is not contiguous: pass a C-contiguous array (numpy.ascontiguousarray copies).");
  if (written && !nb::cast<bool>(flags.attr("writeable")))
    throw UsageError(std::string(what) + " is read-only: pass an array that may be written.");
  dtype = *known;
  data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(array.attr("__array_interface__")["data"][0]));
  shape = nb::cast<Shape>(nb::list(array.attr("shape")));
  measure();
}

void Array::from_torch(nb::handle array, const char* what) {
  const std::string device = nb::cast<std::string>(array.attr("device").attr("type"));
  if (device != "cpu")
    throw UsageError(std::string(what) + " is on device " + device + ": this lane takes CPU tensors.");
  const nb::object its = array.attr("dtype");
  const std::string name =
      nb::cast<std::string>(nb::str(its));  // of an object, not of an accessor: that would be a cast
  const auto known = dtype_named(std::string_view(name).substr(name.find('.') + 1));
  if (!known) unknown(name, what);
  if (!nb::cast<bool>(array.attr("is_contiguous")()))
    throw UsageError(std::string(what) +
                     " is not contiguous: pass a contiguous tensor (tensor.contiguous() copies).");
  dtype = *known;
  data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(array.attr("data_ptr")()));
  shape = nb::cast<Shape>(nb::list(array.attr("shape")));
  measure();
}

nb::object empty_like(nb::handle like, const Shape& shape) {
  const nb::tuple extents = nb::tuple(nb::cast(shape));
  if (nb::hasattr(like, "new_empty")) return like.attr("new_empty")(extents);
  return nb::module_::import_("numpy").attr("empty")(extents, like.attr("dtype"));
}

nb::object numpy_dtype(DType dtype) {
  for (const Name& one : kNames) {
    if (one.dtype != dtype) continue;
    const bool extension = dtype == DType::bf16 || dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
    const nb::module_ module = nb::module_::import_(extension ? "ml_dtypes" : "numpy");
    return nb::module_::import_("numpy").attr("dtype")(module.attr(one.numpy));
  }
  throw UsageError("there is no such dtype.");
}

DType read_dtype(nb::handle dtype) {
  std::string name;
  if (nb::isinstance<nb::str>(dtype)) name = nb::cast<std::string>(dtype);
  else if (nb::hasattr(dtype, "name") && nb::isinstance<nb::str>(dtype.attr("name")))
    name = nb::cast<std::string>(dtype.attr("name"));
  else if (nb::hasattr(dtype, "__name__")) name = nb::cast<std::string>(dtype.attr("__name__"));
  else name = nb::cast<std::string>(nb::str(dtype));
  if (const auto dot = name.find('.'); dot != std::string::npos) name = name.substr(dot + 1);
  const auto known = dtype_named(name);
  const bool native = !nb::hasattr(dtype, "isnative") || nb::cast<bool>(dtype.attr("isnative"));
  if (!known || !native) unknown(native ? name : "foreign byte order", "the buffer");
  return *known;
}

std::string text(const Shape& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace unisono::python
