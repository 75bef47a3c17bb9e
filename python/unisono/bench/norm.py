"""The cases all_reduce_rms_norm: x is summed over the ranks, the residual is added, and each row is
normalised and perhaps quantised. `Case.bytes` are those of x.

All arrays of a rank lie in the bench's two buffers: x, the residual and the weight in the input; the
normalised rows, then the sum with the residual in the output. Codes and scales lie where the normalised rows
would.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from unisono.records import Case, Norm
from unisono.records.vocabulary import DTYPES, NORM, QUANTS

EPS = 1e-6
BLOCK = 128  # elements of a scale of fp8_128
KIB = 1 << 10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB)
QUANTISED = 1024 * KIB, "bf16"  # the size and dtype that are also quantised, unless the user says otherwise
HIDDEN = 4096
MODE = "latency"


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """All that the user wants to measure. Cases are the product. quants: None for the usual ones."""

    sizes: tuple[int, ...] = SIZES
    hidden: tuple[int, ...] = (HIDDEN,)
    dtypes: tuple[str, ...] = ("f32", "bf16")
    quants: tuple[str, ...] | None = None
    memories: tuple[str, ...] = ("plain",)
    modes: tuple[str, ...] = (MODE,)
    device: str = "cpu"

    def cases(self, ranks: int) -> list[Case]:
        """Returns every distinct case. Sizes that round to the same rows count once."""
        product = list(itertools.product(self.hidden, self.dtypes, self.memories, self.modes, self.sizes))
        found = [
            case(ranks, size, hidden, dtype, quant, mode, self.device, memory)
            for quant in self.quants or QUANTS[:1]
            for hidden, dtype, memory, mode, size in product
        ]
        if self.quants is None and self.device == "cpu":
            found += [
                case(ranks, size, hidden, dtype, QUANTS[1], mode, memory=memory)
                for hidden, dtype, memory, mode, size in product
                if (size, dtype) == QUANTISED and hidden % BLOCK == 0
            ]
        return list(dict.fromkeys(found))


def case(
    ranks: int,
    size: int,
    hidden: int,
    dtype: str,
    quant: str = QUANTS[0],
    mode: str = MODE,
    device: str = "cpu",
    memory: str = "plain",
) -> Case:
    """Returns the case whose x is nearest below `size` bytes, of at least one row. Requires: with a
    quantisation, rows of whole blocks."""
    row = hidden * DTYPES[dtype].itemsize
    rows = max(1, size // row)
    return Case(
        collective=NORM,
        bytes=rows * row,
        dtype=dtype,
        op=None,
        ranks=ranks,
        memory=memory,
        mode=mode,
        device=device,
        norm=Norm(rows=rows, hidden=hidden, quant=quant),
    )


def shape(case: Case) -> Norm:
    """Returns the shape of a fused norm."""
    assert case.norm is not None
    return case.norm


@dataclass(frozen=True)
class Arrays:
    """A rank's arrays of a case, all views. scales: None unless out has codes."""

    x: Any
    residual: Any
    weight: Any
    out: Any
    residual_out: Any
    scales: Any


def arrays(case: Case, x: Any, out: Any) -> Arrays:
    """Returns the arrays of a case in its input and output buffer."""
    norm = shape(case)
    rows, hidden = norm.rows, norm.hidden
    normed, scales = out[:rows], None
    if norm.quant != QUANTS[0]:
        space, codes = normed.reshape(-1).view("u1"), rows * hidden
        normed = space[:codes].view(DTYPES["f8e4m3"]).reshape(rows, hidden)
        scales = space[codes : codes + 4 * codes // BLOCK].view("f4").reshape(rows, hidden // BLOCK)
    return Arrays(x[:rows], x[rows : 2 * rows], x[2 * rows], normed, out[rows:], scales)
