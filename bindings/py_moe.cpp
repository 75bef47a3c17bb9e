#include "py_moe.hpp"

#include <algorithm>
#include <string_view>

#include "dtypes.hpp"
#include "objects.hpp"
#include "output.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

constexpr std::size_t kMostArrays = 1024;  // that are kept: more come only of payloads of ever other shapes

std::string names_of(std::initializer_list<DType> dtypes) {
  std::string text;
  for (const DType* one = dtypes.begin(); one != dtypes.end(); ++one)
    text += (one == dtypes.begin()     ? ""
             : one + 1 == dtypes.end() ? " or "
                                       : ", ") +
            std::string(name_of(*one));
  return text;
}

}  // namespace

OwnedMoe::OwnedMoe(PyCommunicator& of, const MoeShape& shape, const MoeOptions& options)
    : object(nb::find(of)), communicator(of), moe([&] {
        const PyCommunicator::WithoutGil released(of);
        return Moe(of.communicator_, shape, options);
      }()) {}

nb::object MoeArrays::view(const void* data, DType dtype, const Shape& shape, Library library) {
  const bool bare = library == Library::other && moe().options().memory == Memory::device;  // has no views
  auto view = [&](const nb::object& array) {
    return bare ? array : call_method(array, library == Library::torch ? names().detach : names().view);
  };
  for (const Made& one : made_)
    if (one.data == data && one.dtype == dtype && one.library == library && one.shape == shape)
      return view(one.array);
  const nb::capsule owner(new std::shared_ptr(owned_),
                          [](void* held) noexcept { delete static_cast<std::shared_ptr<OwnedMoe>*>(held); });
  const nb::object array =
      array_over(const_cast<void*>(data), moe().options().memory, owned_->communicator.device().value_or(0),
                 dtype, shape, library, owner);
  if (made_.size() == kMostArrays) made_.clear();
  made_.push_back({data, dtype, library, shape, array});
  return view(array);
}

nb::object PyMoeReceived::make(Field field) const {
  const Moe& moe = arrays_->moe();
  const std::size_t held = received_.rows_held;
  const auto top_k = static_cast<std::size_t>(moe.shape().top_k);
  const auto experts = static_cast<std::size_t>(moe.local_experts());
  const bool expert_major = moe.options().layout == MoeLayout::expert_major;
  const bool mx = moe.options().scales == MoeScales::mx;
  auto array = [&](const void* data, DType dtype, const Shape& shape) -> nb::object {
    return data ? arrays_->view(data, dtype, shape, library_) : nb::none();
  };
  switch (field) {
    case x: return array(received_.x, rows_.dtype, {held, rows_.shape[0]});
    case scales:
      return array(received_.scales, mx ? DType::u8 : DType::f32,
                   {held, moe.scale_bytes() / (mx ? 1 : sizeof(float))});
    case topk_idx: return array(received_.topk_idx, DType::i32, {held, top_k});
    case topk_weights:
      return array(received_.weights, DType::f32, expert_major ? Shape{held} : Shape{held, top_k});
    case counts: return array(received_.counts, DType::i32, {experts});
    case offsets: return array(received_.offsets, DType::i32, {experts + 1});
    case source_rows:
      return array(received_.source_rows, DType::i32, {static_cast<std::size_t>(arrays_->ranks())});
    case expert_rows: return array(received_.expert_rows, DType::i32, {held * top_k});
    case row_expert: return array(received_.row_expert, DType::i32, {held});
    case rows: return array(received_.rows, DType::i32, {});
    case dropped: return array(received_.dropped, DType::i32, {});
    case kFields: break;
  }
  return nb::none();
}

nb::object PyMoeReceived::more() {
  if (more_.is_valid()) return more_;
  nb::list arrays;
  for (std::size_t i = 0; i < payloads_.size(); ++i) {
    Shape shape{received_.rows_held};
    shape.append(payloads_[i].shape.begin(), payloads_[i].shape.end());
    arrays.append(arrays_->view(received_.more[i], payloads_[i].dtype, shape, library_));
  }
  return more_ = nb::tuple(arrays);
}

