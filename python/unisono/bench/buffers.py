"""The memory of a run: one pool of plain and one of symmetric memory per rank, and every case is a view of
it.

All backends get the same addresses. Each pool has an input and an output region of the size of the largest
case; views begin at the regions' start, so that a case is measured on memory that its own last calls have
touched (no rotation beyond the caches). `GUARD` bytes behind every view show a write past its end. Regions
begin at a huge page: numpy asks for huge pages behind large arrays, and where the first one begins would
otherwise be chance, of which the kernel's copies between processes take twice the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.bench.backends.base import Buffers
from unisono.bench.cases import DTYPES, Array, layout
from unisono.bench.records import Case

GUARD = 64
PAGE, HUGE_PAGE = 4096, 2 << 20
POISON = 0xA5

Bytes = npt.NDArray[np.uint8]


@dataclass
class Region:
    """Bytes from a page's start on, and up to where they hold ones of which dtype (see `Placed.prime`)."""

    memory: Bytes
    ones_of: str = ""
    ones_bytes: int = 0

    def view(self, shape: tuple[int, ...], dtype: str) -> Array:
        kind = DTYPES[dtype]
        return self.memory[: prod(shape) * kind.itemsize].view(kind).reshape(shape)

    def soil(self) -> None:
        self.ones_bytes = 0


@dataclass(frozen=True)
class Placed:
    """A case's buffers on this rank, the regions they lie in (and up to which byte), and the guard bytes
    behind them."""

    buffers: Buffers
    dtype: str
    read: tuple[Region, int]
    written: tuple[Region, int]
    guards: tuple[Bytes, ...] = ()

    def prime(self) -> None:
        """Ones in the input: no sum or product of them is denormal or NaN, however often it is repeated in
        place."""
        region, end = self.read
        if region.ones_of != self.dtype or region.ones_bytes < end:
            region.memory[:end].view(DTYPES[self.dtype]).fill(1)
            region.ones_of, region.ones_bytes = self.dtype, end

    def soil(self) -> None:
        """To be called after calls that have written the output."""
        self.written[0].soil()


def needed_bytes(cases: Iterable[Case], memory: str) -> int:
    """Bytes of one region that holds every buffer of every case in that kind of memory; 0 where there is no
    case."""
    sizes = [case.bytes for case in cases if case.memory == memory]
    return max(sizes) + GUARD if sizes else 0


def _pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


class Pools:
    """Two regions of plain memory for all `cases`; `add_symmetric` adds two of symmetric memory."""

    def __init__(self, cases: Iterable[Case], rank: int) -> None:
        self.rank = rank
        self._regions: dict[str, tuple[Region, Region]] = {}
        size = needed_bytes(cases, "plain")
        if size:
            self._add("plain", self._plain(size), self._plain(size))

    def add_symmetric(self, size: int, communicator: Any) -> None:
        """Regions of `size` bytes from `communicator.empty`, a collective call; none for size 0. Raises what
        it raises."""
        if size:
            made = [Region(communicator.empty((_pages(size),), "u8")) for _ in range(2)]
            self._add("symmetric", *made)

    def _add(self, memory: str, x: Region, out: Region) -> None:
        for region in (x, out):
            region.memory.fill(POISON)  # first touch by the rank that uses it
        self._regions[memory] = (x, out)

    @staticmethod
    def _plain(size: int) -> Region:
        raw = np.empty(_pages(size) + HUGE_PAGE, np.uint8)
        start = -raw.ctypes.data % HUGE_PAGE
        return Region(raw[start : start + _pages(size)])

    def place(self, case: Case) -> Placed:
        """The buffers of `case`, in place or not, as `Buffers` says."""
        shapes = layout(case, self.rank)
        x_region, out_region = self._regions[case.memory]
        x = None if shapes.x is None else x_region.view(shapes.x, case.dtype)
        out = None if shapes.out is None else out_region.view(shapes.out, case.dtype)
        spare = out_region.view(shapes.x, case.dtype) if out is None and shapes.x is not None else None
        behind = ((x_region, x), (out_region, spare if out is None else out))
        guards = tuple(r.memory[a.nbytes : a.nbytes + GUARD] for r, a in behind if a is not None)
        read, written = [(region, 0 if array is None else array.nbytes) for region, array in behind]
        if case.placement == "in_place" and x is not None:
            match case.collective:
                case "reduce" if out is None:  # in place, a library may overwrite the input of any rank
                    written = read
                case "all_gather" | "gather" if out is not None:
                    read, x = written, out[self.rank]
                case "reduce_scatter" | "scatter":
                    out, written = x[self.rank], read
                case _ if out is not None:
                    out, written = x, read
        buffers = Buffers(x, out, spare, shapes.send_counts, shapes.recv_counts)
        return Placed(buffers, case.dtype, read, written, guards)
