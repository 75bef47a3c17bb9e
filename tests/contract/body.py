"""The body of a contract run on one rank, the same for every backend: makes buffers, calls, compares."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cases import LARGEST, Work, counts_matrix, out_of, shapes, x_of
from reference import DTYPES, difference
from unisono.bench.backends.base import Backend, Buffers
from unisono.bench.backends.unisono import UnisonoBackend

Bytes = npt.NDArray[np.uint8]
_GUARD = 64
_POISON = 0xA5
_ROOM = LARGEST + (1 << 16)  # all_to_all_v rounds up
_MOST_FAILURES = 5  # the failures of a collective that a report describes


@dataclass
class Report:
    """One rank's report, by collective or group: calls made, what was wrong, why others were not made."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    words: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    error: str | None = None

    def complain(self, what: str, text: str) -> None:
        self.wrong[what] += 1
        words = self.words.setdefault(what, [])
        if len(words) < _MOST_FAILURES:
            words.append(text)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self)))


class Subject(Protocol):
    """A library on one rank: makes a call, in a kind of memory, or says why not."""

    rank: int

    def refuses(self, work: Work) -> str | None: ...
    def backend(self, work: Work) -> Backend: ...
    def memory(self, work: Work) -> tuple[Bytes, Bytes]: ...


class OtherSubject:
    """A library behind the bench's protocol, on plain memory."""

    def __init__(self, rank: int, backend: Backend) -> None:
        self.rank = rank
        self._backend = backend
        self._memory = _plain()

    def refuses(self, work: Work) -> str | None:
        return self._backend.supports(work.case)

    def backend(self, work: Work) -> Backend:
        return self._backend

    def memory(self, work: Work) -> tuple[Bytes, Bytes]:
        return self._memory


class UnisonoSubject:
    """Unisono with checked and unchecked calls, each algorithm, plain and symmetric memory. Collective."""

    def __init__(self, unchecked: Any, checked: Any) -> None:
        self.rank = checked.rank
        self._communicators = {False: unchecked, True: checked}
        self._backends: dict[tuple[str | None, bool], UnisonoBackend] = {}
        self._plain = _plain()
        self._symmetric = {check: _symmetric(comm) for check, comm in self._communicators.items()}

    def refuses(self, work: Work) -> str | None:
        return None

    def backend(self, work: Work) -> Backend:
        key = (work.algorithm, work.check)
        if key not in self._backends:
            self._backends[key] = UnisonoBackend(work.algorithm)
            self._backends[key]._comm = self._communicators[work.check]
        return self._backends[key]

    def memory(self, work: Work) -> tuple[Bytes, Bytes]:
        return self._symmetric[work.check] if work.case.memory == "symmetric" else self._plain


def _plain() -> tuple[Bytes, Bytes]:
    return np.empty(_ROOM, np.uint8), np.empty(_ROOM, np.uint8)


def _symmetric(communicator: Any) -> tuple[Bytes, Bytes]:
    return communicator.empty(_ROOM, "u8"), communicator.empty(_ROOM, "u8")


@dataclass(frozen=True)
class Placed:
    """Buffers in two regions. `used`: the end of the buffers, and of the guard behind them, in bytes."""

    buffers: Buffers
    regions: tuple[Bytes, Bytes]
    used: int


def place(work: Work, rank: int, regions: tuple[Bytes, Bytes]) -> Placed:
    """Poisons the regions. Returns buffers in them, as in `bench.backends.base.Buffers`, with the input."""
    kind = DTYPES[work.case.dtype]
    begin = _GUARD + work.shift * kind.itemsize
    x_shape, out_shape = shapes(work, rank)
    longest = max((prod(shape) for shape in (x_shape, out_shape) if shape is not None), default=0)
    used = begin + longest * kind.itemsize + _GUARD

    def view(region: Bytes, shape: tuple[int, ...] | None) -> Any:
        if shape is None:
            return None
        return region[begin : begin + prod(shape) * kind.itemsize].view(kind).reshape(shape)

    for region in regions:
        region[:used].fill(_POISON)
    x, out = view(regions[0], x_shape), view(regions[1], out_shape)
    spare = view(regions[1], x_shape) if out is None else None
    if work.in_place:
        match work.case.collective:
            case "all_gather" | "gather" if out is not None:
                x = out[rank]
            case "reduce_scatter" | "scatter" if x is not None:
                out = x[rank]
            case "all_reduce" | "reduce" | "broadcast" | "all_to_all" | "all_to_all_v" if out is not None:
                out = x
    if x is not None:
        np.copyto(x.reshape(-1), x_of(work, rank))
    counts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if work.case.collective == "all_to_all_v":
        matrix = counts_matrix(work)
        counts = tuple(matrix[rank]), tuple(row[rank] for row in matrix)
    return Placed(Buffers(x, out, spare, *counts), regions, used)


def perform(work: Work, subject: Subject, report: Report) -> None:
    """Makes one call. Checks the output, and that nothing else has changed."""
    placed = place(work, subject.rank, subject.memory(work))
    before = [region[: placed.used].copy() for region in placed.regions]
    subject.backend(work).prepare(work.case, placed.buffers)()
    report.done[work.case.collective] += 1
    out = placed.buffers.out
    if out is not None:
        expected = out_of(work, subject.rank)
        wrong = difference(out, expected.values, expected.allowed)
        if wrong is not None:
            report.complain(work.case.collective, f"{work}: rank {subject.rank}, {wrong}")
    if not work.tame:
        _nothing_else(work, subject.rank, placed, before, report)


def _nothing_else(work: Work, rank: int, placed: Placed, before: Sequence[Bytes], report: Report) -> None:
    for name, region, old in zip(("x", "out"), placed.regions, before, strict=True):
        if np.array_equal(region[: placed.used], old):
            continue
        changed = region[: placed.used] != old
        if (out := placed.buffers.out) is not None:
            at = out.ctypes.data - region.ctypes.data
            if 0 <= at < len(region):
                changed[at : at + out.nbytes] = False
        if changed.any():
            where = int(np.argmax(changed)) - _GUARD - work.shift * DTYPES[work.case.dtype].itemsize
            report.complain(
                work.case.collective,
                f"{work}: rank {rank}, the call changed byte {where} of the memory of {name}",
            )


def run(works: Sequence[Work], subject: Subject, report: Report) -> None:
    """Runs all works on this rank, in the same order as every other rank."""
    for work in works:
        reason = subject.refuses(work)
        if reason is not None:
            report.refused.setdefault(work.case.collective, Counter())[reason] += 1
            continue
        try:
            perform(work, subject, report)
        except Exception as error:
            raise RuntimeError(f"{work} on rank {subject.rank}: {type(error).__name__}: {error}") from error
