#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <thread>

#include "array.hpp"
#include "bootstrap.hpp"
#include "docstrings.hpp"
#include "module.hpp"
#include "output.hpp"
#include "rank_number.hpp"
#include "unisono/communicator.hpp"

namespace unisono::python {
namespace {

using Algorithm = std::optional<std::string>;

// Lets Ctrl-C through while a call waits.
void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

Op read_op(std::string_view name) {
  if (const auto op = from_name<Op>(name, kOps)) return *op;
  throw UsageError("there is no op '" + std::string(name) + "': use sum, prod, min, max or avg.");
}

Wire read_wire(const std::optional<std::string>& name) {
  if (!name) return Wire::exact;
  if (const auto wire = from_name<Wire>(*name, kWires); wire && *wire != Wire::exact) return *wire;
  throw UsageError("there is no wire '" + *name + "': use fp8 or int8, or leave it out.");
}

Collective read_collective(std::string_view name) {
  if (const auto collective = from_name<Collective>(name, kCollectives)) return *collective;
  throw UsageError("there is no collective '" + std::string(name) + "'.");
}

// A number, or any iterable of numbers.
Shape read_shape(nb::handle shape) {
  try {
    if (PyIndex_Check(shape.ptr())) return {nb::cast<std::size_t>(nb::steal(PyNumber_Index(shape.ptr())))};
    return nb::cast<Shape>(nb::list(nb::borrow(shape)));
  } catch (const std::bad_cast&) {
  } catch (const nb::python_error&) {}
  throw UsageError(std::string(nb::repr(shape).c_str()) +
                   " is not a shape: pass a number of elements from 0, or a tuple of them.");
}

class PyCommunicator {
 public:
  PyCommunicator(std::shared_ptr<Bootstrap> bootstrap, const Communicator::Options& options)
      : communicator_(std::move(bootstrap), options) {}

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }
  bool closed() const { return communicator_.closed(); }
  bool check() const { return communicator_.check(); }
  void set_check(bool check) { communicator_.set_check(check); }

