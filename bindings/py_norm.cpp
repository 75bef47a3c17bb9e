#include "py_norm.hpp"

#include "dtypes.hpp"
#include "new_array.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

// x, which the other arrays of a call must fit.
struct Like {
  nb::handle object;
  const Array& array;
  nb::object stream;  // of the call

  Array take(nb::handle one, const char* what, bool written, DType dtype, const Shape& shape) const;
};

Array Like::take(nb::handle one, const char* what, bool written, DType dtype, const Shape& shape) const {
  Array taken(one, what, written);
  if (taken.dtype != dtype)
    throw UsageError(std::string(what) + " has dtype " + std::string(name_of(taken.dtype)) +
                     ", but this call takes " + std::string(name_of(dtype)) + ": convert it.");
  if (taken.shape != shape)
    throw UsageError(std::string(what) + " has shape " + text(taken.shape) + ": this call takes " +
                     text(shape) + ".");
  const bool both_known = taken.device >= 0 && array.device >= 0;
  if (taken.memory != array.memory ||
      (array.memory == Memory::device && both_known && taken.device != array.device))
    throw UsageError(std::string(what) + " is not where x is, on the CPU or the same GPU: move one of them.");
  return taken;
}

// An output: the array that the caller gives, or a new one like x.
struct Result {
  Result(const nb::object& asked, const char* what, const Like& like, DType dtype, const Shape& shape)
      : object(!asked.is_none() ? asked
               : like.array.memory == Memory::device
                   ? empty_like_on(like.object, shape, dtype, like.array.device, like.stream)
                   : empty_like(like.object, shape, dtype)),
        array(like.take(object, what, true, dtype, shape)) {}
  nb::object object;
  Array array;
};

}  // namespace

PyNorm::Pair PyNorm::run(Collective collective, PyCommunicator& communicator, nb::handle x_object,
                         nb::handle residual_object, nb::handle weight_object, nb::handle bias_object,
                         double eps, const PyNormOptions& options, nb::handle stream) {
  const Array x(x_object, "x", false);
  communicator.check_device(x);
  const Like like{x_object, x, x.stream(stream)};
  if (x.shape.empty()) throw UsageError("x has no axis: its last one is a row, of `hidden` elements.");
  NormCall call{.x = x.data,
                .rows = 1,
                .hidden = x.shape.back(),
                .dtype = x.dtype,
                .eps = static_cast<float>(eps),
                .quant = options.quant,
                .sharded = options.sharded,
                .algorithm = options.algorithm,
                .memory = x.memory,
                .stream = stream_handle(like.stream)};
  for (std::size_t axis = 0; axis + 1 < x.shape.size(); ++axis) call.rows *= x.shape[axis];
  if (options.quant == NormQuant::fp8 && !options.scale)
    throw UsageError("quant \"fp8\" needs a scale: give it in the options, or take fp8_token.");
  if (options.quant != NormQuant::fp8 && options.scale)
    throw UsageError("a scale is for quant \"fp8\": leave it out.");
  if (options.scale) call.scale = static_cast<float>(*options.scale);

  const Shape row{call.hidden};
  const Shape held =
      options.sharded
          ? Shape{owned_rows(call.rows, communicator.rank(), communicator.size()).count, call.hidden}
          : x.shape;
  const Array residual = like.take(residual_object, "residual", false, x.dtype, held);
  const Array weight = like.take(weight_object, "weight", false, x.dtype, row);
  std::optional<Array> bias;
  if (!bias_object.is_none()) bias.emplace(like.take(bias_object, "bias", false, x.dtype, row));
  const Result out(options.out, "out", like, options.quant == NormQuant::none ? x.dtype : DType::f8e4m3,
                   x.shape);
  const Result residual_out(options.residual_out, "residual_out", like, x.dtype, held);
  nb::object scales = nb::none();
  std::optional<Result> made;
  if (const std::size_t bytes = norm_scale_bytes(options.quant, call.hidden); bytes > 0) {
    const DType dtype = options.quant == NormQuant::mx ? DType::u8 : DType::f32;
    Shape shape = x.shape;
    shape.back() = bytes / size_of(dtype);
    made.emplace(options.scales_out, "scales_out", like, dtype, shape);
    scales = made->object;
    call.scales = made->array.data;
  } else if (!options.scales_out.is_none()) {
    throw UsageError("scales_out is for quant fp8_token, fp8_128 and mx: leave it out.");
  }
  call.residual = residual.data;
  call.weight = weight.data;
  call.bias = bias ? bias->data : nullptr;
  call.out = out.array.data;
  call.residual_out = residual_out.array.data;
  {
    const PyCommunicator::WithoutGil released(communicator);
    collective(communicator.communicator_, call);
  }
  if (call.memory == Memory::device) communicator.keep_stream(like.stream, call.stream);
  if (options.quant == NormQuant::none) return nb::make_tuple(out.object, residual_out.object);
  if (options.scale) scales = nb::float_(*options.scale);
  return nb::make_tuple(nb::make_tuple(out.object, scales), residual_out.object);
}

PyNorm::Pair PyNorm::rms(PyCommunicator& communicator, nb::handle x, nb::handle residual, nb::handle weight,
                         double eps, const Options& options, nb::handle stream) {
  return run(&all_reduce_rms_norm, communicator, x, residual, weight, nb::none(), eps,
             options.value_or(PyNormOptions{}), stream);
}

PyNorm::Pair PyNorm::layer(PyCommunicator& communicator, nb::handle x, nb::handle residual, nb::handle weight,
                           nb::handle bias, double eps, const Options& options, nb::handle stream) {
  return run(&all_reduce_layer_norm, communicator, x, residual, weight, bias, eps,
             options.value_or(PyNormOptions{}), stream);
}

}  // namespace unisono::python
