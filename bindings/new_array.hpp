// New Python arrays: outputs that the caller does not pass, and symmetric memory of a GPU.
#pragma once

#include <nanobind/nanobind.h>

#include "array.hpp"

namespace unisono::python {

// Returns a new array of the library (numpy, torch, cupy) and dtype of `like`.
nb::object empty_like(nb::handle like, const Shape& shape);
// Does the same on a GPU, as work on `stream`. A library may reuse memory that only its own stream is done
// with. None: the library's current stream.
nb::object empty_like_on(nb::handle like, const Shape& shape, int device, nb::handle stream);

// Returns symmetric device memory as an array of the library in use: torch, else cupy, else plain DLPack.
nb::object device_array(void* data, std::size_t bytes, int device, DType type, const Shape& extents,
                        const nb::capsule& owner);

}  // namespace unisono::python
