// Dtypes by the names and codes of numpy, torch, DLPack and the buffer protocol.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "unisono/types.hpp"

namespace unisono::python {

namespace nb = nanobind;

// Return the DType, or none if Unisono has no such type.
std::optional<DType> find_dtype(std::string_view name);   // numpy's, torch's or Unisono's
std::optional<DType> find_dtype(nb::dlpack::dtype type);  // DLPack's
std::optional<DType> find_dtype(const char* format, Py_ssize_t element_bytes);  // the buffer protocol's

// Throws a UsageError that lists the known dtypes. what: the array's name in the message.
[[noreturn]] void refuse_dtype(const std::string& name, const char* what);

// Returns the DType of a numpy or torch dtype, a Python type, or the name of a dtype.
// Throws UsageError if Unisono has no such type.
DType read_dtype(nb::handle dtype);

const char* numpy_name(DType dtype);  // torch's is the same
nb::object numpy_dtype(DType dtype);
nb::dlpack::dtype dlpack_of(DType dtype);

// The dtype objects of a library that calls have met. Each is kept alive, so that no other object can get its
// address.
class DtypeCache {
 public:
  std::optional<DType> find(const nb::object& dtype) const;
  // Finds the DType by the object's str, and keeps the object. Throws UsageError for an unknown dtype.
  DType learn(const nb::object& dtype, const char* what);
  void forget();

 private:
  std::vector<std::pair<PyObject*, DType>> met_;
};

}  // namespace unisono::python
