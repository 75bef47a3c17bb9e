#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <type_traits>

#include "bootstrap.hpp"
#include "docstrings.hpp"
#include "memory_docstrings.hpp"
#include "module.hpp"
#include "moe_docstrings.hpp"
#include "norm_docstrings.hpp"
#include "py_moe.hpp"
#include "py_norm.hpp"
#include "py_window.hpp"
#include "short_way.hpp"
#include "signals.hpp"
#include "window_docstrings.hpp"

namespace unisono::python {
namespace {

std::vector<std::string> algorithms_of(const std::string& collective, const std::string& device) {
  std::vector<std::string> names;
  for (const std::string_view name : algorithms(read_collective(collective), read_level(device)))
    names.emplace_back(name);
  return names;
}

// One of the class's methods, as a constant.
template <auto method>
using Method = std::integral_constant<decltype(method), method>;

// Calls define(name, method, docstring, parameters...) for every call.
template <class Define>
void define_calls(const Define& define) {
  using namespace nb::literals;
  using C = PyCommunicator;
  const auto none = nb::none();
  define("barrier", Method<&C::barrier>(),
         "Returns once every rank has called it. Raises the errors of every call.");
  define("all_reduce", Method<&C::all_reduce>(), doc::kAllReduce, "x"_a, "op"_a = "sum",
         "out"_a.none() = none, "algorithm"_a = none, "stream"_a = none, "wire"_a = none, "factor"_a = 1.0);
  define("reduce", Method<&C::reduce>(), doc::kReduce, "x"_a, "root"_a = 0, "op"_a = "sum",
         "out"_a.none() = none, "algorithm"_a = none, "stream"_a = none, "factor"_a = 1.0);
  define("broadcast", Method<&C::broadcast>(), doc::kBroadcast, "x"_a, "root"_a = 0, "out"_a.none() = none,
         "algorithm"_a = none, "stream"_a = none);
  define("all_gather", Method<&C::all_gather>(), doc::kAllGather, "x"_a, "out"_a.none() = none,
         "algorithm"_a = none, "stream"_a = none);
  define("gather", Method<&C::gather>(), doc::kGather, "x"_a, "root"_a = 0, "out"_a.none() = none,
         "algorithm"_a = none, "stream"_a = none);
  define("reduce_scatter", Method<&C::reduce_scatter>(), doc::kReduceScatter, "x"_a, "op"_a = "sum",
         "out"_a.none() = none, "algorithm"_a = none, "stream"_a = none, "factor"_a = 1.0);
  define("scatter", Method<&C::scatter>(), doc::kScatter, "x"_a.none(), "root"_a = 0, "out"_a.none() = none,
         "algorithm"_a = none, "stream"_a = none);
  define("all_to_all", Method<&C::all_to_all>(), doc::kAllToAll, "x"_a, "out"_a.none() = none,
         "algorithm"_a = none, "stream"_a = none);
  define("all_to_all_v", Method<&C::all_to_all_v>(), doc::kAllToAllV, "x"_a, "send_counts"_a, "recv_counts"_a,
         "out"_a.none() = none, "algorithm"_a = none, "stream"_a = none);
  define("send", Method<&C::send>(), doc::kSend, "x"_a, "peer"_a, "algorithm"_a = none, "stream"_a = none,
         "tag"_a = none);
  define("recv", Method<&C::recv>(), doc::kRecv, "out"_a, "peer"_a, "algorithm"_a = none, "stream"_a = none,
         "tag"_a = none);
  define("send_recv", Method<&C::send_recv>(), doc::kSendRecv, "x"_a, "dst"_a, "out"_a.none(), "src"_a,
         "algorithm"_a = none, "stream"_a = none);
  define("batch_send_recv", Method<&C::batch_send_recv>(), doc::kBatchSendRecv, "sends"_a, "recvs"_a,
         "stream"_a = none);
}

}  // namespace

void bind_communicator(nb::module_& module) {
  using namespace nb::literals;
  using C = PyCommunicator;
  const auto none = nb::none();
  // NOLINTNEXTLINE(bugprone-unused-raii): the module keeps it
  nb::class_<Bootstrap>(module, "Bootstrap", "A way for ranks to meet; see unisono.bootstrap.");
  module.def(
      "thread_bootstraps",
      [](int size, double timeout_s) {
        return thread_bootstraps(size, std::chrono::duration<double>(timeout_s));
      },
      "size"_a, "timeout_s"_a, "Returns the bootstraps of `size` ranks that are threads of this process.");

  module.def(
      "device_count", &device_count,
      "Returns the number of GPUs that CUDA sees here; 0 without a driver, or without CUDA in this build.");

  using R = PyRegistration;
  nb::class_<R>(module, "Registration", doc::kRegistration)
      .def("close", &R::close, doc::kCloseRegistration)
      .def_prop_ro("closed", &R::closed, "Whether it, or the communicator, has been closed.")
      .def_prop_ro("nbytes", &R::bytes, "The bytes that each rank has registered.")
      .def("__repr__",
           [](const R& self) { return "<Registration of " + std::to_string(self.bytes()) + " bytes>"; })
      .def("__enter__", [](nb::object self) { return self; })
      .def(
          "__exit__",
          [](R& self, nb::handle error, nb::handle, nb::handle) {
            if (error.is_none()) self.close();
          },
          "error"_a.none(), "value"_a.none(), "traceback"_a.none());

  nb::class_<PyWork>(module, "Work", doc::kWork)
      .def("wait", &PyWork::wait, "timeout_s"_a = none, doc::kWait)
      .def_prop_ro("done", &PyWork::done, "Whether the call has ended, also with an error.")
      .def_prop_ro(
          "error",
          [](nb::handle self) -> nb::object {
            if (!nb::cast<PyWork&>(self).failed()) return nb::none();
            try {
              self.attr("wait")();
            } catch (const nb::python_error& error) { return nb::borrow(error.value()); }
            return nb::none();
          },
          "The exception with which the call has ended. None: it is under way, or has succeeded.");

  nb::class_<PyReceived>(module, "Received", doc::kReceived)
      .def_ro("array", &PyReceived::array, "The array that recv was given.")
      .def_prop_ro(
          "source", [](const PyReceived& self) { return self.now().source; },
          "The sender's rank. -1: the receive is under way.")
      .def_prop_ro(
          "nbytes", [](const PyReceived& self) { return self.now().bytes; }, "The bytes of the message.")
      .def("__repr__", [](const PyReceived& self) {
        const Received it = self.now();
        return "<Received: " + std::to_string(it.bytes) + " bytes of rank " + std::to_string(it.source) + ">";
      });
  module.attr("ANY_SOURCE") = Communicator::kAnySource;

  nb::class_<C::Bind> bind(module, "Bind", doc::kBind);
  define_calls([&](const char* name, auto method, const char* docstring, const auto&... parameters) {
    bind.def(name, C::binds(method.value), parameters..., docstring);
  });

  nb::class_<C> communicator(module, "Communicator", nb::is_weak_referenceable(), doc::kCommunicator);
  define_calls([&](const char* name, auto method, const char* docstring, const auto&... parameters) {
    communicator.def(name, C::may_begin(method.value), parameters..., "asynchronous"_a = false,
                     "timeout_s"_a = none, docstring);
    ShortWay<method.value>::open(communicator.attr(name), parameters...);
  });
  communicator
      .def(
          "__init__",
          [](C* self, nb::object bootstrap, std::optional<double> timeout_s, std::optional<bool> check,
             std::optional<int> device, int max_sms, bool peer_access,
             const std::optional<Communicator::Fabric>& fabric, nb::object transport) {
            const Communicator::Options options{.timeout_s = timeout_s,
                                                .device = device,
                                                .max_sms = max_sms,
                                                .peer_access = peer_access,
                                                .check = check,
                                                .transport = transport_factory(std::move(transport)),
                                                .fabric = fabric,
                                                .while_waiting = check_signals(),
                                                .before_rest = &C::release_gil};
            std::shared_ptr<Bootstrap> meeting;
            if (nb::isinstance<Bootstrap>(bootstrap))
              meeting = nb::cast<std::shared_ptr<Bootstrap>>(bootstrap);
            else meeting = std::make_shared<PythonBootstrap>(std::move(bootstrap));
            const nb::gil_scoped_release released;  // the other ranks may be threads that wait for the GIL
            new (self) C(std::move(meeting), options);
          },
          "bootstrap"_a, "timeout_s"_a = none, "check"_a = none, "device"_a = none, "max_sms"_a = 0,
          "peer_access"_a = true, "fabric"_a = none, "transport"_a = none)
      .def_prop_ro("rank", &C::rank, "This rank's number, from 0.")
      .def_prop_ro("size", &C::size, "The number of ranks.")
      .def_prop_ro("nodes", &C::nodes, "The ranks of each node, in rank order. Ranks of a node share memory.")
      .def_prop_ro("transport", &C::transport,
                   "The name of the transport between nodes: MPI, gloo, the fabric, or the user's own. "
                   "Empty: the ranks "
                   "are on one node.")
      .def_prop_ro("closed", &C::closed,
                   "Whether the communicator is closed, by close() or by an interrupt within a call.")
      .def_prop_rw(
          "check", &C::check, &C::set_check,
          "Whether the ranks' calls are compared before anything moves. May be set, between the same "
          "calls on every rank.")
      .def("close", &C::close, doc::kClose)
      .def("__repr__",
           [](const C& self) {
             return "<Communicator: rank " + std::to_string(self.rank()) + " of " +
                    std::to_string(self.size()) + ">";
           })
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](C& self, const nb::args&) { self.close(); })
      .def_prop_ro(
          "bind", [](nb::object self) { return C::Bind{std::move(self)}; }, doc::kBind)
      .def_prop_ro("device", &C::device, "The CUDA ordinal of this rank's GPU, or None.")
      .def_prop_ro("peer_access", &C::peer_access,
                   "Whether the ranks' GPUs reach each other's memory. If not, messages go through pinned "
                   "host memory. False without a GPU.")
      .def_prop_ro("nvlink", &C::nvlink,
                   "Whether the ranks' GPUs reach each other over NVLink, as far as the processes see each "
                   "other's GPUs (CUDA_VISIBLE_DEVICES). The algorithms ..._ll128 need it.")
      .def_prop_ro(
          "kernel_copies", &C::kernel_copies,
          "How the kernel's copies between the processes of this rank's node compare with two copies "
          "through a chunk, by which the built-in plan for CPUs goes: 'fast' or 'slow', as the first "
          "communicator of these processes has measured. 'none': ranks of one process, another lane, "
          "or a kernel that allows no such copies.")
      .def("split", &C::split, "color"_a, "key"_a = 0, doc::kSplit)
      .def("synchronize", &C::synchronize, "stream"_a = none, doc::kSynchronize)
      .def("empty", &C::empty, "shape"_a, "dtype"_a = "float32", "device"_a = none, doc::kEmpty)
      .def("register", &C::register_array, "x"_a.none(), doc::kRegister)
      .def("moe", &make_moe, "num_experts"_a, "top_k"_a, "hidden"_a, "max_tokens"_a, "dtype"_a = "bfloat16",
           "options"_a = none, doc::kMoeOf)
      .def("window", &make_window, "nbytes"_a, doc::kWindowOf)
      .def("all_reduce_rms_norm", &PyNorm::rms, "x"_a, "residual"_a, "weight"_a, "eps"_a = 1e-6,
           nb::kw_only(), "options"_a = none, "stream"_a = none, doc::kAllReduceRmsNorm)
      .def("all_reduce_layer_norm", &PyNorm::layer, "x"_a, "residual"_a, "weight"_a, "bias"_a = none,
           "eps"_a = 1e-5, nb::kw_only(), "options"_a = none, "stream"_a = none, doc::kAllReduceLayerNorm)
      .def_static("algorithms", &algorithms_of, "collective"_a, "device"_a = "cpu",
                  "Returns the names that `algorithm` may have for a collective on `cpu` or `cuda`, or for "
                  "how `nodes` work together.")
      .def("plan", &C::plan, "collective"_a, "bytes"_a, "symmetric"_a = false, "device"_a = none,
           "in_place"_a = false, "wire"_a = none, doc::kPlan)
      .def_prop_ro("card", &C::card, doc::kCard)
      .def("sms", &C::sms, "collective"_a, "bytes"_a, "algorithm"_a, "symmetric"_a = false,
           "in_place"_a = false,
           "Returns the number of SMs that the largest kernel of such a call takes; 0 if copy engines do all "
           "of it. bytes: of the call's larger buffer.")
      .def("set_plan", &C::set_plan, "entries"_a, "device"_a = none, doc::kSetPlan)
      .def("raise_if_failed", &C::raise_if_failed,
           "Raises the communicator's failure, also a rank's death that no call has met yet.")
      .def("_set_shape", &C::set_shape, "blocks"_a = 0, "threads"_a = 0, "piece_bytes"_a = 0,
           "Sets the shape of later kernels, for measurements. 0: Unisono chooses. The same on every rank.")
      .def("_reset_shape", &C::reset_shape, "Gives later kernels the plan's shape again.");
}

}  // namespace unisono::python
