"""Expected results of the calls of a mixture of experts, from the routes and the seed alone: by plain numpy,
on GPUs by the same lines over tensors.

Rows of random data repeat after a prime number of rows. What a dispatch gives must be equal. The sums of a
combine are Unisono's: each rank's in the order of the top k, rounded, then added in rank order, all in f32.
Libraries that sum otherwise have the bound of verify.py, over all roundings of such a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.bench import routes
from unisono.bench.buffers import Placed
from unisono.bench.cases import layout
from unisono.bench.verify import ROUNDOFF, Arithmetic, Expectation, Piece, period_rows
from unisono.records import Case

CHUNK_ELEMENTS = 1 << 20  # of what is computed and compared at once


@dataclass(frozen=True)
class Data:
    """Row i of a rank's random rows: blocks[rank, i modulo their number]."""

    blocks: Any  # [ranks, rows, hidden]
    arithmetic: Arithmetic

    def rows(self, rank: Any, row: Any) -> Any:
        """Returns rows by number, of one rank or of a rank for each."""
        index = np.broadcast_to(rank, row.shape), row % self.blocks.shape[1]
        return self.blocks[tuple(map(self.arithmetic.asarray, index))]


def make_data(case: Case, seed: int, arithmetic: Arithmetic) -> Data:
    hidden = routes.shape(case).hidden
    shapes = [layout(case, rank).x for rank in range(case.ranks)]
    most = max(shape[0] for shape in shapes if shape is not None)
    count = min(max(most, 1), period_rows(hidden))
    blocks = arithmetic.asarray(np.zeros((case.ranks, count * hidden), np.float32))
    blocks = arithmetic.cast(blocks, case.dtype)
    for rank in range(case.ranks):
        blocks[rank] = arithmetic.random_block(case, rank, seed, count * hidden)
    return Data(blocks.reshape(case.ranks, count, hidden), arithmetic)


def expectation(
    case: Case, rank: int, seed: int, bit_exact: bool, arithmetic: Arithmetic, wire: str | None = None
) -> Expectation:
    """Returns the reference for one rank, as verify.expectation."""
    data, shapes = make_data(case, seed, arithmetic), layout(case, rank)
    assert shapes.x is not None
    count = shapes.x[0] * shapes.x[1]
    x = (Piece(0, count, data.blocks[rank].reshape(-1)),) if count else ()
    return Expectation(x, Pieces(case, rank, data, bit_exact))


@dataclass(frozen=True)
class Pieces:
    """The pieces of a rank's output, computed when they are asked for, since they may be large."""

    case: Case
    rank: int
    data: Data
    bit_exact: bool

    def __iter__(self) -> Iterator[Piece]:
        received = self.case.collective == "moe_dispatch"
        return _received(self.case, self.rank, self.data) if received else self._combined()

    def _combined(self) -> Iterator[Piece]:
        moe = routes.shape(self.case)
        for start in range(0, moe.tokens, _step(moe.hidden)):
            tokens = np.arange(start, min(moe.tokens, start + _step(moe.hidden)))
            yield _combined(self.case, self.rank, self.data, tokens, self.bit_exact)


def _step(hidden: int) -> int:
    return max(1, CHUNK_ELEMENTS // hidden)


def _received(case: Case, rank: int, data: Data) -> Iterator[Piece]:
    """Yields what a dispatch gives."""
    found, hidden = routes.rows(case, rank), routes.shape(case).hidden
    for start in range(0, len(found.token), _step(hidden)):
        part = slice(start, start + _step(hidden))
        rows = data.rows(found.source[part], found.token[part])
        yield Piece(start * hidden, len(rows) * hidden, rows.reshape(-1))


def _combined(case: Case, rank: int, data: Data, tokens: Any, bit_exact: bool) -> Piece:
    """Returns what a combine or a round gives for some of the rank's tokens."""
    moe, found = routes.shape(case), routes.of(case)
    asarray, cast = data.arithmetic.asarray, data.arithmetic.cast
    homes, weights = found.homes[rank, tokens], found.weights[rank, tokens]
    major = moe.layout == "expert_major"
    part = abs(cast(data.rows(rank, tokens), "f32")) * 0  # zeros on the device
    total, exact, size = part + 0, cast(part, "f64"), cast(part, "f64")
    for home in range(case.ranks):
        mine = np.flatnonzero((homes == home).any(axis=1))
        at = positions(case, rank, home)[tokens]
        part[:] = 0
        for place in range(moe.top_k if major else 1):
            here = np.flatnonzero(homes[:, place] == home) if major else mine
            if case.collective == "moe_round":
                rows = data.rows(rank, tokens[here])
            else:
                rows = data.rows(home, at[here, place])
            weight = asarray(weights[here, place, None] if major else np.ones((len(here), 1), np.float32))
            where = asarray(here)
            part[where] += weight * cast(rows, "f32")
            if not bit_exact:
                term = cast(weight, "f64") * cast(rows, "f64")
                exact[where] += term
                size[where] += abs(term)
        where = asarray(mine)
        total[where] += cast(cast(part[where], case.dtype), "f32")
    allowed = None if bit_exact else (exact.reshape(-1), (size * bound(case)).reshape(-1))
    sums = cast(total, case.dtype).reshape(-1)
    return Piece(int(tokens[0]) * moe.hidden, len(sums), sums, 0, allowed)


def positions(case: Case, rank: int, home: int) -> Any:
    """Returns for each token and place of `rank` the number of its row on rank `home`; -1: none."""
    moe, rows = routes.shape(case), routes.rows(case, home)
    found = np.full((moe.tokens, moe.top_k), -1)
    mine = np.flatnonzero(rows.source == rank)
    found[rows.token[mine], rows.place[mine]] = mine
    return found


def bound(case: Case) -> float:
    """Returns the allowed error over the sum of magnitudes: the unit roundoff times the roundings of weights,
    products and sums."""
    return _roundings(case) * ROUNDOFF[case.dtype]


def _roundings(case: Case) -> int:
    return routes.shape(case).top_k + case.ranks + 2


def bound_text(case: Case, bit_exact: bool, wire: str | None = None) -> str:
    """Returns in words what the check demands, for the records."""
    if bit_exact or case.collective == "moe_dispatch":
        return "bit-exact"
    return f"within {_roundings(case)} u sum of |w y|, u = {ROUNDOFF[case.dtype]:.2g}"


def with_result(case: Case, rank: int, placed: Placed, rows: Any) -> tuple[Placed, str | None]:
    """Returns the buffers with the rows that a call has given as output, or an error if their number or size
    is wrong. None: they lie in the output."""
    if rows is None:
        return placed, None
    moe, received = routes.shape(case), case.collective == "moe_dispatch"
    wanted = len(routes.rows(case, rank).token) if received else moe.tokens, moe.hidden
    if tuple(rows.shape) != wanted:
        return placed, f"{rows.shape[0]} rows of {rows.shape[1]} have come, not {wanted[0]} of {wanted[1]}."
    return replace(placed, buffers=replace(placed.buffers, out=rows)), None
