// unisono.Work: a call that has begun, with what it keeps alive. Docstrings are in docstrings.hpp.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "base/deadline.hpp"
#include "unisono/error.hpp"
#include "unisono/work.hpp"

namespace unisono::python {

namespace nb = nanobind;

// A call that has begun, and the Python objects that have its buffers. Requires the GIL, except for `work`.
struct PyBegun {
  Work work;
  nb::list kept;
};

// The message that a receive with a tag has taken, or will take.
struct PyReceived {
  nb::object array;
  std::shared_ptr<PyBegun> begun;  // null: the receive has ended
  Received received;
  Received now() const { return begun ? begun->work.received() : received; }
};

class PyWork {
 public:
  PyWork(std::shared_ptr<PyBegun> begun, nb::object result)
      : begun_(std::move(begun)), result_(std::move(result)) {}

  // Waits, and lets Ctrl-C through.
  nb::object wait(std::optional<double> timeout_s) {
    using Seconds = std::chrono::duration<double>;
    constexpr Seconds kSlice(0.05);
    const auto until = Clock::now() + Seconds(timeout_s ? check_timeout_s(*timeout_s) : 1e9);
    while (!begun_->work.done()) {
      const Seconds left = until - Clock::now();
      try {
        const nb::gil_scoped_release released;
        begun_->work.wait(std::clamp(left, Seconds(1e-6), kSlice).count());
      } catch (const TimeoutError&) {
        if (!begun_->work.done() && left <= kSlice)
          throw TimeoutError("the call has not ended within " + std::to_string(*timeout_s) +
                             " s and goes on: wait again, and leave its arrays alone until then.");
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    begun_->kept.clear();
    begun_->work.wait();  // throws the call's error
    return result_;
  }
  bool done() const { return begun_->work.done(); }
  bool failed() const { return begun_->work.error() != nullptr; }

 private:
  std::shared_ptr<PyBegun> begun_;
  nb::object result_;
};

}  // namespace unisono::python
