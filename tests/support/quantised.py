"""The reference of a quantised all_reduce, from its definition in plain numpy, and its error bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BLOCK = 32
WIRES = ("fp8", "int8")
DTYPES = ("f32", "f16", "bf16")
LARGEST = {"fp8": 448.0, "int8": 127.0}
TOP = {"fp8": 8, "int8": 6}  # the exponent of LARGEST


def blocks_of(values: Array) -> Array:
    """Returns the values as f64, a row for each block, filled up with zeros."""
    rows = -(-values.size // BLOCK)
    padded = np.zeros(rows * BLOCK)
    padded[: values.size] = values.astype(np.float64)
    return padded.reshape(rows, BLOCK)


def to_codes(scaled: Array, wire: str) -> Array:
    """Returns the nearest numbers of the format, ties to even, as f64."""
    if wire == "int8":
        return np.rint(scaled) + 0.0  # an integer has no -0
    return scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def as_travelled(values: Array, wire: str) -> Array:
    """Returns `values` as they arrive, as f32.

    A block's step is a power of two, from 2^-126 on. With the least such step, the block's largest magnitude
    becomes a number of the format that is no less than 2^TOP, or would be with a smaller step.
    """
    rows = blocks_of(values)
    with np.errstate(all="ignore"):
        largest = np.abs(rows).max(axis=1)
        finite = np.isfinite(largest)
        safe = np.where(finite & (largest > 0), largest, 1.0)
        exponent = np.floor(np.log2(safe))
        exponent -= np.exp2(exponent) > safe  # log2 rounds
        exponent += np.exp2(exponent + 1) <= safe
        step = exponent - TOP[wire]
        scaled = safe * np.exp2(-step)
        beyond = (464.0 if wire == "fp8" else 127.5) <= scaled
        step = np.maximum(step + beyond, -126)
        step = np.where(largest > 0, step, -126)[:, None]
        codes = to_codes(rows * np.exp2(-step), wire)
        back = (codes * np.exp2(step)).astype(np.float32)
        back[~finite] = np.nan
    return back.reshape(-1)[: values.size]


def all_reduce(xs: Sequence[Array], op: str, wire: str) -> Array:
    """Returns the bits that every rank must get. All NaNs count as equal."""
    if len(xs) == 1:
        return xs[0]
    with np.errstate(all="ignore"):
        total = as_travelled(xs[0], wire)
        for x in xs[1:]:
            total = total + as_travelled(x, wire)
        if op == "avg":
            total = total / np.float32(len(xs))
        return as_travelled(total, wire).astype(xs[0].dtype)


def bound(xs: Sequence[Array], op: str, wire: str) -> tuple[Array, Array]:
    """Returns the exact result and the allowed distance, by the bound in the docstring of all_reduce, for
    finite numbers whose results do not overflow."""
    n, count = len(xs), xs[0].size
    wide = [x.astype(np.float64) / (n if op == "avg" else 1) for x in xs]
    exact = np.sum(wide, axis=0)
    magnitude = np.sum([np.abs(x) for x in wide], axis=0)

    def of_block(values: Array) -> Array:
        return np.repeat(np.abs(blocks_of(values)).max(axis=1), BLOCK)[:count]

    largest = np.sum([of_block(x) for x in wide], axis=0)
    if wire == "int8":
        inputs = largest / 127
        total = of_block(np.abs(exact) + inputs) / 127
    else:
        inputs = magnitude / 16 + largest / 2**17
        near = np.abs(exact) + inputs
        total = near / 16 + of_block(near) / 2**17
    roundoff = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[xs[0].dtype.name]
    tiny = 2.0**-24 if xs[0].dtype == np.float16 else 2.0**-126
    rest = (n + 1) * 2.0**-23 * magnitude + roundoff * (np.abs(exact) + inputs + total) + (n + 1) * tiny
    return exact, inputs + total + rest