// The arrays of a dispatch, which live until it has ended.
struct PyMoe::Input {
  Input(const PyMoe& moe, nb::object x_object, nb::object idx_object, nb::object weights_object,
        const Handle& of, nb::object out_object, std::optional<long long> max_tokens,
        nb::handle asked_stream);
  Input(const Input&) = delete;

  std::array<nb::object, 4> objects;  // as the caller gave them
  Array x;
  std::vector<Array> arrays;
  std::vector<MoePayload> more;
  PyMoeReceived::Payload rows;  // of the received x
  std::vector<PyMoeReceived::Payload> payloads;
  std::optional<MoeHandle> handle;
  nb::object stream;
  MoeTokens tokens;

 private:
  static nb::object first(const nb::object& x) {
    if (!PyTuple_Check(x.ptr())) return x;
    if (PyTuple_GET_SIZE(x.ptr()) == 0) throw UsageError("x is an empty tuple: pass x, or x and payloads.");
    return nb::borrow(PyTuple_GET_ITEM(x.ptr(), 0));
  }
  void add_payloads(const PyMoe& moe);
};

PyMoe::Input::Input(const PyMoe& moe, nb::object x_object, nb::object idx_object, nb::object weights_object,
                    const Handle& of, nb::object out_object, std::optional<long long> max_tokens,
                    nb::handle asked_stream)
    : objects{std::move(x_object), std::move(idx_object), std::move(weights_object), std::move(out_object)},
      x(first(objects[0]), "x", false) {
  const auto& [all, idx, weights, out] = objects;
  const MoeShape& shape = moe.moe().shape();
  moe.check_memory(x, "x");
  const bool scaled = moe.moe().options().scales != MoeScales::none;
  if (scaled && x.dtype != shape.dtype)
    throw UsageError("x has dtype " + std::string(name_of(x.dtype)) + ", but the Moe quantises " +
                     std::string(name_of(shape.dtype)) + ": convert x, or make a Moe without scales.");
  if (x.shape.size() != 2 || x.shape[1] == 0 || (scaled && x.shape[1] != shape.hidden))
    throw UsageError("x has shape " + text(x.shape) + ": this Moe takes (tokens, " +
                     std::to_string(shape.hidden) + ").");
  stream = x.stream(asked_stream);
  tokens = {.x = x.data, .tokens = x.shape[0], .stream = stream_handle(stream)};
  if (!scaled) tokens.row_bytes = x.shape[1] * size_of(x.dtype);
  if (max_tokens) tokens.max_tokens = read_size("max_tokens", *max_tokens);
  rows = {scaled ? DType::f8e4m3 : x.dtype, {x.shape[1]}};
  if (of) handle = of->handle;
  const Shape routes{tokens.tokens, static_cast<std::size_t>(shape.top_k)};
  arrays.reserve(3);
  if (!idx.is_none()) {
    const Array& one = arrays.emplace_back(moe.take(idx, "topk_idx", {DType::i32, DType::i64}, routes));
    tokens.topk_idx = one.data;
    tokens.index = one.dtype;
  } else if (!of) {
    throw UsageError("dispatch needs topk_idx, or the handle of an earlier dispatch: give one of them.");
  }
  if (!weights.is_none())
    tokens.weights = static_cast<const float*>(
        arrays.emplace_back(moe.take(weights, "topk_weights", {DType::f32}, routes)).data);
  if (!out.is_none())
    tokens.out =
        arrays.emplace_back(moe.take(out, "out", {rows.dtype}, {moe.moe().rows_held(), rows.shape[0]}, true))
            .data;
  if (PyTuple_Check(all.ptr())) add_payloads(moe);
}

void PyMoe::Input::add_payloads(const PyMoe& moe) {
  const auto items = nb::borrow<nb::tuple>(objects[0]);
  for (std::size_t i = 1; i < items.size(); ++i) {
    const std::string what = "payload " + std::to_string(i);
    const Array& one = arrays.emplace_back(items[i], what.c_str(), false);
    moe.check_memory(one, what.c_str());
    if (one.shape.empty() || one.shape[0] != tokens.tokens)
      throw UsageError(what + " has shape " + text(one.shape) + ": its first axis is the tokens of x, " +
                       std::to_string(tokens.tokens) + ".");
    const auto& [dtype, shape] =
        payloads.emplace_back(one.dtype, Shape{one.shape.begin() + 1, one.shape.end()});
    std::size_t bytes = size_of(dtype);
    for (const std::size_t extent : shape) bytes *= extent;
    more.push_back({one.data, bytes});
  }
  tokens.more = more;
}

