#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "arguments.hpp"
#include "module.hpp"
#include "new_array.hpp"
#include "py_window.hpp"
#include "window_docstrings.hpp"

namespace unisono::python {

PyWindow::PyWindow(PyCommunicator& communicator, std::size_t bytes)
    : of_(nb::weakref(nb::find(communicator))), device_(communicator.device().value_or(0)) {
  const PyCommunicator::WithoutGil released(communicator);
  window_ = std::make_shared<Window>(communicator.communicator_, bytes);
}

nb::object PyWindow::communicator() const {
  nb::object alive = of_();
  if (alive.is_none())
    throw UsageError("the window's communicator is gone: keep it as long as the window is used.");
  return alive;
}

void* PyWindow::handle_of(nb::handle stream) const {
  if (stream.is_none() && imported_library() == Library::torch)
    return stream_handle(current_torch_stream(device_));
  return stream_handle(stream);
}

nb::object PyWindow::array() const {
  const nb::capsule owner(new std::shared_ptr(window_),
                          [](void* held) noexcept { delete static_cast<std::shared_ptr<Window>*>(held); });
  return array_over(window_->local(), Memory::device, device_, DType::u8, {window_->bytes()},
                    imported_library(), owner);
}

void PyWindow::begin(nb::handle stream) {
  void* const handle = handle_of(stream);
  const nb::object alive = communicator();
  const PyCommunicator::WithoutGil released(nb::cast<PyCommunicator&>(alive));
  window_->begin(handle);
}

void PyWindow::put_signal(nb::handle x, int peer, long long offset, nb::handle stream) {
  const nb::object alive = communicator();
  const Array array(x, "x", false);
  if (array.memory != Memory::device) throw UsageError("x is on the CPU: a window takes arrays on its GPU.");
  window_->put_signal(array.data, array.count * size_of(array.dtype), peer, read_size("offset", offset),
                      handle_of(stream));
}

void PyWindow::wait_signals(const std::vector<int>& peers, int count, nb::handle stream) {
  const nb::object alive = communicator();
  window_->wait_signals(peers, count, handle_of(stream));
}

std::unique_ptr<PyWindow> make_window(PyCommunicator& communicator, long long bytes) {
  return std::make_unique<PyWindow>(communicator, read_size("nbytes", bytes));
}

void bind_window(nb::module_& module) {
  using namespace nb::literals;
  const auto none = nb::none();
  using W = PyWindow;
  nb::class_<W>(module, "Window", doc::kWindow)
      .def_prop_ro("nbytes", &W::bytes, "The bytes of each rank's memory.")
      .def("array", &W::array, doc::kWindowArray)
      .def("begin", &W::begin, "stream"_a = none, doc::kWindowBegin)
      .def("put_signal", &W::put_signal, "x"_a, "peer"_a, "offset"_a, "stream"_a = none, doc::kPutSignal)
      .def("wait_signals", &W::wait_signals, "peers"_a, "count"_a, "stream"_a = none, doc::kWaitSignals);
}

}  // namespace unisono::python
