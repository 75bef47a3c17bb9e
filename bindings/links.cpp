// unisono._core.links: the kernels with which the bench measures links and starts GPUs together. Built only
// with CUDA.
#include "cuda/links.hpp"

#include <cuda_runtime.h>

#include <string>

#include "module.hpp"
#include "unisono/error.hpp"

namespace unisono::python {

namespace nb = nanobind;

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

void check(int code, const char* what) {
  if (code != 0) {
    throw Error(std::string(what) + " failed: " + cudaGetErrorString(static_cast<cudaError_t>(code)) + ".");
  }
}

}  // namespace

void bind_links(nb::module_& module) {
  namespace cl = cuda::links;
  struct Links {};
  // a class, so that the module's stubs stay in one file
  nb::class_<Links> links(
      module, "links", "Kernels for the bench, see src/cuda/links.hpp. Streams and addresses are integers.");
  links.def_static(
      "hold",
      [](Address stream, Address flag, std::uint32_t value, double deadline_s) {
        check(cl::hold(at<CUstream_st>(stream), at<const std::uint32_t>(flag), value, deadline_s),
              "links.hold");
      },
      nb::arg("stream"), nb::arg("flag"), nb::arg("value"), nb::arg("deadline_s"));
  links.def_static(
      "load",
      [](Address stream, Address from, std::size_t bytes, Address sink, int blocks) {
        check(cl::load(at<CUstream_st>(stream), at<const void>(from), bytes, at<void>(sink), blocks),
              "links.load");
      },
      nb::arg("stream"), nb::arg("from_"), nb::arg("bytes"), nb::arg("sink"), nb::arg("blocks"));
  links.def_static(
      "store",
      [](Address stream, Address to, std::size_t bytes, int blocks) {
        check(cl::store(at<CUstream_st>(stream), at<void>(to), bytes, blocks), "links.store");
      },
      nb::arg("stream"), nb::arg("to"), nb::arg("bytes"), nb::arg("blocks"));
  links.def_static(
      "bulk_copy",
      [](Address stream, Address to, Address from, std::size_t bytes, int blocks) {
        check(cl::bulk_copy(at<CUstream_st>(stream), at<void>(to), at<const void>(from), bytes, blocks),
              "links.bulk_copy");
      },
      nb::arg("stream"), nb::arg("to"), nb::arg("from_"), nb::arg("bytes"), nb::arg("blocks"));
  links.def_static(
      "round_trips",
      [](Address stream, Address mine, Address theirs, bool first, std::uint32_t rounds, Address elapsed_ns,
         double deadline_s) {
        check(cl::round_trips(at<CUstream_st>(stream), at<std::uint32_t>(mine), at<std::uint32_t>(theirs),
                              first, rounds, at<std::uint64_t>(elapsed_ns), deadline_s),
              "links.round_trips");
      },
      nb::arg("stream"), nb::arg("mine"), nb::arg("theirs"), nb::arg("first"), nb::arg("rounds"),
      nb::arg("elapsed_ns"), nb::arg("deadline_s"));
}

}  // namespace unisono::python
