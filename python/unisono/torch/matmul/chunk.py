"""The chunks of a matmul, and rows as slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """A part of a product, as a `matmul` of the caller's is told."""

    index: int  # the how-manieth of this call
    operand: int  # the number of B
    rows: slice  # of the whole product
    columns: slice


Matmul = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Chunk], object]


def torch_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, _: Chunk) -> None:
    """Writes a @ b to out."""
    torch.mm(a, b, out=out)


def slice_of(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def part_of(rows: range, share: range) -> slice:
    """Returns the rows within a share."""
    return slice(rows.start - share.start, rows.stop - share.start)