// The arrays of a combine, which live until it has ended.
struct PyMoe::Output {
  Output(const PyMoe& moe, nb::object y_object, const PyMoeHandle& of, nb::object weights_object,
         nb::object bias_object, const nb::object& out_object, nb::handle asked_stream);
  Output(const Output&) = delete;

  std::array<nb::object, 3> objects;  // as the caller gave them
  Array y;
  std::vector<Array> arrays;
  std::optional<python::Output> out;
  nb::object result;  // the array of `out`
  nb::object stream;
  MoeOutputs outputs;
  MoeHandle handle;
};

PyMoe::Output::Output(const PyMoe& moe, nb::object y_object, const PyMoeHandle& of, nb::object weights_object,
                      nb::object bias_object, const nb::object& out_object, nb::handle asked_stream)
    : objects{std::move(y_object), std::move(weights_object), std::move(bias_object)},
      y(objects[0], "y", false),
      handle(of.handle) {
  const auto& [y_given, weights, bias] = objects;
  const std::size_t tokens = moe.moe().tokens_of(handle);
  moe.check_memory(y, "y");
  if (y.dtype != DType::f32 && y.dtype != DType::f16 && y.dtype != DType::bf16)
    throw UsageError("y has dtype " + std::string(name_of(y.dtype)) + ": pass f32, f16 or bf16.");
  if (y.shape.size() != 2 || (of.rows && y.shape[0] < *of.rows))
    throw UsageError("y has shape " + text(y.shape) + ": pass a row for each of the " +
                     (of.rows ? std::to_string(*of.rows) + " " : std::string()) +
                     "received rows, or of all " + std::to_string(moe.moe().rows_held()) + ".");
  stream = y.stream(asked_stream);
  arrays.reserve(2);
  outputs = {.y = y.data,
             .row_bytes = y.shape[1] * size_of(y.dtype),
             .dtype = y.dtype,
             .stream = stream_handle(stream)};
  if (!weights.is_none())
    outputs.weights = static_cast<const float*>(
        arrays.emplace_back(moe.take(weights, "topk_weights", {DType::f32}, {y.shape[0]})).data);
  const Shape shape{tokens, y.shape[1]};
  if (!bias.is_none()) outputs.bias = arrays.emplace_back(moe.take(bias, "bias", {y.dtype}, shape)).data;
  out.emplace(out_object, y_given, y, shape, stream, "y");
  outputs.out = out->array.data;
  result = out->object;
}

PyMoe::PyMoe(PyCommunicator& communicator, const MoeShape& shape, PyMoeOptions options)
    : options_(std::move(options)) {
  options_.options.memory = communicator.memory_of(options_.device);
  owned_ = std::make_shared<OwnedMoe>(communicator, shape, options_.options);
  arrays_ = std::make_shared<MoeArrays>(owned_);
}

PyMoe::~PyMoe() = default;

void PyMoe::check_memory(const Array& array, const char* what) const {
  if (array.memory != options_.options.memory) {
    const bool on_gpu = array.memory == Memory::device;
    throw UsageError(std::string(what) + " is on the " + (on_gpu ? "GPU" : "CPU") +
                     ", but the memory of this Moe on the " + (on_gpu ? "CPU" : "GPU") +
                     ": move it, or make the Moe with device=\"" + (on_gpu ? "cuda" : "cpu") + "\".");
  }
  owned_->communicator.check_device(array);
}

Array PyMoe::take(nb::handle array, const char* what, std::initializer_list<DType> dtypes, const Shape& shape,
                  bool written) const {
  Array one(array, what, written);
  check_memory(one, what);
  if (std::find(dtypes.begin(), dtypes.end(), one.dtype) == dtypes.end())
    throw UsageError(std::string(what) + " has dtype " + std::string(name_of(one.dtype)) + ": pass " +
                     names_of(dtypes) + ".");
  if (one.shape != shape)
    throw UsageError(std::string(what) + " has shape " + text(one.shape) + ": this call takes " +
                     text(shape) + ".");
  return one;
}

