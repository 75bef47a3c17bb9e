// Python arrays as memory, without a copy: numpy and ml_dtypes arrays, torch tensors, cupy arrays, and
// objects with the CUDA array interface or DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

#include "shape.hpp"
#include "unisono/types.hpp"

namespace unisono::python {

namespace nb = nanobind;

enum class Library { other, torch, cupy };

// The memory of a Python array, and its layout.
class Array {
 public:
  Array();
  // what: the array's name in messages. written: whether the call writes to it.
  // Throws UsageError if the array is not contiguous, is on neither CPU nor CUDA device, has an unknown
  // dtype, or is read-only but to be written.
  Array(nb::handle array, const char* what, bool written);
  Array(Array&& other) noexcept;
  Array& operator=(Array&&) = delete;
  ~Array() {
    if (held_) PyBuffer_Release(&view_);
  }

  // Returns the stream that a call on this array is enqueued on, for `stream_handle`: `asked` (a handle, or
  // an object that has one), else the current stream of the array's library.
  nb::object stream(nb::handle asked) const;
  Library library() const { return library_; }
  // Returns the object that keeps the memory alive besides the array itself; null if there is none.
  nb::object owner() const { return owner_; }

  void* data = nullptr;
  Memory memory = Memory::host;
  int device = 0;  // of device memory; -1: unknown
  DType dtype = DType::f32;
  Shape shape;
  std::size_t count = 1;

 private:
  // Each reads one protocol. A bool result: whether the array offers it.
  bool from_numpy(nb::handle array, const char* what, bool written);         // numpy_array.cpp
  void from_array_struct(nb::handle array, const char* what, bool written);  // numpy_array.cpp
  template <class Fields>                                                    // of numpy's two structs
  void take_fields(const Fields& fields, const char* what, bool written);
  bool from_buffer(nb::handle array, const char* what, bool written);
  bool from_torch_table(nb::handle array);                            // torch_tensor.cpp
  void from_torch(nb::handle array, const char* what, bool written);  // torch_tensor.cpp
  void from_cuda(nb::handle array, const char* what, bool written);
  void from_dlpack(nb::handle array, const char* what, bool written);
  // Chooses among those that return nothing. Returns false if the object is no array.
  bool from_others(nb::handle array, const char* what, bool written);

  Library library_ = Library::other;
  nb::object owner_;  // keeps the memory alive
  Py_buffer view_{};
  bool held_ = false;
};

// Throw a UsageError about the array that messages call `what`. copies: the function of the array's library
// that makes a contiguous copy.
[[noreturn]] void refuse_read_only(const char* what);
[[noreturn]] void refuse_gaps(const char* what, const char* copies);

// Returns whether the elements lie in C order without gaps. Units: elements, of strides too.
bool contiguous(std::size_t dims, const std::int64_t* extents, const std::int64_t* strides);

// Returns the handle of a stream as users have it (a torch or cupy stream, or a number). None: the legacy
// default stream.
void* stream_handle(nb::handle stream);

// Returns torch's current stream on a GPU, as a number.
nb::object current_torch_stream(int device);

// Drops the types and functions of other libraries that are kept from call to call. They would otherwise
// outlive the interpreter.
void forget_libraries();
void forget_torch();  // the parts of forget_libraries
void forget_numpy();

}  // namespace unisono::python
