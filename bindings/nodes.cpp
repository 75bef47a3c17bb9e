// What the collectives across nodes take from the core: arrays as bytes, the checks of a call by itself, and
// sums that go on elsewhere.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "array.hpp"
#include "base/wire.hpp"
#include "batch.hpp"
#include "combine.hpp"
#include "core/request.hpp"
#include "host/move.hpp"
#include "module.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;
using ConstBytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;

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

}  // namespace

void bind_nodes(nb::module_& module) {
  using namespace nb::literals;
  module.def("describe", &describe, "x"_a, "what"_a, "written"_a,
             nb::sig("def describe(x: object, what: str, written: bool)"
                     " -> tuple[object, str, int, tuple[int, ...], int, int | None]"),
             "(an array in the host's memory as bytes without a copy, else None; dtype; bytes of an element; "
             "shape; address; on a GPU its library's current stream). Raises UsageError for what a call "
             "would not take; `what` is the array's name there.");
  // refusals of src/core/request.cpp, before anything moves
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
