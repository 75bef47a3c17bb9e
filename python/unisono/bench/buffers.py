"""The memory of a run: one pool of plain and one of symmetric memory per rank. Every case is a view of one.

All backends get the same addresses, except those whose library takes only memory that it has allocated itself
(`Backend.own_memory`). Their symmetric cases lie in pools of their own, of the same size and alignment,
filled, poisoned and checked like the others. Each pool has an input and an output region of the size of the
largest case. Views begin at the regions' start, so that a case is measured on memory that its last calls have
touched (no rotation beyond the caches), or `Case.offset` bytes behind it. `GUARD` bytes around every view
show a write past it.

Regions begin at a huge page, since numpy asks for huge pages in large arrays. Otherwise chance would place
the first huge page, and could double the time of the kernel's copies between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.bench.backends.base import Backend, Buffers
from unisono.bench.cases import buffer_bytes, layout
from unisono.records import Case
from unisono.records.vocabulary import DTYPES

GUARD = 64
PAGE, HUGE_PAGE = 4096, 2 << 20
POISON = 0xA5
RANDOM = 1 << 20  # numbers, after which they repeat

Bytes = npt.NDArray[np.uint8]


@dataclass
class Region:
    """Bytes from the start of a page on."""

    memory: Bytes
    primed: str = ""  # what the first `primed_bytes` bytes hold (see `Placed.prime`)
    primed_bytes: int = 0
    arithmetic: Any = None  # a verify.Arithmetic; None: that of the run's device

    def view(self, shape: tuple[int, ...], dtype: str, start: int = 0) -> Any:
        """Returns an array in the bytes from `start` on."""
        kind = DTYPES[dtype]
        return self.memory[start : start + prod(shape) * kind.itemsize].view(kind).reshape(shape)

    def fill_ones(self, end: int, dtype: str) -> None:
        self.memory[:end].view(DTYPES[dtype]).fill(1)

    def fill_random(self, end: int, dtype: str) -> None:
        """Fills with numbers of a normal distribution, the same again and again."""
        numbers = self.memory[:end].view(DTYPES[dtype])
        random = np.random.default_rng(1).standard_normal(min(len(numbers), RANDOM), np.float32)
        for start in range(0, len(numbers), RANDOM):
            numbers[start : start + RANDOM] = random[: len(numbers) - start]

    def poison(self, end: int | None = None) -> None:
        self.memory[:end].fill(POISON)

    def soil(self) -> None:
        self.primed_bytes = 0


@dataclass(frozen=True)
class Placed:
    """A case's buffers on this rank, and where they lie."""

    buffers: Buffers
    dtype: str
    read: tuple[Region, int]  # the input's region, and the input's end in bytes
    written: tuple[Region, int]  # the output's region, and the output's end in bytes
    guards: tuple[Any, ...] = ()  # the guard bytes around the buffers
    random: bool = False  # the input is primed with random numbers

    def prime(self) -> None:
        """Fills the input with ones. Their sums and products never get denormal or NaN, however often a call
        repeats in place. A matmul gets random numbers: a GPU multiplies ones with less power, and faster."""
        region, end = self.read
        what = f"random {self.dtype}" if self.random else self.dtype
        if region.primed != what or region.primed_bytes < end:
            (region.fill_random if self.random else region.fill_ones)(end, self.dtype)
            region.primed, region.primed_bytes = what, end

    def rewrite(self) -> None:
        """Writes the input's own bytes once more: their lines leave all other cores' caches."""
        region, end = self.read
        own = region.memory[:end]
        np.bitwise_or(own, 0, out=own)

    def soil(self) -> None:
        """Notes that calls have written the output."""
        self.written[0].soil()


def needed_bytes(cases: Iterable[Case], memory: str) -> int:
    """Returns the bytes of a region that holds any buffer of any case in that kind of memory; 0 without
    cases."""
    sizes = [case.offset + buffer_bytes(case) for case in cases if case.memory == memory]
    return max(sizes) + GUARD if sizes else 0


