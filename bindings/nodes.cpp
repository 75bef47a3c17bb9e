// What the collectives across nodes take from the core: arrays as bytes, the checks of a call by itself, and
// sums that go on elsewhere.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "array.hpp"
#include "batch.hpp"
#include "combine.hpp"
#include "lane/host/move.hpp"
#include "module.hpp"
#include "mpi_engine.hpp"
#include "replays.hpp"
#include "request.hpp"
#include "signals.hpp"
#include "unisono/error.hpp"
#include "wire.hpp"

namespace unisono::python {
namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;
using ConstBytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;

DType dtype_named(const std::string& name) {
  if (const auto dtype = from_name<DType>(name, kDTypes)) return *dtype;
  throw UsageError("there is no dtype '" + name + "'.");
}

nb::tuple describe(nb::handle x, const char* what, bool written) {
  const Array array(x, what, written);
  nb::object view = nb::none();
  if (array.memory == Memory::host)
    view = nb::cast(Bytes(array.data, {array.count * size_of(array.dtype)}, x));
  const std::string_view dtype = name_of(array.dtype);
  nb::object stream = nb::none();
  if (array.memory == Memory::device)
    stream = nb::int_(reinterpret_cast<std::uintptr_t>(stream_handle(array.stream(nb::none()))));
  return nb::make_tuple(view, nb::str(dtype.data(), dtype.size()), size_of(array.dtype),
                        nb::tuple(nb::cast(array.shape)), reinterpret_cast<std::uintptr_t>(array.data),
                        stream);
}

using Address = std::uintptr_t;  // of a buffer; 0 where this rank has none

Call call_of(Address in, Address out, std::size_t count, const std::string& dtype) {
  return {.in = reinterpret_cast<const void*>(in),  // NOLINT(performance-no-int-to-ptr)
          .out = reinterpret_cast<void*>(out),      // NOLINT(performance-no-int-to-ptr)
          .count = count,
          .dtype = dtype_named(dtype)};
}

void check_call(const std::string& collective, int rank, int size, Address in, Address out, std::size_t count,
                const std::string& dtype, const RankNumber& root, const OpName& op,
                const std::optional<std::string>& wire) {
  Call call = call_of(in, out, count, dtype);
  call.root = read_rank("root", root, size);
  call.op = read_op(op.text);
  call.wire = read_wire(wire);
  Request(read_collective(collective), call, rank, size);
}

void check_pair(const std::string& collective, int rank, int size, Address in, Address out, std::size_t count,
                const std::string& dtype, const RankNumber& to, const RankNumber& from) {
  Request(read_collective(collective), call_of(in, out, count, dtype), rank, size,
          read_rank("destination", to, size), read_rank("source", from, size));
}

void check_counts(int rank, int size, Address in, Address out, const std::string& dtype,
                  const std::vector<std::size_t>& sends, const std::vector<std::size_t>& receives) {
  Request(call_of(in, out, 0, dtype), rank, size, sends, receives);
}

void check_batch(int rank, int size, const Messages& sends, const Messages& receives) {
  const Batch batch(sends, receives, size);
  Request(Call{.dtype = DType::u8}, rank, size, batch.outgoing, batch.incoming);
}

void combine(const Bytes& out, const std::optional<ConstBytes>& prior, const std::vector<ConstBytes>& sources,
             const std::string& dtype_name, const std::string& op_name, int ranks) {
  const DType dtype = dtype_named(dtype_name);
  const Op op = read_op(op_name);
  const std::size_t narrow = size_of(dtype), wide = host::kernels().wide_bytes[static_cast<int>(dtype)];
  const std::size_t count = out.size() / (ranks == 0 ? wide : narrow);
  bool fits = out.size() == count * (ranks == 0 ? wide : narrow) && (prior || !sources.empty());
  if (prior) fits = fits && prior->size() == count * wide;
  std::vector<const byte*> from;
  for (const ConstBytes& source : sources) {
    fits = fits && source.size() == count * narrow;
    from.push_back(reinterpret_cast<const byte*>(source.data()));
  }
  if (!fits) throw UsageError("the buffers of a sum differ in length.");
  const nb::gil_scoped_release released;
  combine_bytes(reinterpret_cast<byte*>(out.data()), out.size(),
                prior ? reinterpret_cast<const byte*>(prior->data()) : nullptr, from, dtype, op, ranks);
}

void requantise(const Bytes& out, const std::vector<ConstBytes>& sources, std::size_t count,
                const std::string& dtype_name, const std::string& op, const std::string& wire_name,
                bool from_elements, bool to_elements) {
  const DType dtype = dtype_named(dtype_name);
  const Wire wire = read_wire(wire_name);
  const host::Requantise run = host::kernels().requantise[static_cast<int>(dtype)][static_cast<int>(wire)];
  if (!run) throw UsageError("there is no wire form of " + dtype_name + ".");
  const std::size_t coded = wire::bytes_of(count), plain = count * size_of(dtype);
  bool fits = out.size() == (to_elements ? plain : coded) && (!from_elements || sources.size() == 1);
  std::vector<const byte*> from;
  for (const ConstBytes& source : sources) {
    fits = fits && source.size() == (from_elements ? plain : coded);
    from.push_back(reinterpret_cast<const byte*>(source.data()));
  }
  if (!fits) throw UsageError("the buffers of a quantised sum differ in length.");
  const bool average = read_op(op) == Op::avg;
  const nb::gil_scoped_release released;
  const Dst to{reinterpret_cast<byte*>(out.data())};
  run(&to, 1, from.data(), static_cast<int>(from.size()),
      {.src = from_elements ? 0 : -1, .dst = to_elements ? 0 : -1}, average, count);
}

// An exchange that waits from Python.
struct Pending {
  MpiEngine* engine;
  MpiEngine::Exchange* exchange;
  void wait() const { engine->wait(*exchange); }
};

std::vector<MpiEngine::Part> parts_of(nb::handle given) {
  std::vector<MpiEngine::Part> parts;
  for (const nb::handle part : given) {
    const auto data = nb::cast<ConstBytes>(part[1]);  // a receive's memory is written by MPI alone
    auto* address = reinterpret_cast<byte*>(const_cast<std::uint8_t*>(data.data()));
    parts.push_back({nb::cast<int>(part[0]), address, data.size()});
  }
  return parts;
}

void bind_mpi_engine(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Pending>(module, "MpiPending", "See unisono.nodes.engine.Pending.").def("wait", &Pending::wait);
  nb::class_<MpiEngine>(module, "MpiEngine", "See unisono.nodes.mpi.")
      .def(
          "__init__",
          [](MpiEngine* self, nb::handle communicator, int rank, std::vector<std::string> names,
             double timeout_s, bool crowded, nb::object look) {
            auto attend = [signals = check_signals(), look = std::move(look)] {
              signals();
              const nb::gil_scoped_acquire gil;
              look();
            };
            new (self) MpiEngine(communicator, rank, std::move(names), timeout_s, crowded, attend);
          },
          "communicator"_a, "rank"_a, "names"_a, "timeout_s"_a, "crowded"_a, "look"_a)
      .def(
          "exchange",
          [](MpiEngine& engine, nb::handle sends, nb::handle receives) {
            return Pending{
                &engine, &engine.begin(parts_of(sends), parts_of(receives), nb::make_tuple(sends, receives))};
          },
          nb::keep_alive<0, 1>(), "sends"_a, "receives"_a, "See unisono.nodes.engine.Engine.")
      .def("close", &MpiEngine::close, "Whether anything was under way, which keeps its memory.");
}

using SpanTuple = std::tuple<int, std::size_t, std::size_t>;  // base, offset, bytes
using MessageTuple = std::pair<int, SpanTuple>;

Span span_of(const SpanTuple& span) { return std::make_from_tuple<Span>(span); }

std::optional<Span> span_of(const std::optional<SpanTuple>& span) {
  return span ? std::optional(span_of(*span)) : std::nullopt;
}

std::vector<Replays::Message> messages_of(const std::vector<MessageTuple>& given) {
  std::vector<Replays::Message> messages;
  for (const auto& [rank, span] : given) messages.push_back({rank, span_of(span)});
  return messages;
}

void bind_replays(nb::module_& module) {
  using namespace nb::literals;
  using R = Replays;
  const auto none = nb::none();
  nb::class_<R>(module, "Replays", "Calls that have been made before; see bindings/replays.hpp.")
      .def(nb::init<PyCommunicator&, MpiEngine&, int, int>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           "inside"_a, "engine"_a, "rank"_a, "size"_a)
      .def(
          "run",
          [](const nb::handle_t<R>& self, const char* collective, nb::handle x, nb::handle out, nb::handle op,
             nb::handle root, nb::handle source, nb::handle algorithm, bool usual) {
            return nb::cast<R&>(self).run(nb::borrow(self), collective, x, out, op, root, source, algorithm,
                                          usual);
          },
          "collective"_a, "x"_a.none(), "out"_a.none(), "op"_a, "root"_a, "source"_a, "algorithm"_a.none(),
          "usual"_a, "The call's result, or NotImplemented where it is not known, or must be made as usual.")
      .def_prop_ro("wanted", &R::wanted, "Whether the call that was not known may be written down.")
      .def("scratch", &R::scratch, "name"_a, "bytes"_a)
      .def(
          "exchange",
          [](R& replays, const std::vector<MessageTuple>& sends, const std::vector<MessageTuple>& receives) {
            replays.exchange(messages_of(sends), messages_of(receives));
          },
          "sends"_a, "receives"_a)
      .def("wait", &R::wait, "exchange"_a)
      .def(
          "copy",
          [](R& replays, const SpanTuple& to, const SpanTuple& from) {
            replays.copy(span_of(to), span_of(from));
          },
          "to"_a, "source"_a)
      .def(
          "combine",
          [](R& replays, const SpanTuple& out, const std::optional<SpanTuple>& prior,
             const std::vector<SpanTuple>& sources, const std::string& dtype, const std::string& op,
             int ranks) {
            std::vector<Span> from;
            for (const SpanTuple& source : sources) from.push_back(span_of(source));
            replays.combine(span_of(out), span_of(prior), std::move(from), dtype_named(dtype), read_op(op),
                            ranks);
          },
          "out"_a, "prior"_a.none(), "sources"_a, "dtype"_a, "op"_a, "ranks"_a)
      .def(
          "move",
          [](R& replays, const std::string& collective, const std::optional<SpanTuple>& in,
             const std::optional<SpanTuple>& out, std::size_t count, int root, std::vector<std::size_t> sends,
             std::vector<std::size_t> receives) {
            replays.move(read_collective(collective), span_of(in), span_of(out), count, root,
                         std::move(sends), std::move(receives));
          },
          "collective"_a, "x"_a = none, "out"_a = none, "count"_a = 0, "root"_a = 0,
          "sends"_a = std::vector<std::size_t>{}, "receives"_a = std::vector<std::size_t>{},
          "A collective of bytes within the node; count as in unisono::Call.")
      .def(
          "pair",
          [](R& replays, const std::optional<SpanTuple>& in, const std::optional<SpanTuple>& out, int to,
             int from) { replays.pair(span_of(in), span_of(out), to, from); },
          "x"_a.none(), "out"_a.none(), "to"_a, "from_"_a, "A send, recv or send_recv within the node.")
      .def(
          "batch",
          [](R& replays, const std::vector<MessageTuple>& sends, const std::vector<MessageTuple>& receives) {
            replays.batch(messages_of(sends), messages_of(receives));
          },
          "sends"_a, "receives"_a, "A batch_send_recv within the node.")
      .def("keep", &R::keep, "The call is written down.");
}

}  // namespace

