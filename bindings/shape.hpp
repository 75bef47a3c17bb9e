// The extents of an array, in place: a small call would spend more on memory for them than on its data.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>

#include "unisono/error.hpp"

namespace unisono::python {

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::size_t> extents) : Shape(extents.begin(), extents.end()) {}
  template <class At>
  Shape(At begin, At end) {
    append(begin, end);
  }
  Shape(const Shape& other) noexcept : dims_(other.dims_) { std::copy_n(other.extents_, dims_, extents_); }
  Shape& operator=(const Shape& other) noexcept {
    if (&other != this) dims_ = other.dims_, std::copy_n(other.extents_, dims_, extents_);
    return *this;
  }

  // Throws UsageError for more dimensions than any library's arrays have, as those below do.
  void push_back(std::size_t extent) {
    resize(dims_ + 1);
    back() = extent;
  }
  // Takes the extents of an array, and returns the number of its elements.
  template <class Extent>
  std::size_t assign(const Extent* extents, std::size_t dims) {
    resize(dims);
    std::size_t count = 1;
    for (std::size_t i = 0; i < dims; ++i) count *= extents_[i] = static_cast<std::size_t>(extents[i]);
    return count;
  }
  template <class At>
  void append(At begin, At end) {
    for (; begin != end; ++begin) push_back(static_cast<std::size_t>(*begin));
  }

  const std::size_t* begin() const { return extents_; }
  const std::size_t* end() const { return extents_ + dims_; }
  const std::size_t* data() const { return extents_; }
  std::size_t size() const { return dims_; }
  bool empty() const { return dims_ == 0; }
  std::size_t operator[](std::size_t dim) const { return extents_[dim]; }
  std::size_t& back() { return extents_[dims_ - 1]; }
  std::size_t back() const { return extents_[dims_ - 1]; }
  bool operator==(const Shape& other) const {
    bool same = dims_ == other.dims_;
    for (std::size_t i = 0; same && i < dims_; ++i) same = extents_[i] == other.extents_[i];
    return same;
  }

 private:
  void resize(std::size_t dims) {
    if (dims > kMost) throw UsageError("an array has more than 64 dimensions: reshape it.");
    dims_ = dims;
  }
  static constexpr std::size_t kMost = 65;  // and one for the ranks
  std::size_t dims_ = 0;
  std::size_t extents_[kMost];
};

// Returns "(2, 3)", as Python writes it.
std::string text(const Shape& shape);
nanobind::tuple tuple_of(const Shape& shape);

}  // namespace unisono::python
