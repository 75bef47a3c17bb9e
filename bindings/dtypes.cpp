#include "dtypes.hpp"

#include <nanobind/stl/string.h>

#include "objects.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

struct Name {
  const char* numpy;  // torch's are the same
  DType dtype;
  std::uint8_t dlpack;  // DLDataTypeCode
};
constexpr Name kNames[] = {
    {"float32", DType::f32, 2},        {"float64", DType::f64, 2}, {"float16", DType::f16, 2},
    {"bfloat16", DType::bf16, 4},      {"int8", DType::i8, 0},     {"uint8", DType::u8, 1},
    {"int32", DType::i32, 0},          {"int64", DType::i64, 0},   {"float8_e4m3fn", DType::f8e4m3, 10},
    {"float8_e5m2", DType::f8e5m2, 12}};

}  // namespace

std::optional<DType> find_dtype(std::string_view name) {
  for (const Name& one : kNames)
    if (name == one.numpy) return one.dtype;
  return from_name<DType>(name, kDTypes);
}

std::optional<DType> find_dtype(nb::dlpack::dtype type) {
  for (const Name& one : kNames)
    if (type == dlpack_of(one.dtype)) return one.dtype;
  return std::nullopt;
}

std::optional<DType> find_dtype(const char* format, Py_ssize_t element_bytes) {
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
    case 'q': return element_bytes == 4 ? DType::i32 : DType::i64;
    default: return std::nullopt;
  }
}

void refuse_dtype(const std::string& name, const char* what) {
  throw UsageError(std::string(what) + " has elements of type " + name +
                   ": use f32, f64, f16, bf16, i8, u8, i32, i64, f8e4m3 or f8e5m2.");
}

DType read_dtype(nb::handle dtype) {
  std::string name;
  if (nb::isinstance<nb::str>(dtype)) name = readable(dtype);
  else if (nb::hasattr(dtype, "name") && nb::isinstance<nb::str>(dtype.attr("name")))
    name = readable(dtype.attr("name"));
  else if (PyType_Check(dtype.ptr())) name = readable(dtype.attr("__name__"));
  else name = readable(nb::str(dtype));
  if (const auto dot = name.find('.'); dot != std::string::npos) name = name.substr(dot + 1);
  const auto known = find_dtype(name);
  const bool native = !nb::hasattr(dtype, "isnative") || nb::cast<bool>(dtype.attr("isnative"));
  if (!known || !native) refuse_dtype(native ? name : "foreign byte order", "the buffer");
  return *known;
}

const char* numpy_name(DType dtype) { return kNames[static_cast<int>(dtype)].numpy; }

nb::object numpy_dtype(DType dtype) {
  for (const Name& one : kNames) {
    if (one.dtype != dtype) continue;
    const bool extension = dtype == DType::bf16 || dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
    const nb::module_ module = nb::module_::import_(extension ? "ml_dtypes" : "numpy");
    return nb::module_::import_("numpy").attr("dtype")(module.attr(one.numpy));
  }
  throw UsageError("there is no such dtype.");
}

nb::dlpack::dtype dlpack_of(DType dtype) {
  for (const Name& one : kNames)
    if (one.dtype == dtype) return {one.dlpack, static_cast<std::uint8_t>(8 * size_of(dtype)), 1};
  return {};
}

std::optional<DType> DtypeCache::find(const nb::object& dtype) const {
  for (const auto& [object, known] : met_)
    if (object == dtype.ptr()) return known;
  return std::nullopt;
}

DType DtypeCache::learn(const nb::object& dtype, const char* what) {
  if (const auto known = find(dtype)) return *known;
  // str of an object, not of an accessor: that would be a cast
  const std::string name = nb::cast<std::string>(nb::str(dtype));
  // a module may stand in front of the name
  const auto known = find_dtype(std::string_view(name).substr(name.find('.') + 1));
  if (!known) refuse_dtype(name, what);
  if (met_.size() < std::size(kNames)) met_.emplace_back(dtype.inc_ref().ptr(), *known);
  return *known;
}

void DtypeCache::forget() {
  for (const auto& [object, dtype] : std::exchange(met_, {})) Py_DECREF(object);
}

}  // namespace unisono::python
