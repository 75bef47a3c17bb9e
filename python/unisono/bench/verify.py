"""Checks results: fresh random data that every rank can compute, poisoned outputs, and a numpy reference.

Each rank's input is a random block of at most `PERIOD` elements (a prime), repeated. Every rank derives all
blocks from the seed, and so knows the whole output of any collective at the cost of one block. Every byte of
the output is compared. Data at a wrong place is seen, unless it is off by a multiple of `PERIOD` elements.

Moves and integers are compared bit by bit. So are sums of floats if the backend combines in rank order
(`Backend.bit_exact`). Other libraries may combine in any order. Their bound is the textbook one (N. Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2): n u times the sum of the magnitudes, u
the unit roundoff of the dtype and n the number of ranks; for a product, n u times its magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.bench import pairs
from unisono.bench.buffers import POISON, Placed
from unisono.bench.cases import Array, layout
from unisono.records import Case, vocabulary
from unisono.records.vocabulary import DTYPES, INTEGERS, KNOWN

PERIOD = 1_048_573
ROUNDOFF = {  # half the distance from 1 to the next number
    "f64": 2.0**-53,
    "f32": 2.0**-24,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "f8e4m3": 2.0**-4,
    "f8e5m2": 2.0**-3,
}
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def period_rows(hidden: int) -> int:
    """Returns after how many rows of random data they repeat: a prime number, or 1."""
    most = max(1, PERIOD // hidden)
    return next((n for n in range(most, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1))), 1)


def random_block(case: Case, rank: int, seed: int, count: int) -> Array:
    """Returns rank `rank`'s block of `count` values of the case's dtype, the same on every rank that asks.

    Integers: any bits, or small values for an average. Floats: magnitudes from 0.5 to 2, never zero; for a
    product so near 1 that the product stays from 1/16 to 16."""
    rng = np.random.default_rng([seed, rank])
    kind = DTYPES[case.dtype]
    if case.dtype in INTEGERS:
        if case.op == "avg":
            return rng.integers(0 if case.dtype == "u8" else -100, 101, count).astype(kind)
        return rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8).view(kind)
    spread = 4.0 / case.ranks if case.op == "prod" else 1.0
    values = rng.random(count, dtype=np.float32)
    magnitude = np.exp2((2.0 * values - 1.0) * np.float32(spread))
    sign = np.where(rng.integers(0, 2, count, dtype=np.uint8) == 0, np.float32(1.0), np.float32(-1.0))
    signed: Array = (magnitude * sign).astype(kind)
    return signed


def combine(blocks: Sequence[Array], op: str, dtype: str) -> Array:
    """Returns the reduction as Unisono defines it: ((x0 + x1) + x2) ...

    The accumulator is f32 for f32 and narrower floats, f64 for f64, with one rounding at the end. Integers
    wrap, and their average is the exact sum divided toward zero."""
    kind, n = DTYPES[dtype], len(blocks)
    if dtype in INTEGERS:
        wide = np.dtype(np.int64) if op == "avg" else kind
    else:
        wide = np.dtype(np.float64) if dtype == "f64" else np.dtype(np.float32)
    total = blocks[0].astype(wide)
    for block in blocks[1:]:
        other = block.astype(wide)
        match op:
            case "sum" | "avg":
                total = total + other
            case "prod":
                total = total * other
            case "min":
                total = np.where(other < total, other, total)
            case "max":
                total = np.where(other > total, other, total)
            case _:
                total = BITWISE[op](total, other)
    if op == "avg":
        total = np.sign(total) * (np.abs(total) // n) if dtype in INTEGERS else total / wide.type(n)
    return total.astype(kind)


def tolerance(blocks: Sequence[Any], op: str, dtype: str) -> tuple[Any, Any] | None:
    """Returns (exact result, allowed distance) per element, for libraries that combine in any order. None:
    only the exact bits are right (integers, min and max). Arrays of f64, of numpy or torch."""
    if dtype in INTEGERS or op in ("min", "max"):
        return None
    unit, n = ROUNDOFF[dtype], len(blocks)
    if op == "prod":
        exact = math.prod(blocks)
        return exact, n * unit * abs(exact)
    scale = n if op == "avg" else 1
    return sum(blocks) / scale, sum(map(abs, blocks)) * (n * unit / scale)


def rounding(blocks: Sequence[Any], exact: Any, op: str, wire: str) -> Any:
    """Returns the allowed error of a quantised all_reduce in addition to `tolerance`.

    The bound is that of Communicator.all_reduce, but by the largest magnitude of the whole data in place of
    each 32 elements'. Arrays of f64, of numpy or torch."""
    scale = len(blocks) if op == "avg" else 1
    largest = sum(float(abs(block).max()) for block in blocks) / scale
    if wire == "int8":
        inputs = largest / 127
        return inputs + (float(abs(exact).max()) + inputs) / 127
    near = sum(abs(block) for block in blocks) / (16 * scale) + largest / 2**17
    total = abs(exact) + near
    return near + total / 16 + float(total.max()) / 2**17


