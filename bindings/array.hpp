// Python arrays as memory: numpy arrays (ml_dtypes too), torch tensors, cupy arrays and what else speaks the
// CUDA array interface or DLPack, without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>
#include <vector>

#include "unisono/types.hpp"

namespace unisono::python {

namespace nb = nanobind;
using Shape = std::vector<std::size_t>;

// Holds on to the array's memory while it lives. UsageError for what is not contiguous, on another device, or
// of a type that Unisono does not know; `what` is its name in the message.
class Array {
 public:
  Array() = default;
  Array(nb::handle array, const char* what, bool written);
  Array(Array&& other) noexcept;
  Array& operator=(Array&&) = delete;
  ~Array();

  // The stream that a call on this array is enqueued on: `asked` (a handle, or an object with one), else the
  // current one of the array's library. For `stream_handle`.
  nb::object stream(nb::handle asked) const;

  void* data = nullptr;
  Memory memory = Memory::host;
  int device = 0;  // of device memory
  DType dtype = DType::f32;
  Shape shape;
  std::size_t count = 1;

 private:
  bool from_buffer(nb::handle array, const char* what, bool written);
  void from_extension_type(nb::handle array, DType known, const char* what, bool written);
  bool from_torch_table(nb::handle array);
  bool from_others(nb::handle array, const char* what, bool written);  // false: it is no array
  void from_torch(nb::handle array, const char* what, bool written);
  void from_cuda(nb::handle array, const char* what, bool written);
  void from_dlpack(nb::handle array, const char* what, bool written);
  void measure();

  enum class Library { other, torch, cupy };
  Library library_ = Library::other;
  nb::object dlpack_;
  Py_buffer view_{};
  bool held_ = false;
};

// A new array of the kind (numpy, torch, cupy) and type of `like`.
nb::object empty_like(nb::handle like, const Shape& shape);
// The same on a GPU, where a library may give memory out again that only its own stream is done with: made as
// its next work on `stream`. None: its current one.
nb::object empty_like_on(nb::handle like, const Shape& shape, int device, nb::handle stream);

// The numpy dtype of a DType, and the DType of a numpy dtype, a name of either, or a torch dtype.
nb::object numpy_dtype(DType dtype);
const char* numpy_name(DType dtype);  // torch's is the same
DType read_dtype(nb::handle dtype);

// Symmetric device memory as an array of the library that is in use: torch, else cupy, else plain DLPack.
nb::object device_array(void* data, std::size_t bytes, int device, DType type, const Shape& extents,
                        const nb::capsule& owner);

// The handle of a stream as users have it (a torch or cupy stream, a number); None: the legacy default
// stream.
void* stream_handle(nb::handle stream);

std::string text(const Shape& shape);

// Gives up the types and functions of other libraries that are kept from call to call. For the interpreter's
// end: what they refer to would outlive it.
void forget_libraries();

// Returns a Python string for use in a message: what UTF-8 or a C string cannot hold is written as an escape.
std::string readable(nb::handle text);

}  // namespace unisono::python
