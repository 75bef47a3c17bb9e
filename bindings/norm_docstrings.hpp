// The docstrings of the fused norms, which the type stubs carry too.
#pragma once

namespace unisono::python::doc {

constexpr const char* kNormOptions =
    R"(Options of Communicator.all_reduce_rms_norm and all_reduce_layer_norm.

Args:
    out: for the first result: like x, or with quant float8_e4m3fn; None: a new array. May be x if quant is None.
    residual_out: for the second result, like residual; None: a new array. May be residual.
    quant: how the normalised rows are given. None: in the dtype of x. Otherwise as float8_e4m3fn with scales:
        fp8: by `scale`. Elements beyond 448 * scale become 448.
        fp8_token: by a float32 of each row, (..., 1): max(largest magnitude, 1e-4) / 448.
        fp8_128: by such a float32 of each 128 elements, (..., ceil(hidden / 128)).
        mx: by a power of two of each 128 elements, the next above, as its exponent's byte (UE8M0): uint8, and the last
            extent is rounded up to a multiple of 4.
        A row or a block with an infinity or a NaN becomes NaN, except with fp8.
    scale: of quant fp8: a positive float.
    scales_out: for the scales; None: a new array.
    residual: replicated: every rank has all of it. sharded: each rank has the rows that it owns alone, and gets
        residual_out of those. Rank r owns ceil(rows / size) rows from row r * ceil(rows / size) on, the last ranks
        fewer or none.
    algorithm: one_shot, two_shot or apart; on GPUs also one_shot_ll128 or two_shot_ll128, which need NVLink; None: as
        the plan of all_reduce_rms_norm says. The bits are the same.

On a GPU the residual is replicated. With quant, residual_out is residual on every rank or on none there, and with the
algorithm apart on none.)";

constexpr const char* kAllReduceRmsNorm =
    R"(Sums x over the ranks, adds the residual, and normalises each row by its root mean square.

As these calls apart, with the same bits on every rank, whatever the algorithm:

>>> summed = comm.all_reduce(x)
>>> residual_out = summed + residual
>>> norm_out = rms_norm(residual_out, weight, eps)  # v * (1 / sqrt(mean(v * v) + eps)) * weight in f32, rounded once

Args:
    x: (..., hidden), float32, float16 or bfloat16, on the CPU or the GPU: this rank's part of the sum.
    residual: like x, the same on every rank; sharded: (owned rows, hidden).
    weight: (hidden,), of the dtype of x.
    eps: the same on every rank.
    options: a NormOptions, the same on every rank apart from its arrays; None: NormOptions().
    stream: of arrays on a GPU, as in the calls of the Communicator. A CUDA graph may capture the call.

Returns:
    (norm_out, residual_out); with quant ((quantised, scales), residual_out). With fp8, scales is options.scale.

Raises:
    UsageError: shapes, dtypes or options do not fit, or outputs overlap other arrays. Nothing has moved.
    The errors of every call of a Communicator.)";

constexpr const char* kAllReduceLayerNorm =
    R"(Does the same as all_reduce_rms_norm, with the layer norm of each row.

>>> norm_out = layer_norm(residual_out, weight, bias, eps)  # (v - m) * (1 / sqrt(mean((v - m)**2) + eps)) * weight + bias

m is the row's mean. All of it is in f32, rounded once.

Args:
    x, residual, weight, options, stream: as all_reduce_rms_norm.
    bias: (hidden,), of the dtype of x; None: none.
    eps: the same on every rank.

Returns:
    as all_reduce_rms_norm.

Raises:
    as all_reduce_rms_norm.)";

}  // namespace unisono::python::doc
