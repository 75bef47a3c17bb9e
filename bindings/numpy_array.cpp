// Reads numpy arrays (ml_dtypes' too) by the fields of numpy's C struct: a small call spends less on them
// than on the buffer protocol.
#include <cstring>
#include <optional>
#include <utility>

#include "array.hpp"
#include "dtypes.hpp"
#include "objects.hpp"

namespace unisono::python {
namespace {

// The first fields of PyArrayObject_fields, the same in every numpy of ABI 1 and 2 (NumPy reference, "Python
// types and C-structures").
struct ArrayObject {
  PyObject base;
  void* data;
  int dims;
  Py_ssize_t *extents, *strides;
  PyObject *owner, *dtype;
  int flags;
};

// The target of __array_struct__ (NumPy reference, "The array interface protocol", version 3).
struct ArrayStruct {
  int two, dims;
  char kind;
  int item_bytes, flags;
  Py_ssize_t *extents, *strides;
  void* data;
  PyObject* description;
};
constexpr int kContiguous = 0x1, kWriteable = 0x400;

// Returns whether numpy's own description of an array agrees with its fields.
bool same(const ArrayObject& fields, const ArrayStruct& described) {
  const auto dims = static_cast<std::size_t>(described.dims);
  return fields.data == described.data && fields.dims == described.dims &&
         (dims == 0 || std::memcmp(fields.extents, described.extents, dims * sizeof(Py_ssize_t)) == 0) &&
         ((fields.flags ^ described.flags) & (kContiguous | kWriteable)) == 0;
}

// Returns whether the type is numpy.ndarray itself, no subclass and no Python class of that name.
bool is_ndarray(PyTypeObject* type) {
  return !(type->tp_flags & Py_TPFLAGS_HEAPTYPE) && std::strcmp(type->tp_name, "numpy.ndarray") == 0 &&
         type->tp_basicsize >= static_cast<Py_ssize_t>(sizeof(ArrayObject));
}

// numpy.ndarray, once an array has shown that its fields can be read; and the dtypes that calls have met.
struct Known {
  PyTypeObject* type = nullptr;
  DtypeCache dtypes;
} known;

}  // namespace

void forget_numpy() {
  Py_XDECREF(std::exchange(known.type, nullptr));
  known.dtypes.forget();
}

template <class Fields>
void Array::take_fields(const Fields& fields, const char* what, bool written) {
  if (!(fields.flags & kContiguous)) refuse_gaps(what, "numpy.ascontiguousarray");
  if (written && !(fields.flags & kWriteable)) refuse_read_only(what);
  data = fields.data;
  count = shape.assign(fields.extents, static_cast<std::size_t>(fields.dims));
}

bool Array::from_numpy(nb::handle array, const char* what, bool written) {
  if (Py_TYPE(array.ptr()) != known.type) {
    if (known.type || !is_ndarray(Py_TYPE(array.ptr()))) return false;
    from_array_struct(array, what, written);
    return true;
  }
  const auto* fields = reinterpret_cast<const ArrayObject*>(array.ptr());
  const auto found = known.dtypes.find(fields->dtype);
  if (!found) {
    from_array_struct(array, what, written);
    return true;
  }
  dtype = *found;
  take_fields(*fields, what, written);
  return true;
}

void Array::from_array_struct(nb::handle array, const char* what, bool written) {
  dtype = known.dtypes.learn(get(array, names().dtype), what);
  const nb::object capsule = get(array, names().array_struct);
  const auto* fields = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (!fields) throw nb::python_error();
  take_fields(*fields, what, written);
  PyTypeObject* type = Py_TYPE(array.ptr());
  if (!known.type && is_ndarray(type) && same(*reinterpret_cast<const ArrayObject*>(array.ptr()), *fields)) {
    Py_INCREF(type);
    known.type = type;
  }
}

}  // namespace unisono::python
