// Bound calls: comm.bind.all_reduce(x, out=y) reads its arguments once, and returns a function that makes
// the call each time. Docstrings are in docstrings.hpp.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "unisono/communicator.hpp"

namespace unisono::python {

namespace nb = nanobind;

// Arguments of Communicator::run that own what they are views of.
struct OwnedCall {
  explicit OwnedCall(const Call& from) : call(from), algorithm(from.algorithm) {}
  operator Call() const {  // NOLINT(google-explicit-constructor): takes the place of the Call
    Call same = call;
    same.algorithm = algorithm;
    return same;
  }
  Call call;
  std::string algorithm;
};
template <class T>
T owned(const T& argument) {
  return argument;
}
inline OwnedCall owned(const Call& call) { return OwnedCall(call); }
template <class T>
std::vector<T> owned(std::span<const T> some) {
  return {some.begin(), some.end()};
}

// Requires the GIL, except for `run`.
struct PyBound {
  std::function<Received(Communicator&)> run;  // none: the call has nothing to do
  nb::list kept;                               // objects that have the call's buffers
  nb::object result, stream;                   // stream: of a call on GPU memory
  void* handle = nullptr;                      // of the stream
  bool on_gpu = false;
  bool small = false;     // PyCommunicator::small
  bool receives = false;  // by a tag: each call returns a Received
};

}  // namespace unisono::python
