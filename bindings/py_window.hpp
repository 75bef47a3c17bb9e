// unisono.Window of Python arrays.
#pragma once

#include <memory>
#include <vector>

#include "py_communicator.hpp"
#include "unisono/window.hpp"

namespace unisono::python {

class PyWindow {
 public:
  PyWindow(PyCommunicator& communicator, std::size_t bytes);

  std::size_t bytes() const { return window_->bytes(); }
  // Returns this rank's memory as an array of bytes.
  nb::object array() const;

  void begin(nb::handle stream);
  void put_signal(nb::handle x, int peer, long long offset, nb::handle stream);
  void wait_signals(const std::vector<int>& peers, int count, nb::handle stream);

 private:
  // Returns the communicator, which a window does not keep: a cache of windows by communicator may.
  nb::object communicator() const;
  void* handle_of(nb::handle stream) const;

  nb::object of_;  // a weak reference
  int device_;
  std::shared_ptr<Window> window_;  // which arrays keep too
};

std::unique_ptr<PyWindow> make_window(PyCommunicator& communicator, long long bytes);

}  // namespace unisono::python
