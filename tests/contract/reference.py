"""The result of every collective in plain numpy, the reference of the contract suite and the property tests.

Shares no code with the library or with the bench's own checks. Floats are combined in rank order,
((x0 + x1) + x2) ..., in f32 (f64 for f64), and rounded once at the end, by ml_dtypes if numpy lacks the type.
Integers wrap; their average is the exact 64-bit sum, truncated toward zero. min and max give NaN if any
operand is NaN, and keep the lower rank's of two equal values (0.0 and -0.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

DTYPES = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
INTEGERS = ("i8", "u8", "i32", "i64")
OPS = ("sum", "prod", "min", "max", "avg")
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}  # of integers, on CPUs
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_POOL = 30_011  # elements of random data of a rank and dtype; a prime, so that no size divides it


def ops_of(dtype: str) -> tuple[str, ...]:
    """Returns the ops of elements of that dtype on CPUs."""
    return (*OPS, *BITWISE) if dtype in INTEGERS else OPS


def combine(blocks: Sequence[Array], op: str) -> Array:
    """Returns the reduction of one block per rank, in rank order."""
    kind, n = blocks[0].dtype, len(blocks)
    integer = kind.kind in "iu"
    if integer:
        wide = np.dtype(np.int64) if op in ("sum", "avg") else kind
    else:
        wide = np.dtype(np.float64) if kind == np.float64 else np.dtype(np.float32)
    with np.errstate(all="ignore"):
        total = blocks[0].astype(wide)
        for block in blocks[1:]:
            other = block.astype(wide)
            if op in ("sum", "avg"):
                total = total + other
            elif op == "prod":
                total = total * other
            elif op in BITWISE:
                total = BITWISE[op](total, other)
            else:
                better = other < total if op == "min" else other > total
                total = np.where(better if integer else better | np.isnan(other), other, total)
        if op == "avg":
            total = _truncated(total, n) if integer else total / wide.type(n)
        return total.astype(kind)


def _truncated(total: Array, n: int) -> Array:
    quotient, rest = np.divmod(total, n)
    return quotient + ((rest != 0) & (total < 0))


def bound(blocks: Sequence[Array], op: str) -> tuple[Array, Array]:
    """Returns (result in f64, allowed distance), for libraries that combine floats in any order.

    The distance is n u times the sum of the magnitudes, or times the magnitude of the product (N. Higham,
    Accuracy and Stability of Numerical Algorithms, 2nd ed., 4.2). u is the unit roundoff of the dtype, n the
    number of ranks. For an average, u times the result is added.
    """
    n, unit = len(blocks), float(ml_dtypes.finfo(blocks[0].dtype).eps) / 2
    wide = [block.astype(np.float64) for block in blocks]
    if op == "prod":
        exact = np.prod(wide, axis=0)
        return exact, n * unit * np.abs(exact)
    scale = n if op == "avg" else 1
    exact = np.sum(wide, axis=0) / scale
    return exact, n * unit * np.sum(np.abs(wide), axis=0) / scale + unit * np.abs(exact)


@dataclass(frozen=True)
class Wrong:
    """The number `count` of elements that differ, and the first."""

    count: int
    element: int
    got: str
    expected: str

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"element {self.element}{more}: got {self.got}, expected {self.expected}"


def _shown(value: Array) -> str:
    return f"{value!s} = 0x{int(value.view(_BITS[value.dtype.itemsize])):0{2 * value.dtype.itemsize}x}"


def difference(got: Array, expected: Array, allowed: tuple[Array, Array] | None = None) -> Wrong | None:
    """Returns the difference, or None if `got` has the bits of `expected` (any NaN equals any NaN) or lies
    within `allowed` (see `bound`)."""
    a, b = got.reshape(-1), expected.reshape(-1)
    assert a.dtype == b.dtype and a.size == b.size, (a.dtype, b.dtype, a.size, b.size)
    bits = _BITS[a.dtype.itemsize]
    if np.array_equal(a.view(bits), b.view(bits)):
        return None
    bad = a.view(bits) != b.view(bits)
    if a.dtype.kind not in "iu":
        with np.errstate(invalid="ignore"):
            bad &= ~(np.isnan(a) & np.isnan(b))
            if allowed is not None:
                exact, distance = allowed
                bad &= ~(np.abs(a.astype(np.float64) - exact) <= distance)
    if not bad.any():
        return None
    first = int(np.argmax(bad))
    return Wrong(int(np.count_nonzero(bad)), first, _shown(a[first]), _shown(b[first]))


def specials(dtype: str) -> Array:
    """Returns zeros, infinities, NaN, smallest and largest numbers of a float dtype, and their negatives."""
    kind = DTYPES[dtype]
    info = ml_dtypes.finfo(kind)
    tiny = info.smallest_subnormal
    values = [0.0, float("inf"), float("nan"), float(tiny), float(info.smallest_normal), float(info.max), 1.0]
    with np.errstate(all="ignore"):
        return np.array([sign * value for value in values for sign in (1.0, -1.0)], np.float64).astype(kind)


def wild(dtype: str, count: int, seed: Sequence[int]) -> Array:
    """Returns random data. Integers: any bits. Floats: mostly numbers whose sums round, with `specials` and
    numbers of any bits among them."""
    rng = np.random.default_rng(list(seed))
    kind = DTYPES[dtype]
    noise = rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8).view(kind)
    if dtype in INTEGERS:
        return noise
    with np.errstate(all="ignore"):
        scale = np.exp2(rng.integers(-6, 7, count).astype(np.float64))
        values = (rng.standard_normal(count) * scale).astype(kind)
    which = rng.integers(0, 16, count)
    values = np.where(which == 0, noise, values)
    return np.where(which == 1, rng.choice(specials(dtype), count), values)


def tame(dtype: str, count: int, seed: Sequence[int], ranks: int, op: str | None) -> Array:
    """Returns data for libraries that define neither order nor NaN: floats of magnitude 0.5 to 2 (nearer to 1
    for a product), integers with any bits."""
    if dtype in INTEGERS:
        return wild(dtype, count, seed)
    rng = np.random.default_rng(list(seed))
    spread = 4.0 / ranks if op == "prod" else 1.0
    magnitude = np.exp2(rng.uniform(-spread, spread, count))
    return (magnitude * rng.choice([-1.0, 1.0], count)).astype(DTYPES[dtype])


@cache
def _pool(dtype: str, rank: int, ranks: int, op: str | None) -> Array:
    """Returns the pool of a rank's data. `op` None: wild data."""
    seed = (list(DTYPES).index(dtype), rank, ranks)
    made = wild(dtype, _POOL, seed) if op is None else tame(dtype, _POOL, seed, ranks, op)
    made.flags.writeable = False
    return made


@cache
def _tiled(dtype: str, rank: int, ranks: int, op: str | None, times: int) -> Array:
    return np.tile(_pool(dtype, rank, ranks, op), times)


def data(dtype: str, rank: int, ranks: int, offset: int, count: int, tame_for: str | None = None) -> Array:
    """Returns `count` elements of rank `rank`'s random data from `offset` on, the same on every rank.

    Args:
        tame_for: the op, or "move", of a library without Unisono's guarantees; None: `wild` data.
    """
    op = None if tame_for is None else "prod" if tame_for == "prod" else "sum"
    if offset + count <= _POOL:
        return _pool(dtype, rank, ranks, op)[offset : offset + count]
    times = 1 << ((offset + count - 1) // _POOL).bit_length()
    return _tiled(dtype, rank, ranks, op, times)[offset : offset + count]
