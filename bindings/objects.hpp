// Access to Python objects: attributes by names that are made once, loaded modules, and text for messages.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace unisono::python {

namespace nb = nanobind;

// The names that every array is asked for. attr("...") would make a string for each access.
struct AttributeNames {
  static PyObject* made(const char* name) { return PyUnicode_InternFromString(name); }
  PyObject* const data_ptr = made("data_ptr");
  PyObject* const is_contiguous = made("is_contiguous");
  PyObject* const is_neg = made("is_neg");
  PyObject* const is_cuda = made("is_cuda");
  PyObject* const is_cpu = made("is_cpu");
  PyObject* const get_device = made("get_device");
  PyObject* const dtype = made("dtype");
  PyObject* const shape = made("shape");
  PyObject* const array_struct = made("__array_struct__");
  PyObject* const detach = made("detach");
  PyObject* const view = made("view");
};
inline const AttributeNames& names() {
  static const AttributeNames names;
  return names;
}

inline nb::object own(PyObject* value) {
  if (!value) throw nb::python_error();
  return nb::steal(value);
}
inline bool has(nb::handle object, PyObject* name) { return PyObject_HasAttr(object.ptr(), name) != 0; }
inline nb::object get(nb::handle object, PyObject* name) { return own(PyObject_GetAttr(object.ptr(), name)); }
inline nb::object call_method(nb::handle object, PyObject* method) {
  return own(PyObject_CallMethodObjArgs(object.ptr(), method, nullptr));
}

// Returns cupy if the program has imported it, else None. Without it no array is cupy's.
inline nb::object cupy() {
  return nb::module_::import_("sys").attr("modules").attr("get")("cupy", nb::none());
}

// Returns a Python string for use in a message. A NUL, and text that UTF-8 cannot hold, become escapes.
inline std::string readable(nb::handle text) {
  const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  std::string read(PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr())));
  for (std::size_t at = 0; (at = read.find('\0', at)) != std::string::npos;) read.replace(at, 1, "\\0");
  return read;
}

}  // namespace unisono::python
