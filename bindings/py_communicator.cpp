#include "py_communicator.hpp"

#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <span>
#include <thread>

#include "dtypes.hpp"
#include "new_array.hpp"
#include "output.hpp"
#include "unisono/error.hpp"

namespace unisono::python {

// The arguments of a call besides its buffers.
struct PyCommunicator::Options {
  const Algorithm& algorithm;
  nb::handle stream;
  Op op = Op::sum;
  int root = 0;
  Wire wire = Wire::exact;
  double factor = 1;
};

PyCommunicator::ThisThread& PyCommunicator::this_thread() {
  static constinit thread_local ThisThread here{};
  return here;
}

void PyCommunicator::check_device(const Array& array) const {
  if (array.memory == Memory::device && array.device >= 0)
    if (const auto mine = communicator_.device(); mine && *mine != array.device)
      throw UsageError("the array is on GPU " + std::to_string(array.device) + ", this rank's is " +
                       std::to_string(*mine) + ": pass an array on that one.");
}

PyCommunicator::Prepared PyCommunicator::prepare(const Array& array, const void* in, void* out,
                                                 std::size_t count, const Options& options) const {
  check_device(array);
  ThisThread& thread = this_thread();
  if (thread.beginning) thread.beginning->keep(array.owner());
  const nb::object stream = array.stream(options.stream);
  return {{.in = in,
           .out = out,
           .count = count,
           .dtype = array.dtype,
           .op = options.op,
           .root = options.root,
           .memory = array.memory,
           .stream = stream_handle(stream),
           .algorithm = options.algorithm ? *options.algorithm : std::string_view{},
           .wire = options.wire,
           .timeout_s = thread.timeout_s,
           .factor = options.factor},
          stream,
          thread};
}

template <class... Form>
Received PyCommunicator::run_form(Communicator& communicator, const Form&... form) {
  if constexpr (std::is_void_v<decltype(communicator.run(form...))>)
    return communicator.run(form...), Received{};
  else return communicator.run(form...);
}

template <class Run>
Received PyCommunicator::call(const Prepared& prepared, const Run& run, bool small) {
  const bool on_gpu = prepared.call.memory == Memory::device;
  Received received;
  {
    Beginning* const beginning = std::exchange(prepared.thread.beginning, nullptr);
    if (PyBound* const bound = beginning ? beginning->bound : nullptr) {
      bound->on_gpu = on_gpu;
      bound->small = small;
      bound->stream = prepared.stream;
      bound->handle = prepared.call.stream;
      run(prepared.call, [&](const auto&... form) {
        bound->run = [... form = owned(form)](Communicator& with) { return run_form(with, form...); };
      });
      return received;
    }
    const WithoutGil released(*this, small && !beginning && may_keep_gil(), prepared.thread);
    run(prepared.call, [&](const auto&... form) {
      if (beginning) beginning->begun->work = communicator_.begin(form...);
      else received = run_form(communicator_, form...);
    });
  }
  if (on_gpu) keep_stream(prepared.stream, prepared.call.stream);
  return received;
}

nb::object PyCommunicator::step(const PyBound& bound) {
  Received received;
  if (bound.run) {
    {
      const WithoutGil released(*this, bound.small && may_keep_gil());
      received = bound.run(communicator_);
    }
    if (bound.on_gpu) keep_stream(bound.stream, bound.handle);
  }
  if (!bound.receives) return bound.result;
  return nb::cast(PyReceived{bound.result, nullptr, received});
}

void PyCommunicator::call(Collective collective, const Array& array, const void* in, void* out,
                          std::size_t count, const Options& options) {
  const Prepared prepared = prepare(array, in, out, count, options);
  call(prepared, [&](const Call& c, const auto& make) { make(collective, c); }, small(prepared.call));
}

void PyCommunicator::keep_stream(const nb::object& stream, void* handle) {
  if (communicator_.last_stream() == handle) last_stream_ = stream;
}

void PyCommunicator::close() {
  {
    const nb::gil_scoped_release released;  // a peer that is a thread of this process may have to answer
    communicator_.close();
  }
  while (calls_inside_ > 0 && !this_thread().inside) {
    const nb::gil_scoped_release released;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const auto& begun : std::exchange(begun_, {}))
    while (!begun->work.done()) {
      const nb::gil_scoped_release released;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

void PyCommunicator::barrier() {
  call(
      {.call = {.timeout_s = this_thread().timeout_s}, .stream = {}},
      [&](const Call& c, const auto& make) { make(Collective::barrier, c); }, true);
}

nb::object PyCommunicator::all_reduce(nb::handle x, const OpName& op, nb::handle out,
                                      const Algorithm& algorithm, nb::handle stream,
                                      const std::optional<std::string>& wire, double factor) {
  const Array in(x, "x", false);
  const Output to(out, x, in, in.shape, stream);
  call(Collective::all_reduce, in, in.data, to.array.data, in.count,
       {algorithm, stream, read_op(op.text), 0, read_wire(wire), factor});
  return to.object;
}

nb::object PyCommunicator::reduce(nb::handle x, const RankNumber& root_number, const OpName& op,
                                  nb::handle out, const Algorithm& algorithm, nb::handle stream,
                                  double factor) {
  const int root = read_rank("root", root_number, size());
  const Array in(x, "x", false);
  const OutputAtRoot to(out, x, in, in.shape, rank() == root, stream);
  call(Collective::reduce, in, in.data, to.data(), in.count,
       {algorithm, stream, read_op(op.text), root, Wire::exact, factor});
  return to.object();
}

nb::object PyCommunicator::broadcast(nb::handle x, const RankNumber& root_number, nb::handle out,
                                     const Algorithm& algorithm, nb::handle stream) {
  const int root = read_rank("root", root_number, size());
  const Array in(x, "x", out.is_none() && rank() != root);
  const Options options{algorithm, stream, Op::sum, root};
  if (out.is_none()) {
    call(Collective::broadcast, in, in.data, in.data, in.count, options);
    return nb::borrow(x);
  }
  const Output to(out, x, in, in.shape, stream);
  call(Collective::broadcast, in, in.data, to.array.data, in.count, options);
  return to.object;
}

nb::object PyCommunicator::all_gather(nb::handle x, nb::handle out, const Algorithm& algorithm,
                                      nb::handle stream) {
  const Array in(x, "x", false);
  const Output to(out, x, in, with_ranks(in.shape, size()), stream);
  call(Collective::all_gather, in, in.data, to.array.data, in.count, {algorithm, stream});
  return to.object;
}

nb::object PyCommunicator::gather(nb::handle x, const RankNumber& root_number, nb::handle out,
                                  const Algorithm& algorithm, nb::handle stream) {
  const int root = read_rank("root", root_number, size());
  const Array in(x, "x", false);
  const OutputAtRoot to(out, x, in, with_ranks(in.shape, size()), rank() == root, stream);
  call(Collective::gather, in, in.data, to.data(), in.count, {algorithm, stream, Op::sum, root});
  return to.object();
}

nb::object PyCommunicator::reduce_scatter(nb::handle x, const OpName& op, nb::handle out,
                                          const Algorithm& algorithm, nb::handle stream, double factor) {
  const Array in(x, "x", false);
  const Output to(out, x, in, without_ranks(in, size(), "x"), stream);
  call(Collective::reduce_scatter, in, in.data, to.array.data, to.array.count,
       {algorithm, stream, read_op(op.text), 0, Wire::exact, factor});
  return to.object;
}

nb::object PyCommunicator::scatter(nb::handle x, const RankNumber& root_number, nb::handle out,
                                   const Algorithm& algorithm, nb::handle stream) {
  const int root = read_rank("root", root_number, size());
  const Options options{algorithm, stream, Op::sum, root};
  if (x.is_none()) {
    if (rank() == root) throw UsageError("scatter needs x at the root, rank " + std::to_string(root) + ".");
    if (out.is_none()) throw UsageError("scatter without x needs out, which says the shape and dtype.");
    const Array to(out, "out", true);
    call(Collective::scatter, to, nullptr, to.data, to.count, options);
    return nb::borrow(out);
  }
  const Array in(x, "x", false);
  const Output to(out, x, in, without_ranks(in, size(), "x"), stream);
  call(Collective::scatter, in, in.data, to.array.data, to.array.count, options);
  return to.object;
}

nb::object PyCommunicator::all_to_all(nb::handle x, nb::handle out, const Algorithm& algorithm,
                                      nb::handle stream) {
  const Array in(x, "x", false);
  without_ranks(in, size(), "x");
  const Output to(out, x, in, in.shape, stream);
  call(Collective::all_to_all, in, in.data, to.array.data, in.count / static_cast<std::size_t>(size()),
       {algorithm, stream});
  return to.object;
}

nb::object PyCommunicator::all_to_all_v(nb::handle x, nb::handle send_counts, nb::handle recv_counts,
                                        nb::handle out, const Algorithm& algorithm, nb::handle stream) {
  const Array in(x, "x", false);
  const Counts counts(in, send_counts, recv_counts);
  const Output to(out, x, in, {counts.received}, stream);
  const Prepared prepared = prepare(in, in.data, to.array.data, 0, {algorithm, stream});
  call(
      prepared,
      [&](const Call& c, const auto& make) {
        make(c, std::span<const std::size_t>(counts.sends), std::span<const std::size_t>(counts.receives));
      },
      small(prepared.call, std::max(in.count, counts.received)));
  return to.object;
}

void PyCommunicator::send(nb::handle x, const RankNumber& peer, const Algorithm& algorithm, nb::handle stream,
                          std::optional<int> tag) {
  const int to = read_rank("destination", peer, size());
  const Array in(x, "x", false);
  const Prepared prepared = prepare(in, in.data, nullptr, in.count, {algorithm, stream});
  call(
      prepared,
      [&](const Call& c, const auto& make) {
        if (tag) make(Collective::send, c, to, -1, *tag);
        else make(Collective::send, c, to, -1);
      },
      !tag && small(prepared.call));
}

nb::object PyCommunicator::recv(nb::handle out, const RankNumber& peer, const Algorithm& algorithm,
                                nb::handle stream, std::optional<int> tag) {
  const int from = read_rank("source", peer, size());
  const Array to(out, "out", true);
  const Beginning* const beginning = this_thread().beginning;
  const auto begun = beginning ? beginning->begun : nullptr;
  PyBound* const bound = beginning ? beginning->bound : nullptr;
  const Prepared prepared = prepare(to, nullptr, to.data, to.count, {algorithm, stream});
  const Received received = call(
      prepared,
      [&](const Call& c, const auto& make) {
        if (tag) make(Collective::recv, c, -1, from, *tag);
        else make(Collective::recv, c, -1, from);
      },
      !tag && small(prepared.call));
  if (bound) bound->receives = tag.has_value();
  if (!tag || bound) return nb::borrow(out);
  return nb::cast(PyReceived{nb::borrow(out), begun, received});
}

nb::object PyCommunicator::send_recv(nb::handle x, const RankNumber& dst, nb::handle out,
                                     const RankNumber& src, const Algorithm& algorithm, nb::handle stream) {
  const int to = read_rank("destination", dst, size()), from = read_rank("source", src, size());
  const Array in(x, "x", false);
  const Output received(out, x, in, in.shape, stream);
  const Prepared prepared = prepare(in, in.data, received.array.data, in.count, {algorithm, stream});
  call(
      prepared, [&](const Call& c, const auto& make) { make(Collective::send_recv, c, to, from); },
      small(prepared.call));
  return received.object;
}

void PyCommunicator::batch_send_recv(const Messages& sends, const Messages& receives, nb::handle stream) {
  const Batch batch(sends, receives, size());
  if (batch.arrays.empty()) return;
  for (const Array& one : batch.arrays) {
    check_device(one);
    if (Beginning* const beginning = this_thread().beginning) beginning->keep(one.owner());
  }
  call(prepare(batch.arrays[0], nullptr, nullptr, 0, {std::nullopt, stream}),
       [&](const Call& c, const auto& make) {
         make(c, std::span<const Communicator::Outgoing>(batch.outgoing),
              std::span<const Communicator::Incoming>(batch.incoming));
       });
}

std::unique_ptr<PyCommunicator> PyCommunicator::split(int color, int key) {
  const WithoutGil released(*this);
  auto made = communicator_.split(color, key);
  return made ? std::make_unique<PyCommunicator>(std::move(*made)) : nullptr;
}

void PyCommunicator::synchronize(nb::handle stream) {
  void* handle = stream_handle(stream);
  const WithoutGil released(*this);
  communicator_.synchronize(handle);
}

nb::object PyCommunicator::empty(nb::handle shape, nb::handle dtype,
                                 const std::optional<std::string>& device) {
  const Shape extents = read_shape(shape);
  const DType type = read_dtype(dtype);
  std::size_t bytes = size_of(type);
  for (const std::size_t extent : extents)
    if (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > static_cast<std::size_t>(PTRDIFF_MAX) / 2)
      throw ResourceError("an array of shape " + text(extents) +
                          " is more than memory can hold: check the shape.");
  const Memory memory = memory_of(device);
  auto buffer = [&] {
    const WithoutGil released(*this);
    return std::make_unique<Buffer>(communicator_.empty(bytes, memory));
  }();
  void* data = buffer->data();
  const nb::capsule owner(buffer.release(), [](void* held) noexcept { delete static_cast<Buffer*>(held); });
  const bool on_gpu = memory == Memory::device;
  return array_over(data, memory, on_gpu ? communicator_.device().value_or(0) : 0, type, extents,
                    on_gpu ? imported_library() : Library::other, owner);
}

// An array that cannot be taken is refused on every rank: the others would wait for one that raised alone.
PyRegistration PyCommunicator::register_array(nb::object x) {
  struct Kept {
    nb::object object;
    Array array;
  };
  MemoryRange range;
  try {
    Array array(x, "x", false);
    check_device(array);
    range = {.data = array.data, .bytes = array.count * size_of(array.dtype), .memory = array.memory};
    range.owner = {new Kept{std::move(x), std::move(array)}, [](Kept* kept) {
                     const nb::gil_scoped_acquire gil;
                     delete kept;
                   }};
  } catch (const UsageError& error) { range.problem = error.what(); }
  Registration registration = [&] {
    const WithoutGil released(*this);
    return communicator_.register_memory(range);
  }();
  return {*this, std::move(registration)};
}

void PyRegistration::close() {
  const nb::object of = of_;  // another thread may close it too
  if (!of.is_valid()) return;
  {
    const PyCommunicator::WithoutGil released(nb::cast<PyCommunicator&>(of));
    registration_.close();
  }
  of_.reset();
}

Memory PyCommunicator::memory_of(const std::optional<std::string>& device) const {
  if (!device) return communicator_.device() ? Memory::device : Memory::host;
  const Memory memory = read_device(*device);
  if (memory == Memory::device && !communicator_.device())
    throw UsageError("the communicator has no GPU: make it with device=, on every rank.");
  return memory;
}

std::string PyCommunicator::plan(const std::string& collective, std::size_t bytes, bool symmetric,
                                 const std::optional<std::string>& device, bool in_place,
                                 const std::optional<std::string>& wire) {
  return std::string(
      Tuning(communicator_)
          .plan(read_collective(collective), bytes, symmetric, memory_of(device), in_place, read_wire(wire)));
}

int PyCommunicator::sms(const std::string& collective, std::size_t bytes, const std::string& algorithm,
                        bool symmetric, bool in_place) {
  return Tuning(communicator_).sms(read_collective(collective), bytes, symmetric, algorithm, in_place);
}

void PyCommunicator::set_plan(const PlanRows& rows, const std::optional<std::string>& device) {
  const bool across = device && read_level(*device) == Level::nodes;
  Tuning(communicator_).set_plan(read_plan(rows), across ? Level::nodes : level_of(memory_of(device)));
}

}  // namespace unisono::python
