#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <thread>

#include "array.hpp"
#include "docstrings.hpp"
#include "module.hpp"
#include "unisono/communicator.hpp"

namespace unisono::python {
namespace {

using Algorithm = std::optional<std::string>;

// A Python object with rank, size and all_gather(bytes) -> list[bytes].
class PythonBootstrap final : public Bootstrap {
 public:
  explicit PythonBootstrap(nb::object object)
      : object_(std::move(object)),
        rank_(nb::cast<int>(object_.attr("rank"))),
        size_(nb::cast<int>(object_.attr("size"))) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& data) override {
    std::vector<std::string> all;
    const nb::object gathered = object_.attr("all_gather")(nb::bytes(data.data(), data.size()));
    if (!PySequence_Check(gathered.ptr()))
      throw UsageError("the bootstrap's all_gather gave no list of bytes: return one for each rank.");
    for (const nb::handle one : gathered) {
      if (!PyBytes_Check(one.ptr()))
        throw UsageError(
            "the bootstrap's all_gather gave a list of something else than bytes: return bytes for each "
            "rank.");
      all.emplace_back(PyBytes_AS_STRING(one.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(one.ptr())));
    }
    return all;
  }

 private:
  nb::object object_;
  int rank_, size_;
};

// Lets Ctrl-C through while a call waits.
void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

Op read_op(std::string_view name) {
  if (const auto op = from_name<Op>(name, kOps)) return *op;
  throw UsageError("there is no op '" + std::string(name) + "': use sum, prod, min, max or avg.");
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

Shape with_ranks(const Shape& shape, int size) {
  Shape whole{static_cast<std::size_t>(size)};
  whole.insert(whole.end(), shape.begin(), shape.end());
  return whole;
}

Shape without_ranks(const Array& array, int size, const char* what) {
  if (array.shape.empty() || array.shape[0] != static_cast<std::size_t>(size))
    throw UsageError(std::string(what) + " has shape " + text(array.shape) +
                     ": its first axis is the ranks, " + std::to_string(size) + ".");
  return {array.shape.begin() + 1, array.shape.end()};
}

// The output of a call: `out` as given, or a new array like `like`. It has the shape and dtype that the call
// gives.
class Output {
 public:
  Output(nb::handle out, nb::handle like, DType dtype, const Shape& shape)
      : object(out.is_none() ? empty_like(like, shape) : nb::borrow(out)), array(object, "out", true) {
    if (array.dtype != dtype)
      throw UsageError("out has dtype " + std::string(name_of(array.dtype)) + ", but x has " +
                       std::string(name_of(dtype)) + ": give both the same.");
    if (array.shape != shape)
      throw UsageError("out has shape " + text(array.shape) + ": this call gives " + text(shape) + ".");
  }
  nb::object object;
  Array array;
};

class PyCommunicator {
 public:
  PyCommunicator(std::shared_ptr<Bootstrap> bootstrap, std::optional<double> timeout_s,
                 std::optional<bool> check)
      : communicator_(std::move(bootstrap),
                      {.timeout_s = timeout_s, .check = check, .while_waiting = check_signals}) {}

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }
  bool closed() const { return communicator_.closed(); }

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

  nb::object all_reduce(nb::handle x, const char* op, nb::handle out, const Algorithm& algorithm) {
    const Array in(x, "x", false);
    const Output to(out, x, in.dtype, in.shape);
    call(&Communicator::all_reduce, in.data, to.array.data, in.count, in.dtype, algorithm, read_op(op));
    return to.object;
  }

  nb::object reduce(nb::handle x, int root, const char* op, nb::handle out, const Algorithm& algorithm) {
    const Array in(x, "x", false);
    if (rank() != root) {
      call(&Communicator::reduce, in.data, nullptr, in.count, in.dtype, algorithm, read_op(op), root);
      return nb::none();
    }
    const Output to(out, x, in.dtype, in.shape);
    call(&Communicator::reduce, in.data, to.array.data, in.count, in.dtype, algorithm, read_op(op), root);
    return to.object;
  }

  nb::object broadcast(nb::handle x, int root, nb::handle out, const Algorithm& algorithm) {
    const Array in(x, "x", out.is_none() && rank() != root);
    if (out.is_none()) {
      call(&Communicator::broadcast, in.data, in.data, in.count, in.dtype, algorithm, Op::sum, root);
      return nb::borrow(x);
    }
    const Output to(out, x, in.dtype, in.shape);
    call(&Communicator::broadcast, in.data, to.array.data, in.count, in.dtype, algorithm, Op::sum, root);
    return to.object;
  }

  nb::object all_gather(nb::handle x, nb::handle out, const Algorithm& algorithm) {
    const Array in(x, "x", false);
    const Output to(out, x, in.dtype, with_ranks(in.shape, size()));
    call(&Communicator::all_gather, in.data, to.array.data, in.count, in.dtype, algorithm);
    return to.object;
  }

  nb::object gather(nb::handle x, int root, nb::handle out, const Algorithm& algorithm) {
    const Array in(x, "x", false);
    if (rank() != root) {
      call(&Communicator::gather, in.data, nullptr, in.count, in.dtype, algorithm, Op::sum, root);
      return nb::none();
    }
    const Output to(out, x, in.dtype, with_ranks(in.shape, size()));
    call(&Communicator::gather, in.data, to.array.data, in.count, in.dtype, algorithm, Op::sum, root);
    return to.object;
  }

  nb::object reduce_scatter(nb::handle x, const char* op, nb::handle out, const Algorithm& algorithm) {
    const Array in(x, "x", false);
    const Output to(out, x, in.dtype, without_ranks(in, size(), "x"));
    call(&Communicator::reduce_scatter, in.data, to.array.data, to.array.count, in.dtype, algorithm,
         read_op(op));
    return to.object;
  }

  nb::object scatter(nb::handle x, int root, nb::handle out, const Algorithm& algorithm) {
    if (x.is_none()) {
      if (rank() == root) throw UsageError("scatter needs x at the root, rank " + std::to_string(root) + ".");
      if (out.is_none()) throw UsageError("scatter without x needs out, which says the shape and dtype.");
      const Array to(out, "out", true);
      call(&Communicator::scatter, nullptr, to.data, to.count, to.dtype, algorithm, Op::sum, root);
      return nb::borrow(out);
    }
    const Array in(x, "x", false);
    const Output to(out, x, in.dtype, without_ranks(in, size(), "x"));
    call(&Communicator::scatter, in.data, to.array.data, to.array.count, in.dtype, algorithm, Op::sum, root);
    return to.object;
  }

  nb::object all_to_all(nb::handle x, nb::handle out, const Algorithm& algorithm) {
    const Array in(x, "x", false);
    without_ranks(in, size(), "x");
    const Output to(out, x, in.dtype, in.shape);
    call(&Communicator::all_to_all, in.data, to.array.data, in.count / static_cast<std::size_t>(size()),
         in.dtype, algorithm);
    return to.object;
  }

  nb::object all_to_all_v(nb::handle x, const std::vector<std::size_t>& sends,
                          const std::vector<std::size_t>& receives, nb::handle out,
                          const Algorithm& algorithm) {
    const Array in(x, "x", false);
    std::size_t sent = 0, received = 0;
    for (const std::size_t count : sends) sent += count;
    for (const std::size_t count : receives) received += count;
    if (in.shape != Shape{sent})
      throw UsageError("x has shape " + text(in.shape) + ", but the send counts add up to " +
                       std::to_string(sent) + ": pass a 1-D x of that many.");
    const Output to(out, x, in.dtype, {received});
    const Call c{.in = in.data,
                 .out = to.array.data,
                 .dtype = in.dtype,
                 .algorithm = algorithm ? *algorithm : std::string_view{}};
    {
      const Away away(*this);
      communicator_.all_to_all_v(c, sends, receives);
    }
    return to.object;
  }

  void send(nb::handle x, int peer, const Algorithm& algorithm) {
    const Array in(x, "x", false);
    const Call c{.in = in.data,
                 .count = in.count,
                 .dtype = in.dtype,
                 .algorithm = algorithm ? *algorithm : std::string_view{}};
    const Away away(*this);
    communicator_.send(c, peer);
  }

  nb::object recv(nb::handle out, int peer, const Algorithm& algorithm) {
    const Array to(out, "out", true);
    const Call c{.out = to.data,
                 .count = to.count,
                 .dtype = to.dtype,
                 .algorithm = algorithm ? *algorithm : std::string_view{}};
    {
      const Away away(*this);
      communicator_.recv(c, peer);
    }
    return nb::borrow(out);
  }

  nb::object send_recv(nb::handle x, int dst, nb::handle out, int src, const Algorithm& algorithm) {
    const Array in(x, "x", false);
    const Output to(out, x, in.dtype, in.shape);
    const Call c{.in = in.data,
                 .out = to.array.data,
                 .count = in.count,
                 .dtype = in.dtype,
                 .algorithm = algorithm ? *algorithm : std::string_view{}};
    {
      const Away away(*this);
      communicator_.send_recv(c, dst, src);
    }
    return to.object;
  }

  nb::object empty(nb::handle shape, nb::handle dtype) {
    const Shape extents = read_shape(shape);
    const DType type = read_dtype(dtype);
    std::size_t bytes = size_of(type);
    for (const std::size_t extent : extents)
      if (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > static_cast<std::size_t>(PTRDIFF_MAX) / 2)
        throw ResourceError("an array of shape " + text(extents) +
                            " is more than memory can hold: check the shape.");
    auto buffer = [&] {
      const Away away(*this);
      return std::make_unique<Buffer>(communicator_.empty(bytes));
    }();
    void* data = buffer->data();
    const nb::capsule owner(buffer.release(), [](void* held) noexcept { delete static_cast<Buffer*>(held); });
    const nb::ndarray<nb::numpy, std::uint8_t> flat(data, {bytes}, owner);
    return nb::cast(flat).attr("view")(numpy_dtype(type)).attr("reshape")(nb::tuple(nb::cast(extents)));
  }

  std::string plan(const std::string& collective, std::size_t bytes, bool symmetric) const {
    return std::string(communicator_.plan(read_collective(collective), bytes, symmetric));
  }

  // Entries are (collective, symmetric, up_to_bytes or None, algorithm).
  void set_plan(
      const std::vector<std::tuple<std::string, bool, std::optional<std::size_t>, std::string>>& entries) {
    std::vector<Communicator::PlanEntry> read;
    for (const auto& [collective, symmetric, up_to, algorithm] : entries)
      read.push_back(
          {read_collective(collective), symmetric, up_to.value_or(static_cast<std::size_t>(-1)), algorithm});
    communicator_.set_plan(read);
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

  void call(void (Communicator::*collective)(const Call&), const void* in, void* out, std::size_t count,
            DType dtype, const Algorithm& algorithm, Op op = Op::sum, int root = 0) {
    const Call c{.in = in,
                 .out = out,
                 .count = count,
                 .dtype = dtype,
                 .op = op,
                 .root = root,
                 .algorithm = algorithm ? *algorithm : std::string_view{}};
    const Away away(*this);
    (communicator_.*collective)(c);
  }

  int away_ = 0;
  Communicator communicator_;
};

std::vector<std::string> algorithms_of(const std::string& collective) {
  std::vector<std::string> names;
  for (const std::string_view name : algorithms(read_collective(collective))) names.emplace_back(name);
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

  nb::class_<C>(module, "Communicator", nb::is_weak_referenceable(), doc::kCommunicator)
      .def(
          "__init__",
          [](C* self, nb::object bootstrap, std::optional<double> timeout_s, std::optional<bool> check) {
            if (nb::isinstance<Bootstrap>(bootstrap)) {
              auto native = nb::cast<std::shared_ptr<Bootstrap>>(bootstrap);
              const nb::gil_scoped_release released;  // the other ranks are threads that wait for it
              new (self) C(std::move(native), timeout_s, check);
            } else {
              new (self) C(std::make_shared<PythonBootstrap>(std::move(bootstrap)), timeout_s, check);
            }
          },
          "bootstrap"_a, "timeout_s"_a = none, "check"_a = none)
      .def_prop_ro("rank", &C::rank, "This rank's number, from 0.")
      .def_prop_ro("size", &C::size, "How many ranks there are.")
      .def_prop_ro("closed", &C::closed,
                   "Whether it has been closed, by close() or by an interrupt within a call.")
      .def("close", &C::close, doc::kClose)
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](C& self, nb::args) { self.close(); })
      .def("barrier", &C::barrier, "Returns when every rank has called it. Raises as every call does.")
      .def("all_reduce", &C::all_reduce, "x"_a, "op"_a = "sum", "out"_a.none() = none, "algorithm"_a = none,
           doc::kAllReduce)
      .def("reduce", &C::reduce, "x"_a, "root"_a = 0, "op"_a = "sum", "out"_a.none() = none,
           "algorithm"_a = none, doc::kReduce)
      .def("broadcast", &C::broadcast, "x"_a, "root"_a = 0, "out"_a.none() = none, "algorithm"_a = none,
           doc::kBroadcast)
      .def("all_gather", &C::all_gather, "x"_a, "out"_a.none() = none, "algorithm"_a = none, doc::kAllGather)
      .def("gather", &C::gather, "x"_a, "root"_a = 0, "out"_a.none() = none, "algorithm"_a = none,
           doc::kGather)
      .def("reduce_scatter", &C::reduce_scatter, "x"_a, "op"_a = "sum", "out"_a.none() = none,
           "algorithm"_a = none, doc::kReduceScatter)
      .def("scatter", &C::scatter, "x"_a.none(), "root"_a = 0, "out"_a.none() = none, "algorithm"_a = none,
           doc::kScatter)
      .def("all_to_all", &C::all_to_all, "x"_a, "out"_a.none() = none, "algorithm"_a = none, doc::kAllToAll)
      .def("all_to_all_v", &C::all_to_all_v, "x"_a, "send_counts"_a, "recv_counts"_a, "out"_a.none() = none,
           "algorithm"_a = none, doc::kAllToAllV)
      .def("send", &C::send, "x"_a, "peer"_a, "algorithm"_a = none, doc::kSend)
      .def("recv", &C::recv, "out"_a, "peer"_a, "algorithm"_a = none, doc::kRecv)
      .def("send_recv", &C::send_recv, "x"_a, "dst"_a, "out"_a.none(), "src"_a, "algorithm"_a = none,
           doc::kSendRecv)
      .def("empty", &C::empty, "shape"_a, "dtype"_a = "float32", doc::kEmpty)
      .def_static("algorithms", &algorithms_of, "collective"_a,
                  "The names that `algorithm` may have for a collective.")
      .def("plan", &C::plan, "collective"_a, "bytes"_a, "symmetric"_a = false, doc::kPlan)
      .def("set_plan", &C::set_plan, "entries"_a, doc::kSetPlan);
}

}  // namespace unisono::python
