// The outputs of calls: their shapes, and the arrays that hold them.
#pragma once

#include <optional>
#include <string>

#include "array.hpp"
#include "new_array.hpp"
#include "unisono/error.hpp"

namespace unisono::python {

inline Shape with_ranks(const Shape& shape, int size) {
  Shape whole{static_cast<std::size_t>(size)};
  whole.append(shape.begin(), shape.end());
  return whole;
}

inline Shape without_ranks(const Array& array, int size, const char* what) {
  if (array.shape.empty() || array.shape[0] != static_cast<std::size_t>(size))
    throw UsageError(std::string(what) + " has shape " + text(array.shape) +
                     ": its first axis is the ranks, " + std::to_string(size) + ".");
  return {array.shape.begin() + 1, array.shape.end()};
}

// The output of a call: `out`, or a new array like `like` if out is None. Throws UsageError unless it has
// `shape`, and the dtype and memory of the input, which messages call `input`.
class Output {
 public:
  Output(nb::handle out, nb::handle like, const Array& in, const Shape& shape, nb::handle stream,
         const char* input = "x")
      : object(!out.is_none()                ? nb::borrow(out)
               : in.memory == Memory::device ? empty_like_on(like, shape, in.device, stream)
                                             : empty_like(like, shape)),
        array(object, "out", true) {
    if (array.dtype != in.dtype)
      throw UsageError("out has dtype " + std::string(name_of(array.dtype)) + ", but " + input + " has " +
                       std::string(name_of(in.dtype)) + ": give both the same.");
    if (array.shape != shape)
      throw UsageError("out has shape " + text(array.shape) + ": this call gives " + text(shape) + ".");
    if (array.memory != in.memory)
      throw UsageError(std::string(input) +
                       " and out are not both on the CPU or both on the GPU: move one of them.");
    if (array.memory == Memory::device && array.device >= 0 && in.device >= 0 && array.device != in.device)
      throw UsageError(std::string(input) + " is on GPU " + std::to_string(in.device) + ", but out on GPU " +
                       std::to_string(array.device) + ": move one of them.");
  }
  nb::object object;
  Array array;
};

// The output of a call that has one at its root only. On a GPU the others may pass theirs too, which tells
// them where the root's lies in symmetric memory.
class OutputAtRoot {
 public:
  OutputAtRoot(nb::handle out, nb::handle like, const Array& in, const Shape& shape, bool root,
               nb::handle stream)
      : root_(root) {
    if (root || (in.memory == Memory::device && !out.is_none()))
      output_.emplace(out, like, in, shape, stream);
  }
  void* data() const { return output_ ? output_->array.data : nullptr; }
  nb::object object() const { return root_ ? output_->object : nb::object(nb::none()); }

 private:
  bool root_;
  std::optional<Output> output_;
};

}  // namespace unisono::python