def _pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


def plain_region(size: int) -> Region:
    """Returns at least `size` bytes of this process's memory, in whole pages, from a huge page on."""
    raw = np.empty(_pages(size) + HUGE_PAGE, np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE
    return Region(raw[start : start + _pages(size)])


class Pools:
    """Two regions of plain memory for all `cases`. `add_symmetric` and `add_own` add two regions each.

    Args:
        plain: makes a region of a number of bytes.
        wrap: makes a region of an array of bytes.
    """

    def __init__(
        self,
        cases: Iterable[Case],
        rank: int,
        plain: Callable[[int], Region] = plain_region,
        wrap: Callable[[Any], Region] = Region,
    ) -> None:
        self.rank = rank
        self._wrap = wrap
        self._regions: dict[str, tuple[Region, Region]] = {}
        self._owned: dict[tuple[int, int], str] = {}
        size = needed_bytes(cases, "plain")
        if size:
            self._add("plain", plain(size), plain(size))

    def add_symmetric(self, size: int, communicator: Any) -> None:
        """Adds regions of `size` bytes from `communicator.empty`; none for size 0. Collective. Raises the
        errors of `empty`."""
        if size:
            made = [self._wrap(communicator.empty((_pages(size),), "u8")) for _ in range(2)]
            self._add("symmetric", *made)

    def add_own(self, size: int, backend: Backend) -> None:
        """Adds memory that `backend` allocates, for its symmetric cases. Collective. Raises the errors of
        `allocate`."""
        if size:
            x, out = backend.allocate(_pages(size))
            known = self._owned.get((id(x), id(out)))  # variants of a backend may share it
            if known is None:
                regions = [one if isinstance(one, Region) else self._wrap(one) for one in (x, out)]
                self._add(backend.name, *regions)
                self._owned[id(x), id(out)] = backend.name
            else:
                self._regions[backend.name] = self._regions[known]

    def _add(self, memory: str, x: Region, out: Region) -> None:
        for region in (x, out):
            region.poison()  # first touch by the rank that uses it
        self._regions[memory] = (x, out)

    def place(self, case: Case, backend: Backend | None = None) -> Placed:
        """Returns the buffers of `case` on `backend`, as `Buffers` describes."""
        shapes = layout(case, self.rank)
        own = backend is not None and backend.own_memory and case.memory == "symmetric"
        x_region, out_region = self._regions[backend.name if own and backend else case.memory]
        start = case.offset

        def view(region: Region, shape: tuple[int, ...] | None) -> Any:
            return None if shape is None else region.view(shape, case.dtype, start)

        x, out = view(x_region, shapes.x), view(out_region, shapes.out)
        spare = view(out_region, shapes.x) if out is None else None
        around = ((x_region, x), (out_region, spare if out is None else out))
        guards = [r.memory[start + a.nbytes :][:GUARD] for r, a in around if a is not None]
        guards += [r.memory[:start][-GUARD:] for r, a in around if a is not None and start]
        read, written = [(region, 0 if array is None else start + array.nbytes) for region, array in around]
        root = shapes if case.root is None else layout(case, case.root)
        x_place, out_place = view(x_region, root.x), view(out_region, root.out)
        if case.placement == "in_place" and x is not None:
            match case.collective:
                case "reduce" if out is None:  # a library may overwrite the input of any rank
                    written, out_place = read, x
                case "all_gather" | "gather" if out is not None:
                    read, x = written, out[self.rank]
                case "reduce_scatter" | "scatter":
                    out, written = x[self.rank], read
                case _ if out is not None:
                    out, written = x, read
        buffers = Buffers(
            x,
            out,
            spare,
            x_place=x if x is not None else x_place,
            out_place=out if out is not None else out_place,
            send_counts=shapes.send_counts,
            recv_counts=shapes.recv_counts,
        )
        return Placed(buffers, case.dtype, read, written, tuple(guards), random=case.matmul is not None)
