// New Python arrays: outputs that the caller does not pass, and arrays over Unisono's own memory.
#pragma once

#include <nanobind/nanobind.h>

#include "array.hpp"

namespace unisono::python {

// Returns a new array of the library (numpy, torch, cupy) and dtype of `like`.
nb::object empty_like(nb::handle like, const Shape& shape);
// Does the same for an array of another dtype.
nb::object empty_like(nb::handle like, const Shape& shape, DType dtype);
// Does the same on a GPU, as work on `stream`. A library may reuse memory that only its own stream is done
// with. None: the library's current stream.
nb::object empty_like_on(nb::handle like, const Shape& shape, int device, nb::handle stream);
nb::object empty_like_on(nb::handle like, const Shape& shape, DType dtype, int device, nb::handle stream);

// Returns the library of GPU arrays that the program has imported: torch, else cupy.
Library imported_library();

// Returns memory as an array of a library. other: numpy; on a GPU, an object with DLPack.
nb::object array_over(void* data, Memory memory, int device, DType type, const Shape& extents,
                      Library library, const nb::capsule& owner);

}  // namespace unisono::python