template <class Run>
auto PyMoe::call(const nb::object& stream, void* handle, const Run& run) {
  PyCommunicator& communicator = owned_->communicator;
  struct After {
    PyCommunicator& communicator;
    const nb::object& stream;
    void* handle;
    bool on_gpu;
    ~After() {
      if (on_gpu) communicator.keep_stream(stream, handle);
    }
  } const after{communicator, stream, handle, options_.options.memory == Memory::device};
  const PyCommunicator::WithoutGil released(communicator);
  return run(owned_->moe);
}

PyMoeReceived PyMoe::received(Input&& input, MoeReceived received) {
  return {arrays_,
          std::move(received),
          std::move(input.rows),
          std::move(input.payloads),
          input.x.library(),
          input.tokens.out ? std::move(input.objects[3]) : nb::object()};
}

PyMoeReceived PyMoe::dispatch(nb::object x, nb::object topk_idx, nb::object topk_weights,
                              const Handle& handle, nb::object out, std::optional<long long> max_tokens,
                              nb::handle stream) {
  Input input(*this, std::move(x), std::move(topk_idx), std::move(topk_weights), handle, std::move(out),
              max_tokens, stream);
  return received(std::move(input), call(input.stream, input.tokens.stream,
                                         [&](Moe& moe) { return moe.dispatch(input.tokens, input.handle); }));
}

void PyMoe::dispatch_begin(nb::object x, nb::object topk_idx, nb::object topk_weights, const Handle& handle,
                           nb::object out, std::optional<long long> max_tokens, nb::handle stream) {
  auto input = std::make_unique<Input>(*this, std::move(x), std::move(topk_idx), std::move(topk_weights),
                                       handle, std::move(out), max_tokens, stream);
  call(input->stream, input->tokens.stream,
       [&](Moe& moe) { moe.dispatch_begin(input->tokens, input->handle); });
  input_ = std::move(input);
}

PyMoeReceived PyMoe::dispatch_end() {
  const std::unique_ptr<Input> input = std::move(input_);
  MoeReceived came = call(input ? input->stream : nb::none(), input ? input->tokens.stream : nullptr,
                          [](Moe& moe) { return moe.dispatch_end(); });
  return received(std::move(*input), std::move(came));
}

nb::object PyMoe::combine(nb::object y, const PyMoeHandle& handle, nb::object topk_weights, nb::object bias,
                          const nb::object& out, nb::handle stream) {
  const Output output(*this, std::move(y), handle, std::move(topk_weights), std::move(bias), out, stream);
  call(output.stream, output.outputs.stream, [&](Moe& moe) { moe.combine(output.outputs, output.handle); });
  return output.result;
}

void PyMoe::combine_begin(nb::object y, const PyMoeHandle& handle, nb::object topk_weights, nb::object bias,
                          const nb::object& out, nb::handle stream) {
  auto output = std::make_unique<Output>(*this, std::move(y), handle, std::move(topk_weights),
                                         std::move(bias), out, stream);
  call(output->stream, output->outputs.stream,
       [&](Moe& moe) { moe.combine_begin(output->outputs, output->handle); });
  output_ = std::move(output);
}

nb::object PyMoe::combine_end() {
  const std::unique_ptr<Output> output = std::move(output_);
  call(output ? output->stream : nb::none(), output ? output->outputs.stream : nullptr,
       [](Moe& moe) { moe.combine_end(); });
  return output->result;
}

std::unique_ptr<PyMoe> make_moe(PyCommunicator& communicator, int experts, int top_k, long long hidden,
                                long long max_tokens, nb::handle dtype,
                                const std::optional<PyMoeOptions>& options) {
  const MoeShape shape{.experts = experts,
                       .top_k = top_k,
                       .hidden = read_size("hidden", hidden),
                       .max_tokens = read_size("max_tokens", max_tokens),
                       .dtype = read_dtype(dtype)};
  return std::make_unique<PyMoe>(communicator, shape, options.value_or(PyMoeOptions{}));
}

}  // namespace unisono::python
