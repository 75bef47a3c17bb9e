// Arguments from Python that are taken as they are given, so that a wrong one is refused in words.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace unisono::python {

// Any integer, also one which no int holds.
struct RankNumber {
  nanobind::object given;  // a Python int
};

// A name, or what another library has in its place (torch's ReduceOp), by its str.
struct OpName {
  nanobind::object given;  // a Python str, which holds the text
  std::string_view text;
};

}  // namespace unisono::python

template <>
struct nanobind::detail::type_caster<unisono::python::RankNumber> {
  NB_TYPE_CASTER(unisono::python::RankNumber, const_name("int"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    if (!PyIndex_Check(source.ptr())) return false;
    value.given = steal(PyNumber_Index(source.ptr()));
    if (!value.given.is_valid()) PyErr_Clear();
    return value.given.is_valid();
  }
};

template <>
struct nanobind::detail::type_caster<unisono::python::OpName> {
  NB_TYPE_CASTER(unisono::python::OpName, const_name("str"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    if (source.is_none()) return false;
    value.given = steal(PyObject_Str(source.ptr()));
    Py_ssize_t length = 0;
    const char* text = value.given.is_valid() ? PyUnicode_AsUTF8AndSize(value.given.ptr(), &length) : nullptr;
    if (!text) PyErr_Clear();
    else value.text = {text, static_cast<std::size_t>(length)};
    return text != nullptr;
  }
};
