"""The cases all_gather_matmul, matmul_reduce_scatter and matmul_all_reduce, and what they consist of: the
matmul alone, and the collective alone. `Case.bytes` are those of the collective: A of all ranks, or the
product.

A rank's arrays of a case lie in the bench's two buffers: A, or its share of A, and B in the input, the result
in the output. Shares are torch.chunk's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from unisono.records import Case, Matmul
from unisono.records.vocabulary import DTYPES, MATMULS, alone

GATHER = "all_gather_matmul"
ROWS = {"cpu": (64, 256, 1024), "cuda": (2048, 8192, 16384)}
SHAPES = {"cpu": ("small",), "cuda": ("square", "qkv", "gate_up", "o", "down")}
USUAL_DTYPES = {"cpu": ("f32",), "cuda": ("bf16",)}
MODE = "latency"


class Weights(NamedTuple):
    """A B of a model: whose rows or columns are divided among the ranks, or that each rank has as it is."""

    gathers: bool  # for an all_gather before the matmul, which divides columns; else for a sum behind it
    k: int
    n: int
    divided: bool = True


NAMED = {
    "small": (Weights(True, 512, 2048), Weights(False, 2048, 512)),
    "square": (Weights(True, 8192, 2048, False), Weights(False, 2048, 8192, False)),
    # of Llama 3 70B
    "qkv": (Weights(True, 8192, 10240),),
    "gate_up": (Weights(True, 8192, 57344),),
    "o": (Weights(False, 8192, 8192),),
    "down": (Weights(False, 28672, 8192),),
}
_PLAIN = re.compile(r"(\d{1,9})x(\d{1,9})")


def weights(shape: str) -> tuple[Weights, ...]:
    """Returns what a shape's name, or KxN of a rank, stands for; nothing for another word."""
    if shape in NAMED:
        return NAMED[shape]
    numbers = _PLAIN.fullmatch(shape)
    k, n = map(int, numbers.groups()) if numbers else (0, 0)
    return (Weights(True, k, n, False), Weights(False, k, n, False)) if k and n else ()


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """All that the user wants to measure. Cases are the product, of shapes that suit the collective."""

    rows: tuple[int, ...] = ROWS["cpu"]
    shapes: tuple[str, ...] = SHAPES["cpu"]
    dtypes: tuple[str, ...] = USUAL_DTYPES["cpu"]
    modes: tuple[str, ...] = (MODE,)
    device: str = "cpu"

    def cases(self, ranks: int, collectives: Sequence[str]) -> list[Case]:
        """Returns every distinct case of those collectives, each followed by its parts; without any the
        matmuls alone."""
        named = [name for name in MATMULS if name in collectives]
        product = itertools.product(named or MATMULS, self.shapes, self.dtypes, self.modes, self.rows)
        fused = [
            case(name, ranks, m, *divided(one, ranks), dtype, mode, self.device)
            for name, shape, dtype, mode, m in product
            for one in weights(shape)
            if one.gathers == (name == GATHER)
        ]
        found = [part for one in fused for part in ([one, *alone(one)] if named else alone(one)[:1])]
        return list(dict.fromkeys(found))


def divided(one: Weights, ranks: int) -> tuple[int, int]:
    """Returns k and n of a rank, at least 1."""
    if not one.divided:
        return one.k, one.n
    return (one.k, max(1, one.n // ranks)) if one.gathers else (max(1, one.k // ranks), one.n)


def case(
    collective: str, ranks: int, m: int, k: int, n: int, dtype: str, mode: str = MODE, device: str = "cpu"
) -> Case:
    """Returns a case. k and n are those of a rank."""
    return Case(
        collective=collective,
        bytes=m * (k if collective == GATHER else n) * DTYPES[dtype].itemsize,
        dtype=dtype,
        op=None,
        ranks=ranks,
        mode=mode,
        device=device,
        matmul=Matmul(m=m, k=k, n=n),
    )


def shape(case: Case) -> Matmul:
    """Returns the shape of a rank's matmul."""
    assert case.matmul is not None
    return case.matmul


def share(case: Case, rank: int) -> range:
    """Returns the rows that are a rank's share."""
    m, block = shape(case).m, -(-shape(case).m // case.ranks)
    return range(min(rank * block, m), min((rank + 1) * block, m))


def rows_in(case: Case, rank: int) -> int:
    """Returns the rows of A that a rank brings."""
    return len(share(case, rank)) if case.collective == GATHER else shape(case).m


def rows_out(case: Case, rank: int) -> int:
    """Returns the rows of a rank's result."""
    return len(share(case, rank)) if case.collective == "matmul_reduce_scatter" else shape(case).m


class Arrays(NamedTuple):
    """A rank's arrays of a case, all views."""

    a: Any
    b: Any
    out: Any


def arrays(case: Case, rank: int, x: Any, out: Any) -> Arrays:
    """Returns the arrays of a case in its flat input and output, both of numpy or of torch."""
    k, n = shape(case).k, shape(case).n
    end = rows_in(case, rank) * k
    return Arrays(x[:end].reshape(-1, k), x[end:].reshape(k, n), out.reshape(-1, n))


def flop(case: Case) -> int:
    """Returns the floating-point operations of a rank's matmul."""
    return 2 * shape(case).m * shape(case).k * shape(case).n