@dataclass(frozen=True)
class Piece:
    """A part of a flat buffer: `count` elements from `start` on hold `block`, repeated, from `offset` on."""

    start: int
    count: int
    block: Any
    offset: int = 0
    allowed: tuple[Any, Any] | None = None  # the result of `tolerance`


def rows(piece: Piece) -> list[tuple[int, int, int]]:
    """Returns (first element in the buffer, first element in the block, length) of every run within one
    repetition of the block."""
    found, done, period = [], 0, len(piece.block)
    while done < piece.count:
        at = (piece.offset + done) % period
        length = min(period - at, piece.count - done)
        found.append((piece.start + done, at, length))
        done += length
    return found


def write(flat: Array, pieces: Sequence[Piece]) -> None:
    """Fills a flat buffer with the pieces."""
    for piece in pieces:
        for start, at, length in rows(piece):
            np.copyto(flat[start : start + length], piece.block[at : at + length])


@dataclass(frozen=True)
class Arithmetic:
    """The functions of this module for a kind of arrays, for `expectation`, `arrange` and `inspect`."""

    random_block: Callable[[Case, int, int, int], Any]
    combine: Callable[[Sequence[Any], str, str], Any]
    write: Callable[[Any, Sequence[Piece]], None]
    differences: Callable[[Any, Iterable[Piece]], tuple[int, str | None]]
    cast: Callable[[Any, str], Any]  # to a dtype
    asarray: Callable[[Any], Any]  # of an array of numpy
    tonumpy: Callable[[Any, str], Any]  # to an array of numpy, of a dtype


def _bits(array: Array) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    return array.view(_BITS[array.itemsize])


def differences(flat: Array, pieces: Iterable[Piece]) -> tuple[int, str | None]:
    """Returns how many elements differ from the pieces, and a sentence about the first. NaN equals NaN."""
    wrong, first = 0, None
    for piece in pieces:
        for start, at, length in rows(piece):
            got, want = flat[start : start + length], piece.block[at : at + length]
            if np.array_equal(_bits(got), _bits(want)):
                continue
            bad = _bits(got) != _bits(want)
            if got.dtype.kind not in "iu":
                with np.errstate(invalid="ignore"):  # from signalling NaNs and infinities
                    wide = got.astype(np.float64)
                    bad &= ~(np.isnan(wide) & np.isnan(want.astype(np.float64)))
                    if piece.allowed is not None:
                        exact, bound = (part[at : at + length] for part in piece.allowed)
                        bad &= ~(np.abs(wide - exact) <= bound)
            count = int(np.count_nonzero(bad))
            if count and first is None:
                index = int(np.argmax(bad))
                first = f"element {start + index} is {got[index]!s}, expected {want[index]!s}"
            wrong += count
    return wrong, first


def share_of_bound(flat: Any, pieces: Iterable[Piece], arithmetic: Arithmetic) -> float:
    """Returns the largest error of an element as a share of the error that it may have."""
    most = 0.0
    for piece in pieces:
        if piece.allowed is not None:
            for start, at, length in rows(piece):
                exact, bound = (part[at : at + length] for part in piece.allowed)
                off = abs(arithmetic.cast(flat[start : start + length], "f64") - exact)
                most = max(most, float((off / bound).max()))
    return most


@dataclass(frozen=True)
class Expectation:
    """The content of one rank's input before the call, and of its output after."""

    x: tuple[Piece, ...]
    out: Iterable[Piece]  # may be gone through more than once


def cast(block: Array, dtype: str) -> Array:
    """Returns the values as another dtype, rounded to nearest."""
    return block.astype(DTYPES[dtype])


NUMPY = Arithmetic(random_block, combine, write, differences, cast, np.asarray, lambda array, _: array)