void bind_nodes(nb::module_& module) {
  using namespace nb::literals;
  bind_mpi_engine(module);
  bind_replays(module);
  module.def("describe", &describe, "x"_a, "what"_a, "written"_a,
             nb::sig("def describe(x: object, what: str, written: bool)"
                     " -> tuple[object, str, int, tuple[int, ...], int, int | None]"),
             "(an array in the host's memory as bytes without a copy, else None; dtype; bytes of an element; "
             "shape; address; on a GPU its library's current stream). Raises UsageError for what a call "
             "would not take; `what` is the array's name there.");
  // refusals of src/request.cpp, before anything moves
  module.def(
      "check_call", &check_call, "collective"_a, "rank"_a, "size"_a, "input"_a, "output"_a, "count"_a,
      "dtype"_a, "root"_a = 0, "op"_a = "sum", "wire"_a = nb::none(),
      "Raises UsageError for a call that is wrong by itself. Buffers are addresses, 0 where this rank has "
      "none; count as in unisono::Call.");
  module.def("check_pair", &check_pair, "collective"_a, "rank"_a, "size"_a, "input"_a, "output"_a, "count"_a,
             "dtype"_a, "to"_a, "from_"_a,
             "The same of send, recv and send_recv; to or from_ is -1 where there is none.");
  module.def("check_counts", &check_counts, "rank"_a, "size"_a, "input"_a, "output"_a, "dtype"_a, "sends"_a,
             "receives"_a, "The same of all_to_all_v.");
  module.def("check_batch", &check_batch, "rank"_a, "size"_a, "sends"_a, "receives"_a,
             "The same of batch_send_recv, with the arrays themselves.");
  module.def(
      "read_counts",
      [](nb::handle x, nb::handle sends, nb::handle receives) {
        Counts counts(Array(x, "x", false), sends, receives);
        return std::pair(std::move(counts.sends), std::move(counts.receives));
      },
      "x"_a, "sends"_a, "receives"_a,
      "The counts of all_to_all_v as integers. Raises UsageError where they are none, or do not fit x.");
  module.def(
      "empty_like", &empty_like_on, "like"_a, "shape"_a, "device"_a, "stream"_a.none(),
      "A new array of the kind and type of `like`; where a stream of that GPU is given, by its allocator.");
  module.def(
      "wide_bytes",
      [](const std::string& dtype) {
        return host::kernels().wide_bytes[static_cast<int>(dtype_named(dtype))];
      },
      "dtype"_a, "Bytes of an element in the type in which a dtype is combined.");
  module.def("combine", &combine, "out"_a, "prior"_a.none(), "sources"_a, "dtype"_a, "op"_a, "ranks"_a,
             "Combines sources in order, after `prior`, which is wide; see host::Resume. All are bytes.");
  module.def("wire_bytes", &wire::bytes_of, "count"_a,
             "Bytes of as many elements in a wire form (wire.hpp).");
  module.def(
      "requantise", &requantise, "out"_a, "sources"_a, "count"_a, "dtype"_a, "op"_a, "wire"_a,
      "from_elements"_a, "to_elements"_a,
      "Combines sources of `count` elements in their wire form, in order, and rounds the sum to it; see "
      "host::Requantise. One source alone may be elements, and so may out.");
}

}  // namespace unisono::python
