"""Expected results of matmuls with their collective, from the seed alone, by plain numpy, for GPUs too.

A and B hold small integers, so that a product has the same bits however it is added up. Rows of A, and rows
and columns of B, repeat after a prime number, so that a few rows and columns tell the whole product. Every
second rank's A is smaller by a power of two, so that a sum over the ranks has to be rounded.

Gathered rows and their products must be equal. So must Unisono's sums: everyone's torch.mm, rounded, added in
rank order in f32, and rounded. Other libraries may add in any order. Their bound is that of verify.py. Zeros
are equal whatever their sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.bench.matmul import GATHER, rows_in, rows_out, shape, share
from unisono.bench.verify import ROUNDOFF, Arithmetic, Expectation, Piece, combine, period_rows, tolerance
from unisono.records import Case
from unisono.records.vocabulary import DTYPES, MATMUL

COLUMNS = 251  # after which they repeat
VARIANCE = 256.0  # of an element of a product: hardly one is beyond the 8 bits of bf16
_SMALLER = {"f32": 20, "f16": 7, "bf16": 4}  # bits by which every second rank's A is smaller

F32, F64 = np.float32, np.float64


def make_a(case: Case, rank: int, seed: int) -> Any:
    """Returns the rows of a rank's A until they repeat."""
    m, k = shape(case).m, shape(case).k
    made = np.random.default_rng([seed, rank, 0]).integers(-1, 2, (min(m, period_rows(k)), k))
    return (made * 2.0 ** (-_SMALLER[case.dtype] * (rank % 2))).astype(DTYPES[case.dtype])


def make_b(case: Case, rank: int, seed: int) -> Any:
    """Returns the rows of a rank's B until they repeat."""
    k, n = shape(case).k, shape(case).n
    random, block = np.random.default_rng([seed, rank, 1]), (min(k, period_rows(n)), min(n, COLUMNS))
    kept = random.random(block) < VARIANCE * (9 / 4) / k
    return across((random.integers(-1, 2, block) * kept).astype(DTYPES[case.dtype]), n)


def across(columns: Any, n: int) -> Any:
    """Returns n columns, those given again and again."""
    return np.tile(columns, -(-n // columns.shape[1]))[:, :n]


def product(case: Case, a: Any, b: Any) -> Any:
    """Returns the rows of a product until they repeat, rounded."""
    k, n = shape(case).k, shape(case).n
    columns = np.resize(b[:, :COLUMNS].astype(F32), (k, min(n, COLUMNS)))
    return across((a.astype(F32) @ columns).astype(DTYPES[case.dtype]), n)


def expectation(
    case: Case, rank: int, seed: int, bit_exact: bool, arithmetic: Arithmetic, wire: str | None = None
) -> Expectation:
    """Returns the reference for one rank, as verify.expectation."""
    k, n, asarray = shape(case).k, shape(case).n, arithmetic.asarray
    end = rows_in(case, rank) * k
    a, b = make_a(case, rank, seed), make_b(case, rank, seed)
    x = Piece(0, end, asarray(a.reshape(-1))), Piece(end, k * n, asarray(b.reshape(-1)))

    def piece(rows: range, block: Any, first: int = 0, allowed: tuple[Any, Any] | None = None) -> Piece:
        exact, bound = allowed or (block.astype(F64), np.zeros(block.shape))
        near = asarray(exact.reshape(-1)), asarray(bound.reshape(-1))
        return Piece(rows.start * n, len(rows) * n, asarray(block.reshape(-1)), first * n, near)

    if case.collective == GATHER:
        products = (product(case, make_a(case, r, seed), b) for r in range(case.ranks))
        return Expectation(x, tuple(piece(share(case, r), one) for r, one in enumerate(products)))
    if case.collective == MATMUL:
        return Expectation(x, (piece(range(shape(case).m), product(case, a, b)),))
    each = [product(case, make_a(case, r, seed), make_b(case, r, seed)) for r in range(case.ranks)]
    rows, total = rows_out(case, rank), combine(each, "sum", case.dtype)
    allowed = None if bit_exact else tolerance([one.astype(F64) for one in each], "sum", case.dtype)
    first = share(case, rank).start % len(total) if rows < shape(case).m else 0
    return Expectation(x, (piece(range(rows), total, first, allowed),))


def bound_text(case: Case, bit_exact: bool, wire: str | None = None) -> str:
    """Returns in words what the check demands, for the records."""
    if bit_exact or case.collective in (GATHER, MATMUL):
        return "bit-exact"
    return f"within n u sum of |products|, n = {case.ranks} ranks, u = {ROUNDOFF[case.dtype]:.2g}"
