// A rank as an argument from Python: any integer, so that one which no int holds is refused in words.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono::python {

struct RankNumber {
  nanobind::object given;  // a Python int
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