def expectation(
    case: Case, rank: int, seed: int, bit_exact: bool, arithmetic: Arithmetic = NUMPY, wire: str | None = None
) -> Expectation:
    """Returns the reference for one rank, from the seed alone. `wire`: how an all_reduce quantises."""
    n, shapes = case.ranks, [layout(case, r) for r in range(case.ranks)]
    counts = [int(np.prod(s.x)) if s.x is not None else 0 for s in shapes]
    period = min(PERIOD, max(counts))
    if period == 0:
        return Expectation((), ())
    own_out = shapes[rank].out
    out_count = int(np.prod(own_out)) if own_out is not None else 0
    known = KNOWN[case.collective]
    peer = pairs.peer_of(case, rank) if case.collective == vocabulary.PINGPONG else None
    sources = (
        range(n)
        if case.collective not in ("broadcast", "scatter", "send_recv", vocabulary.PINGPONG)
        else {rank, (rank - 1) % n, 0, peer or 0}
    )
    blocks = {r: arithmetic.random_block(case, r, seed, period) for r in sources}
    x = (Piece(0, counts[rank], blocks[rank]),) if counts[rank] else ()
    if own_out is None:
        return Expectation(x, ())
    if known.reduces:
        ordered = [blocks[r] for r in range(n)]
        result = arithmetic.combine(ordered, str(case.op), case.dtype)
        wide = [] if bit_exact else [arithmetic.cast(block, "f64") for block in ordered]
        allowed = None if bit_exact else tolerance(wide, str(case.op), case.dtype)
        if allowed is not None and wire is not None and n > 1:
            exact, unit = allowed
            allowed = exact, unit + rounding(wide, exact, str(case.op), wire)
        offset = rank * out_count if case.collective == "reduce_scatter" else 0
        return Expectation(x, (Piece(0, out_count, result, offset, allowed),))
    if case.collective == "all_to_all_v":  # every rank sends this one as much, after the lower ranks' parts
        own = shapes[rank]
        behind = sum(own.send_counts[:rank])
        out = [Piece(r * own.recv_counts[r], own.recv_counts[r], blocks[r], behind) for r in range(n)]
    else:
        out = _moved(case.collective, rank, n, out_count, blocks, peer or 0)
    return Expectation(x, tuple(out))


def _moved(
    collective: str, rank: int, n: int, count: int, blocks: dict[int, Array], peer: int
) -> list[Piece]:
    """Returns the pieces of all ranks' blocks that form a rank's output of `count` elements."""
    share = count // n
    match collective:
        case "broadcast":
            return [Piece(0, count, blocks[0])]
        case "scatter":
            return [Piece(0, count, blocks[0], rank * count)]
        case "send_recv":
            return [Piece(0, count, blocks[(rank - 1) % n])]
        case vocabulary.PINGPONG:
            return [Piece(0, count, blocks[peer])]
        case "all_to_all":
            return [Piece(r * share, share, blocks[r], rank * share) for r in range(n)]
        case _:  # all_gather, gather
            return [Piece(r * share, share, blocks[r]) for r in range(n)]


def bound_text(case: Case, bit_exact: bool, wire: str | None = None) -> str:
    """Returns in words what the check demands, for the records."""
    if case.collective == "barrier":
        return "nobody left before all had entered"
    if wire is not None:
        share = "1/127 of the largest |x|" if wire == "int8" else "1/16 of |x|"
        return f"within {share}, for each x and their sum ({wire})"
    if bit_exact or case.op not in ("sum", "prod", "avg") or case.dtype in INTEGERS:
        return "bit-exact"
    magnitude = "|product|" if case.op == "prod" else "sum of |x|"
    return f"within n u {magnitude}, n = {case.ranks} ranks, u = {ROUNDOFF[case.dtype]:.2g}"


def arrange(placed: Placed, expected: Expectation, arithmetic: Arithmetic = NUMPY) -> None:
    """Poisons the output and the guard bytes, then writes the input, which wins if the call is in place."""
    region, end = placed.written
    region.poison(end)
    for guard in placed.guards:
        guard[:] = POISON
    if placed.buffers.x is not None:
        arithmetic.write(placed.buffers.x.reshape(-1), expected.x)
    placed.read[0].soil()
    region.soil()


def inspect(case: Case, placed: Placed, expected: Expectation, arithmetic: Arithmetic = NUMPY) -> str | None:
    """Returns what is wrong with output, input (which an out-of-place call keeps) or guards, or None."""
    if placed.buffers.out is not None:
        wrong, first = arithmetic.differences(placed.buffers.out.reshape(-1), expected.out)
        if wrong:
            return f"{wrong} wrong element(s) of the output: {first}."
    if case.placement == "out_of_place" and placed.buffers.x is not None:
        wrong, first = arithmetic.differences(placed.buffers.x.reshape(-1), expected.x)
        if wrong:
            return f"the call changed {wrong} element(s) of its input: {first}."
    if any(bool((guard != POISON).any()) for guard in placed.guards):
        return "the call wrote past a buffer."
    return None
