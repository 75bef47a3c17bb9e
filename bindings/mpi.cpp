// Calls across nodes over MPI, and those that are played again.
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
#include "module.hpp"
#include "mpi_engine.hpp"
#include "replays.hpp"
#include "signals.hpp"

namespace unisono::python {
namespace {

using Bytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;

// An exchange that waits from Python.
struct Pending {
  MpiEngine* engine;
  MpiEngine::Exchange* exchange;
  void wait() const { engine->wait(*exchange); }
};

std::vector<MpiEngine::Part> parts_of(nb::handle given) {
  std::vector<MpiEngine::Part> parts;
  for (const nb::handle part : given) {
    const auto data = nb::cast<Bytes>(part[1]);  // a receive's memory is written by MPI alone
    auto* address = reinterpret_cast<std::byte*>(const_cast<std::uint8_t*>(data.data()));
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

void bind_mpi(nb::module_& module) {
  bind_mpi_engine(module);
  bind_replays(module);
}

}  // namespace unisono::python
