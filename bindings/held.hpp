// A Python object that C++ holds, copies and drops without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

namespace unisono::python {

namespace nb = nanobind;

using Held = std::shared_ptr<nb::object>;

// Holds a Python object. Requires the GIL, as does every use of the object. Copying and dropping need no GIL.
inline Held hold(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* held) {
            const nb::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace unisono::python
