// Arguments that accept any Python value, so that a clear message can refuse a wrong one.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace unisono::python {

// Any integer, including one that no int holds.
struct RankNumber {
  nanobind::object number;  // a Python int
};

// A name, or another library's object for it (torch's ReduceOp), by the object's str.
struct OpName {
  nanobind::object object;  // a Python str, which holds the text
  std::string_view text;
};

}  // namespace unisono::python

template <>
struct nanobind::detail::type_caster<unisono::python::RankNumber> {
  NB_TYPE_CASTER(unisono::python::RankNumber, const_name("int"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    if (!PyIndex_Check(source.ptr())) return false;
    value.number = steal(PyNumber_Index(source.ptr()));
    if (!value.number.is_valid()) PyErr_Clear();
    return value.number.is_valid();
  }
};

template <>
struct nanobind::detail::type_caster<unisono::python::OpName> {
  NB_TYPE_CASTER(unisono::python::OpName, const_name("str"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    if (source.is_none()) return false;
    value.object = PyUnicode_CheckExact(source.ptr()) ? borrow(source) : steal(PyObject_Str(source.ptr()));
    if (value.object.is_valid() && PyUnicode_IS_COMPACT_ASCII(value.object.ptr())) {  // UTF-8 as it is
      value.text = {reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(value.object.ptr())),
                    static_cast<std::size_t>(PyUnicode_GET_LENGTH(value.object.ptr()))};
      return true;
    }
    Py_ssize_t length = 0;
    const char* text =
        value.object.is_valid() ? PyUnicode_AsUTF8AndSize(value.object.ptr(), &length) : nullptr;
    if (!text) PyErr_Clear();
    else value.text = {text, static_cast<std::size_t>(length)};
    return text != nullptr;
  }
};
