"""The result of the fused norms in plain numpy. Shares no code with the library.

All functions take rows of a dtype, [rows, hidden], and work in f32 as include/unisono/fused.hpp says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_reference import BLOCK, E4M3, quantised
from reference import Array, combine

F32 = np.float32
_PARTIALS = 1024


def joined(xs: Sequence[Array], residual: Array) -> Array:
    """Returns the sum over the ranks, plus the residual."""
    with np.errstate(all="ignore"):
        return (combine(xs, "sum").astype(F32) + residual.astype(F32)).astype(residual.dtype)


def row_sums(terms: Array) -> Array:
    """Returns each row's sum, [rows, 1], in the order of the library."""
    rows, hidden = terms.shape
    padded = np.zeros((rows, -(-hidden // _PARTIALS) * _PARTIALS), F32)
    padded[:, :hidden] = terms
    partials = np.zeros((rows, _PARTIALS), F32)
    for begin in range(0, padded.shape[1], _PARTIALS):
        partials = partials + padded[:, begin : begin + _PARTIALS]
    width = _PARTIALS // 2
    while width:
        partials = partials[:, :width] + partials[:, width:]
        width //= 2
    return partials


def normalised(rows: Array, weight: Array, bias: Array | None, eps: float, kind: str) -> Array:
    """Returns the norm of each row. kind: rms or layer."""
    with np.errstate(all="ignore"):
        wide, count = rows.astype(F32), F32(rows.shape[1])
        if kind == "layer":
            wide = wide - row_sums(wide) / count
        factor = F32(1) / np.sqrt(row_sums(wide * wide) / count + F32(eps))
        out = wide * factor * weight.astype(F32)
        if bias is not None:
            out = out + bias.astype(F32)
        return np.asarray(out.astype(rows.dtype))


def codes_and_scales(rows: Array, quant: str, scale: float | None = None) -> tuple[Array, Array | None]:
    """Returns rows in e4m3, and their scales. Without a scale of each row or block: None."""
    with np.errstate(all="ignore"):
        if quant == "fp8":
            assert scale is not None
            scaled = rows.astype(F32) * (F32(1) / F32(scale))
            return np.clip(scaled, F32(-448), F32(448)).astype(E4M3), None
        if quant == "fp8_token":
            wide = rows.astype(F32)
            bad = ~np.isfinite(wide).all(axis=1, keepdims=True)
            largest = np.where(bad, F32(1), np.maximum(np.abs(wide).max(axis=1, keepdims=True), F32(1e-4)))
            codes = (wide * (F32(448) / largest)).astype(E4M3).view(np.uint8)
            codes = np.where(bad, np.uint8(0x7F), codes).view(E4M3)
            return codes, np.where(bad, F32("nan"), largest / F32(448)).astype(F32)
    codes, scales = quantised(rows, {"fp8_128": "e4m3_128", "mx": "mx"}[quant])
    return codes, scales


def scale_shape(shape: tuple[int, ...], quant: str) -> tuple[int, ...]:
    """Returns the shape of the scales of x. shape: of x."""
    blocks = -(-shape[-1] // BLOCK)
    return *shape[:-1], {"fp8_token": 1, "fp8_128": blocks, "mx": -(-blocks // 4) * 4}[quant]
