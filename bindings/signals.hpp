// Handles Ctrl-C in the middle of a call.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>

namespace unisono::python {

// Returns a function that lets Ctrl-C through while a call waits on Python's main thread. Other threads
// handle no signals, and need no GIL for that.
inline std::function<void()> check_signals() {
  namespace nb = nanobind;
  const auto main =
      nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  return [main] {
    if (PyThread_get_thread_ident() != main) return;
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
}

}  // namespace unisono::python