  // A call of another thread that waits ends with a UsageError; it has come back to Python when this returns,
  // so that the interpreter may end.
  void close() {
    communicator_.close();
    while (away_ > 0 && away_here == 0) {
      const nb::gil_scoped_release released;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void barrier() {
    const Away away(*this);
    communicator_.barrier();
  }

  nb::object all_reduce(nb::handle x, const char* op, nb::handle out, const Algorithm& algorithm,
                        nb::handle stream, const std::optional<std::string>& wire) {
    const Array in(x, "x", false);
    const Output to(out, x, in, in.shape);
    call(&Communicator::all_reduce, in, in.data, to.array.data, in.count,
         {algorithm, stream, read_op(op), 0, read_wire(wire)});
    return to.object;
  }

  nb::object reduce(nb::handle x, const RankNumber& given, const char* op, nb::handle out,
                    const Algorithm& algorithm, nb::handle stream) {
    const int root = number_of("root", given);
    const Array in(x, "x", false);
    const OutputAtRoot to(out, x, in, in.shape, rank() == root);
    call(&Communicator::reduce, in, in.data, to.data(), in.count, {algorithm, stream, read_op(op), root});
    return to.object();
  }

  nb::object broadcast(nb::handle x, const RankNumber& given, nb::handle out, const Algorithm& algorithm,
                       nb::handle stream) {
    const int root = number_of("root", given);
    const Array in(x, "x", out.is_none() && rank() != root);
    const How how{algorithm, stream, Op::sum, root};
    if (out.is_none()) {
      call(&Communicator::broadcast, in, in.data, in.data, in.count, how);
      return nb::borrow(x);
    }
    const Output to(out, x, in, in.shape);
    call(&Communicator::broadcast, in, in.data, to.array.data, in.count, how);
    return to.object;
  }

  nb::object all_gather(nb::handle x, nb::handle out, const Algorithm& algorithm, nb::handle stream) {
    const Array in(x, "x", false);
    const Output to(out, x, in, with_ranks(in.shape, size()));
    call(&Communicator::all_gather, in, in.data, to.array.data, in.count, {algorithm, stream});
    return to.object;
  }

  nb::object gather(nb::handle x, const RankNumber& given, nb::handle out, const Algorithm& algorithm,
                    nb::handle stream) {
    const int root = number_of("root", given);
    const Array in(x, "x", false);
    const OutputAtRoot to(out, x, in, with_ranks(in.shape, size()), rank() == root);
    call(&Communicator::gather, in, in.data, to.data(), in.count, {algorithm, stream, Op::sum, root});
    return to.object();
  }

  nb::object reduce_scatter(nb::handle x, const char* op, nb::handle out, const Algorithm& algorithm,
                            nb::handle stream) {
    const Array in(x, "x", false);
    const Output to(out, x, in, without_ranks(in, size(), "x"));
    call(&Communicator::reduce_scatter, in, in.data, to.array.data, to.array.count,
         {algorithm, stream, read_op(op)});
    return to.object;
  }

  nb::object scatter(nb::handle x, const RankNumber& given, nb::handle out, const Algorithm& algorithm,
                     nb::handle stream) {
    const int root = number_of("root", given);
    const How how{algorithm, stream, Op::sum, root};
    if (x.is_none()) {
      if (rank() == root) throw UsageError("scatter needs x at the root, rank " + std::to_string(root) + ".");
      if (out.is_none()) throw UsageError("scatter without x needs out, which says the shape and dtype.");
      const Array to(out, "out", true);
      call(&Communicator::scatter, to, nullptr, to.data, to.count, how);
      return nb::borrow(out);
    }
    const Array in(x, "x", false);
    const Output to(out, x, in, without_ranks(in, size(), "x"));
    call(&Communicator::scatter, in, in.data, to.array.data, to.array.count, how);
    return to.object;
  }

  nb::object all_to_all(nb::handle x, nb::handle out, const Algorithm& algorithm, nb::handle stream) {
    const Array in(x, "x", false);
    without_ranks(in, size(), "x");
    const Output to(out, x, in, in.shape);
    call(&Communicator::all_to_all, in, in.data, to.array.data, in.count / static_cast<std::size_t>(size()),
         {algorithm, stream});
    return to.object;
  }

  nb::object all_to_all_v(nb::handle x, const std::vector<std::size_t>& sends,
                          const std::vector<std::size_t>& receives, nb::handle out,
                          const Algorithm& algorithm, nb::handle stream) {
    const Array in(x, "x", false);
    std::size_t sent = 0, received = 0;
    for (const std::size_t count : sends) sent += count;
    for (const std::size_t count : receives) received += count;
    if (in.shape != Shape{sent})
      throw UsageError("x has shape " + text(in.shape) + ", but the send counts add up to " +
                       std::to_string(sent) + ": pass a 1-D x of that many.");
    const Output to(out, x, in, {received});
    const Call c = made(in, in.data, to.array.data, 0, {algorithm, stream});
    {
      const Away away(*this);
      communicator_.all_to_all_v(c, sends, receives);
    }
    return to.object;
  }

  void send(nb::handle x, const RankNumber& peer, const Algorithm& algorithm, nb::handle stream) {
    const int to = number_of("destination", peer);
    const Array in(x, "x", false);
    const Call c = made(in, in.data, nullptr, in.count, {algorithm, stream});
    const Away away(*this);
    communicator_.send(c, to);
  }

  nb::object recv(nb::handle out, const RankNumber& peer, const Algorithm& algorithm, nb::handle stream) {
    const int from = number_of("source", peer);
    const Array to(out, "out", true);
    const Call c = made(to, nullptr, to.data, to.count, {algorithm, stream});
    {
      const Away away(*this);
      communicator_.recv(c, from);
    }
    return nb::borrow(out);
  }

  nb::object send_recv(nb::handle x, const RankNumber& dst, nb::handle out, const RankNumber& src,
                       const Algorithm& algorithm, nb::handle stream) {
    const int to = number_of("destination", dst), from = number_of("source", src);
    const Array in(x, "x", false);
    const Output received(out, x, in, in.shape);
    const Call c = made(in, in.data, received.array.data, in.count, {algorithm, stream});
    {
      const Away away(*this);
      communicator_.send_recv(c, to, from);
    }
    return received.object;
  }

  nb::object device() const {
    const auto device = communicator_.device();
    return device ? nb::cast(*device) : nb::none();
  }

  bool peer_access() const { return communicator_.peer_access(); }

  void synchronize(nb::handle stream) {
    void* handle = stream_handle(stream);
    const Away away(*this);
    communicator_.synchronize(handle);
  }

  nb::object empty(nb::handle shape, nb::handle dtype, const std::optional<std::string>& device) {
    const Shape extents = read_shape(shape);
    const DType type = read_dtype(dtype);
    std::size_t bytes = size_of(type);
    for (const std::size_t extent : extents)
      if (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > static_cast<std::size_t>(PTRDIFF_MAX) / 2)
        throw ResourceError("an array of shape " + text(extents) +
                            " is more than memory can hold: check the shape.");
    const Memory memory = memory_of(device);
    auto buffer = [&] {
      const Away away(*this);
      return std::make_unique<Buffer>(communicator_.empty(bytes, memory));
    }();
    void* data = buffer->data();
    const nb::capsule owner(buffer.release(), [](void* held) noexcept { delete static_cast<Buffer*>(held); });
    if (memory == Memory::device)
      return device_array(data, bytes, *communicator_.device(), type, extents, owner);
    const nb::ndarray<nb::numpy, std::uint8_t> flat(data, {bytes}, owner);
    return nb::cast(flat).attr("view")(numpy_dtype(type)).attr("reshape")(nb::tuple(nb::cast(extents)));
  }

  // "cpu", "cuda", or None for where the communicator's arrays are.
  Memory memory_of(const std::optional<std::string>& device) const {
    if (!device) return communicator_.device() ? Memory::device : Memory::host;
    if (*device == "cpu") return Memory::host;
    if (*device != "cuda") throw UsageError("device='" + *device + "' is unknown: use cpu or cuda.");
    if (!communicator_.device())
      throw UsageError("the communicator has no GPU: make it with device=, on every rank.");
    return Memory::device;
  }

  std::string plan(const std::string& collective, std::size_t bytes, bool symmetric,
                   const std::optional<std::string>& device) const {
    return std::string(communicator_.plan(read_collective(collective), bytes, symmetric, memory_of(device)));
  }

  int sms(const std::string& collective, std::size_t bytes, const std::string& algorithm,
          bool symmetric) const {
    return communicator_.sms(read_collective(collective), bytes, symmetric, algorithm);
  }

  std::string card() const { return std::string(communicator_.card()); }

  // Entries are (collective, symmetric, up_to_bytes or None, algorithm), and may have (blocks, threads,
  // piece_bytes) at their end.
  using Row = std::tuple<std::string, bool, std::optional<std::size_t>, std::string>;
  using ShapedRow = std::tuple<std::string, bool, std::optional<std::size_t>, std::string,
                               std::tuple<int, int, std::size_t>>;
  void set_plan(const std::vector<std::variant<Row, ShapedRow>>& entries,
                const std::optional<std::string>& device) {
    std::vector<Communicator::PlanEntry> read;
    for (const auto& entry : entries)
      std::visit(
          [&](const auto& row) {
            const auto& [collective, symmetric, up_to, algorithm] =
                std::tie(std::get<0>(row), std::get<1>(row), std::get<2>(row), std::get<3>(row));
            read.push_back({read_collective(collective), symmetric,
                            up_to.value_or(static_cast<std::size_t>(-1)), algorithm});
            if constexpr (std::tuple_size_v<std::decay_t<decltype(row)>> == 5)
              std::tie(read.back().blocks, read.back().threads, read.back().piece_bytes) = std::get<4>(row);
          },
          entry);
    communicator_.set_plan(read, memory_of(device));
  }

  void fail(const std::string& text, bool late) { communicator_.fail(text, late); }
  void raise_if_failed() { communicator_.raise_if_failed(); }

  void set_shape(int blocks, int threads, std::size_t piece_bytes) {
    communicator_.set_shape(blocks, threads, piece_bytes);
  }

 private:
  // The time that a call spends without the GIL, under which `away_` is counted.
  class Away {
   public:
    explicit Away(PyCommunicator& communicator) : communicator_(communicator) {
      ++communicator_.away_;
      ++away_here;
      released_.emplace();
    }
    ~Away() {
      released_.reset();
      --away_here;
      --communicator_.away_;
    }
    Away(const Away&) = delete;

   private:
    PyCommunicator& communicator_;
    std::optional<nb::gil_scoped_release> released_;
  };
  static inline thread_local int away_here = 0;  // not 0: a signal handler runs within a call of this thread

  int number_of(const char* what, const RankNumber& rank) const {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(rank.given.ptr(), &overflow);
    if (overflow != 0 || number != static_cast<int>(number))
      throw UsageError(std::string(what) + " " + nb::str(rank.given).c_str() +
                       " is not a rank: there are ranks 0 to " + std::to_string(size() - 1) + ".");
    return static_cast<int>(number);
  }

  // What a call says besides its buffers.
  struct How {
    const Algorithm& algorithm;
    nb::handle stream;
    Op op = Op::sum;
    int root = 0;
    Wire wire = Wire::exact;
  };

  // `of`: the array that says dtype, memory and stream.
  Call made(const Array& of, const void* in, void* out, std::size_t count, const How& how) const {
    if (of.memory == Memory::device && of.device >= 0)
      if (const auto mine = communicator_.device(); mine && *mine != of.device)
        throw UsageError("the array is on GPU " + std::to_string(of.device) + ", this rank's is " +
                         std::to_string(*mine) + ": pass an array on that one.");
    return {.in = in,
            .out = out,
            .count = count,
            .dtype = of.dtype,
            .op = how.op,
            .root = how.root,
            .memory = of.memory,
            .stream = of.stream(how.stream),
            .algorithm = how.algorithm ? *how.algorithm : std::string_view{},
            .wire = how.wire};
  }

  void call(void (Communicator::*collective)(const Call&), const Array& of, const void* in, void* out,
            std::size_t count, const How& how) {
    const Call c = made(of, in, out, count, how);
    const Away away(*this);
    (communicator_.*collective)(c);
  }

  int away_ = 0;
  Communicator communicator_;
};

std::vector<std::string> algorithms_of(const std::string& collective, const std::string& device) {
  std::vector<std::string> names;
  const Memory memory = device == "cuda" ? Memory::device : Memory::host;
  for (const std::string_view name : algorithms(read_collective(collective), memory))
    names.emplace_back(name);
  return names;
}

}  // namespace

void bind_communicator(nb::module_& module) {
  using namespace nb::literals;
  using C = PyCommunicator;
  const auto none = nb::none();
  nb::class_<Bootstrap>(module, "Bootstrap", "A way for ranks to meet; see unisono.bootstrap.");
  module.def(
      "thread_bootstraps",
      [](int size, double timeout_s) {
        return thread_bootstraps(size, std::chrono::duration<double>(timeout_s));
      },
      "size"_a, "timeout_s"_a, "The bootstraps of `size` ranks that are threads of this process.");

  module.def("device_count", &device_count,
             "How many GPUs CUDA sees here: 0 where there is no driver or no CUDA lane.");

  using F = Communicator::Fabric;
  nb::class_<F>(module, "Fabric", doc::kFabric)
      .def(
          "__init__",
          [](F* self, std::string provider, std::optional<int> channels, const std::string& policy,
             bool pinned) {
            const auto known = from_name<ChannelPolicy>(policy, kChannelPolicies);
            if (!known)
              throw UsageError("there is no channel policy '" + policy +
                               "': use single, multi or round-robin.");
            new (self) F{std::move(provider), channels, *known, pinned};
          },
          "provider"_a = "", "channels"_a = none, "policy"_a = "round-robin", "pinned"_a = false)
      .def_ro("provider", &F::provider)
      .def_ro("channels", &F::channels)
      .def_prop_ro("policy", [](const F& fabric) { return std::string(name_of(fabric.policy)); })
      .def_ro("pinned", &F::pinned);
  nb::class_<FabricProvider>(module, "FabricProvider", "What libfabric offers here; see fabric_providers().")
      .def_ro("name", &FabricProvider::name)
      .def_ro("nics", &FabricProvider::nics)
      .def_ro("most_channels", &FabricProvider::most_channels)
      .def_ro("line_gbps", &FabricProvider::line_gbps, "Gbit/s of a NIC, None where it does not say.")
      .def_ro("device_memory", &FabricProvider::device_memory);
  module.def("fabric_providers", &fabric_providers, doc::kFabricProviders);
  module.def(
      "fabric_provider", &fabric_provider, "name"_a = "",
      "The one of fabric_providers() that a communicator takes for that name. Raises UsageError, which "
      "lists those present.");
  module.def("fabric_version", &fabric_version,
             "libfabric's version. Raises ResourceError where there is none.");

  nb::class_<C>(module, "Communicator", nb::is_weak_referenceable(), doc::kCommunicator)
      .def(
          "__init__",
          [](C* self, nb::object bootstrap, std::optional<double> timeout_s, std::optional<bool> check,
             std::optional<int> device, int max_sms, bool peer_access,
             const std::optional<Communicator::Fabric>& fabric) {
            const Communicator::Options options{.timeout_s = timeout_s,
                                                .device = device,
                                                .max_sms = max_sms,
                                                .peer_access = peer_access,
                                                .check = check,
                                                .fabric = fabric,
                                                .while_waiting = check_signals};
            if (nb::isinstance<Bootstrap>(bootstrap)) {
              auto native = nb::cast<std::shared_ptr<Bootstrap>>(bootstrap);
              const nb::gil_scoped_release released;  // the other ranks are threads that wait for it
              new (self) C(std::move(native), options);
            } else {
              new (self) C(std::make_shared<PythonBootstrap>(std::move(bootstrap)), options);
            }
          },
          "bootstrap"_a, "timeout_s"_a = none, "check"_a = none, "device"_a = none, "max_sms"_a = 0,
          "peer_access"_a = true, "fabric"_a = none)
      .def_prop_ro("rank", &C::rank, "This rank's number, from 0.")
      .def_prop_ro("size", &C::size, "How many ranks there are.")
      .def_prop_ro("closed", &C::closed,
                   "Whether it has been closed, by close() or by an interrupt within a call.")
      .def_prop_rw(
          "check", &C::check, &C::set_check,
          "Whether the ranks' calls are compared before anything moves. May be set, between the same "
          "calls on every rank.")
      .def("close", &C::close, doc::kClose)
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](C& self, nb::args) { self.close(); })
      .def("barrier", &C::barrier, "Returns when every rank has called it. Raises as every call does.")
      .def("all_reduce", &C::all_reduce, "x"_a, "op"_a = "sum", "out"_a.none() = none, "algorithm"_a = none,
           "stream"_a = none, "wire"_a = none, doc::kAllReduce)
      .def("reduce", &C::reduce, "x"_a, "root"_a = 0, "op"_a = "sum", "out"_a.none() = none,
           "algorithm"_a = none, "stream"_a = none, doc::kReduce)
      .def("broadcast", &C::broadcast, "x"_a, "root"_a = 0, "out"_a.none() = none, "algorithm"_a = none,
           "stream"_a = none, doc::kBroadcast)
      .def("all_gather", &C::all_gather, "x"_a, "out"_a.none() = none, "algorithm"_a = none,
           "stream"_a = none, doc::kAllGather)
      .def("gather", &C::gather, "x"_a, "root"_a = 0, "out"_a.none() = none, "algorithm"_a = none,
           "stream"_a = none, doc::kGather)
      .def("reduce_scatter", &C::reduce_scatter, "x"_a, "op"_a = "sum", "out"_a.none() = none,
           "algorithm"_a = none, "stream"_a = none, doc::kReduceScatter)
      .def("scatter", &C::scatter, "x"_a.none(), "root"_a = 0, "out"_a.none() = none, "algorithm"_a = none,
           "stream"_a = none, doc::kScatter)
      .def("all_to_all", &C::all_to_all, "x"_a, "out"_a.none() = none, "algorithm"_a = none,
           "stream"_a = none, doc::kAllToAll)
      .def("all_to_all_v", &C::all_to_all_v, "x"_a, "send_counts"_a, "recv_counts"_a, "out"_a.none() = none,
           "algorithm"_a = none, "stream"_a = none, doc::kAllToAllV)
      .def("send", &C::send, "x"_a, "peer"_a, "algorithm"_a = none, "stream"_a = none, doc::kSend)
      .def("recv", &C::recv, "out"_a, "peer"_a, "algorithm"_a = none, "stream"_a = none, doc::kRecv)
      .def("send_recv", &C::send_recv, "x"_a, "dst"_a, "out"_a.none(), "src"_a, "algorithm"_a = none,
           "stream"_a = none, doc::kSendRecv)
      .def_prop_ro("device", &C::device, "The CUDA ordinal of this rank's GPU, or None.")
      .def_prop_ro("peer_access", &C::peer_access,
                   "Whether the ranks' GPUs reach each other's memory; if not, messages go through pinned "
                   "host memory. "
                   "False without a GPU.")
      .def("synchronize", &C::synchronize, "stream"_a = none, doc::kSynchronize)
      .def("empty", &C::empty, "shape"_a, "dtype"_a = "float32", "device"_a = none, doc::kEmpty)
      .def_static("algorithms", &algorithms_of, "collective"_a, "device"_a = "cpu",
                  "The names that `algorithm` may have for a collective, on `cpu` or `cuda`.")
      .def("plan", &C::plan, "collective"_a, "bytes"_a, "symmetric"_a = false, "device"_a = none, doc::kPlan)
      .def_prop_ro("card", &C::card, doc::kCard)
      .def("sms", &C::sms, "collective"_a, "bytes"_a, "algorithm"_a, "symmetric"_a = false,
           "The SMs that such a call takes of a GPU, `bytes` being its larger buffer; 0 where copy engines "
           "do it.")
      .def("set_plan", &C::set_plan, "entries"_a, "device"_a = none, doc::kSetPlan)
      .def("fail", &C::fail, "text"_a, "late"_a,
           "Fails it on every rank with TimeoutError (late) or PeerLostError; what unisono.nodes needs.")
      .def("raise_if_failed", &C::raise_if_failed,
           "Raises its failure, also a rank's death that no call has met yet.")
      .def("_set_shape", &C::set_shape, "blocks"_a = 0, "threads"_a = 0, "piece_bytes"_a = 0,
           "For measurements: how the kernels that follow are cut; 0: by the plan. The same on every rank.");
}

}  // namespace unisono::python
