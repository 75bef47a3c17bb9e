"""Expected results of all_reduce_rms_norm, from the seed alone, by plain numpy, for GPUs too.

Rows of random data repeat after a prime number of rows. Unisono's bits are compared: the sum in rank order in
f32, rounded; the residual added, rounded; the norm in f32, each row's squares summed in the order of
src/base/norm.hpp, rounded. Codes are compared as codes times scales.

Other libraries may add in any order. Their bound is that of verify.py for the sum with the residual. An error
of that sum reaches the normalised rows by the row's elements and by its root mean square. Roundings of the
norm come on top: 4 of the dtype, and those of a sum of squares in f32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.bench.buffers import Placed
from unisono.bench.norm import BLOCK, EPS, arrays, shape
from unisono.bench.verify import NUMPY, ROUNDOFF, Arithmetic, Expectation, Piece, combine, period_rows
from unisono.records import Case
from unisono.records.vocabulary import DTYPES, QUANTS

PARTIALS = 1024  # of a row's sum of squares
ROUNDINGS = 4  # of the norm: the root, the quotient and two products
F32, F64 = np.float32, np.float64


@dataclass(frozen=True)
class Data:
    """Rows that repeat: of x of each rank, the residual, and the weight."""

    xs: list[Any]
    residual: Any
    weight: Any


def make_data(case: Case, seed: int, arithmetic: Arithmetic = NUMPY) -> Data:
    rows, hidden = min(shape(case).rows, period_rows(shape(case).hidden)), shape(case).hidden
    blocks = [arithmetic.random_block(case, number, seed, rows * hidden) for number in range(case.ranks + 2)]
    *xs, residual, weight = [arithmetic.tonumpy(one, case.dtype).reshape(rows, hidden) for one in blocks]
    return Data(xs, residual, weight[0])


def expectation(
    case: Case, rank: int, seed: int, bit_exact: bool, arithmetic: Arithmetic, wire: str | None = None
) -> Expectation:
    """Returns the reference for one rank, as verify.expectation."""
    data, hidden, asarray = make_data(case, seed, arithmetic), shape(case).hidden, arithmetic.asarray
    count = shape(case).rows * hidden
    inputs = (data.xs[rank], count), (data.residual, count), (data.weight, hidden)
    x = tuple(Piece(n * count, size, asarray(block.reshape(-1))) for n, (block, size) in enumerate(inputs))
    joined = combine(data.xs, "sum", case.dtype).astype(F32) + data.residual.astype(F32)
    residual_out = joined.astype(DTYPES[case.dtype])
    out = normalised(residual_out, data.weight)
    if shape(case).quant != QUANTS[0]:
        out, residual_out = dequantised(*quantised(out)), residual_out.astype(F32)
    allowed = (None, None) if bit_exact else tolerances(case, data)
    wanted = [
        Piece(n * count, count, asarray(block.reshape(-1)), 0, one and (asarray(one[0]), asarray(one[1])))
        for n, (block, one) in enumerate(zip((out, residual_out), allowed, strict=True))
    ]
    return Expectation(x, tuple(wanted))


def row_sums(terms: Any) -> Any:
    """Returns each row's sum, [rows, 1], in Unisono's order."""
    padded = np.pad(terms, ((0, 0), (0, -terms.shape[1] % PARTIALS)))
    partials = np.zeros((len(terms), PARTIALS), F32)
    for start in range(0, padded.shape[1], PARTIALS):
        partials = partials + padded[:, start : start + PARTIALS]
    while partials.shape[1] > 1:
        half = partials.shape[1] // 2
        partials = partials[:, :half] + partials[:, half:]
    return partials


def normalised(rows: Any, weight: Any) -> Any:
    wide = rows.astype(F32)
    factor = F32(1) / np.sqrt(row_sums(wide * wide) / F32(rows.shape[1]) + F32(EPS))
    return (wide * factor * weight.astype(F32)).astype(rows.dtype)


def quantised(rows: Any) -> tuple[Any, Any]:
    """Returns the codes of rows of finite values, and their scales."""
    blocks = rows.astype(F32).reshape(len(rows), -1, BLOCK)
    largest = np.maximum(abs(blocks).max(axis=2), F32(1e-4))
    codes = (blocks * (F32(448) / largest)[:, :, None]).astype(DTYPES["f8e4m3"])
    return codes.reshape(rows.shape), largest / F32(448)


def dequantised(codes: Any, scales: Any) -> Any:
    return (codes.astype(F32).reshape(*scales.shape, BLOCK) * scales[:, :, None]).reshape(codes.shape)


def decoded(case: Case, placed: Placed) -> Placed:
    """Returns the buffers after a call, with f32 in place of codes and scales, and of all other outputs."""
    if shape(case).quant == QUANTS[0]:
        return placed
    found = arrays(case, placed.buffers.x, placed.buffers.out)
    out = np.concatenate([dequantised(found.out, found.scales), found.residual_out.astype(F32)])
    return replace(placed, buffers=replace(placed.buffers, out=out))


def tolerances(case: Case, data: Data) -> list[tuple[Any, Any]]:
    """Returns (exact result, allowed distance) of each element: of the normalised rows, and of the sum with
    the residual."""
    unit, hidden = ROUNDOFF[case.dtype], shape(case).hidden
    terms = [block.astype(F64) for block in (*data.xs, data.residual)]
    joined: Any = sum(terms)
    error = len(terms) * unit * sum(map(abs, terms))
    factor = 1 / np.sqrt((joined**2).mean(axis=1, keepdims=True) + EPS)
    of_root = np.sqrt((error**2).mean(axis=1, keepdims=True)) * factor + hidden * ROUNDOFF["f32"]
    weight = abs(data.weight.astype(F64))
    out = joined * factor * data.weight.astype(F64)
    near = factor * weight * error + abs(out) * (of_root + ROUNDINGS * unit)
    if shape(case).quant != QUANTS[0]:  # by 4 bits, or by the least code of the largest scale
        total = abs(out) + near
        near = near + total / 16 + float(total.max()) / 2**17
    return [(exact.reshape(-1), bound.reshape(-1)) for exact, bound in ((out, near), (joined, error))]


def bound_text(case: Case, bit_exact: bool, wire: str | None = None) -> str:
    """Returns in words what the check demands, for the records."""
    if bit_exact:
        return "bit-exact"
    quant = "" if shape(case).quant == QUANTS[0] else ", quantised within 1/16"
    bound = (
        f"residual_out within n u sum of |terms|, n = {case.ranks + 1} terms, u = {ROUNDOFF[case.dtype]:.2g}"
    )
    return f"{bound}; the norm within what follows, {ROUNDINGS} u and hidden 2^-24{quant}"
