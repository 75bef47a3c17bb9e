// Bootstraps that are written in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "unisono/bootstrap.hpp"
#include "unisono/error.hpp"

namespace unisono::python {

namespace nb = nanobind;

// A Python object with rank, size and all_gather(bytes) -> list[bytes]. Made with the GIL, used without it.
class PythonBootstrap final : public Bootstrap {
 public:
  explicit PythonBootstrap(nb::object object)
      : object_(std::move(object)),
        rank_(nb::cast<int>(object_.attr("rank"))),
        size_(nb::cast<int>(object_.attr("size"))) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  ~PythonBootstrap() override {
    const nb::gil_scoped_acquire gil;
    object_.reset();
  }
  std::vector<std::string> all_gather(const std::string& data) override {
    const nb::gil_scoped_acquire gil;
    std::vector<std::string> all;
    const nb::object gathered = object_.attr("all_gather")(nb::bytes(data.data(), data.size()));
    if (!PySequence_Check(gathered.ptr()))
      throw UsageError("the bootstrap's all_gather returned no list of bytes: return one for each rank.");
    for (const nb::handle one : gathered) {
      if (!PyBytes_Check(one.ptr()))
        throw UsageError(
            "the bootstrap's all_gather returned a list of other objects than bytes: return bytes for each "
            "rank.");
      all.emplace_back(PyBytes_AS_STRING(one.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(one.ptr())));
    }
    return all;
  }

 private:
  nb::object object_;
  int rank_, size_;
};

}  // namespace unisono::python
