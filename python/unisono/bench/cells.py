"""A cell is a case on a backend; cells that differ only in mode or placement form a group and share their
checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec

from unisono.bench import pairs
from unisono.bench.backends.base import Backend
from unisono.bench.buffers import Placed, Pools
from unisono.bench.cases import PLACEMENTS, calls_per_sample, has_in_place, label
from unisono.bench.control import Control
from unisono.bench.device import Device, HangError, Runner
from unisono.bench.records import Case
from unisono.bench.schedule import Cell
from unisono.bench.timing import Call
from unisono.bench.verify import Expectation, arrange, bound_text, expectation, inspect


def prepared(case: Case, backend: Backend, placed: Placed, rank: int) -> Call:
    """The backend's call; one that does nothing on a rank that takes no part."""
    return backend.prepare(case, placed.buffers) if pairs.takes_part(case, rank) else _nothing


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Work:
    """A cell as every rank sees it; `state` is used on rank 0."""

    case: Case
    backend: Backend
    workload: str | None
    state: Cell
    group: Group
    algorithm: str | None = None
    sms: int | None = None
    staged: bool = False
    dropped: bool = False
    recorded: bool = False
    probed: bool = False  # a few calls were timed, so that rank 0 knows what one costs
    _placed: Placed | None = None
    _runner: Runner | None = None

    def ready(self, pools: Pools, device: Device) -> tuple[Runner, Placed]:
        """The timed loops over the prepared call, and its buffers; made once."""
        if self._runner is None or self._placed is None:
            self._placed = pools.place(self.case, self.backend)
            call = prepared(self.case, self.backend, self._placed, pools.rank)
            self._runner = device.runner(self.case, call, self.backend)
            self.algorithm, self.sms = self.backend.algorithm(self.case), self.backend.sms(self.case)
            self.staged = self.backend.staged()
        return self._runner, self._placed

    def abandon(self) -> None:
        """Forgets the loops without freeing them: their library is gone."""
        self._runner = None

    def close(self) -> None:
        """Frees the loops; to be called when the cell is finished."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


@dataclass(eq=False)
class Group:
    """The cells of one case and backend; `variants` are its placements as far as the backend has them."""

    index: int
    backend: Backend
    variants: list[Case]
    works: list[Work] = field(default_factory=list)
    checked_before: bool = False
    finished: bool = False
    check_s: float = 0.0

    @property
    def unfinished(self) -> bool:
        return any(not work.state.done for work in self.works)


def make_groups(
    wanted: Sequence[tuple[Case, str | None]], backends: Sequence[Backend]
) -> tuple[list[Group], list[tuple[str, Case, str]]]:
    """Groups of all (case, workload) on all backends, and (backend, case, reason) for what a backend does not
    offer."""
    groups: dict[tuple[str, Case], Group] = {}
    skipped: dict[tuple[str, Case], str] = {}
    for case, workload in wanted:
        for backend in backends:
            reason = _lacking(case, backend) or backend.supports(case)
            if reason is not None:
                skipped[backend.name, case] = reason
                continue
            key = msgspec.structs.replace(case, mode="latency", placement="out_of_place")
            if (backend.name, key) not in groups:
                others = PLACEMENTS if has_in_place(case) else PLACEMENTS[:1]
                variants = [msgspec.structs.replace(key, placement=placement) for placement in others]
                variants = [variant for variant in variants if backend.supports(variant) is None]
                groups[backend.name, key] = Group(len(groups), backend, variants)
            group = groups[backend.name, key]
            group.works.append(
                Work(case, backend, workload, Cell(calls_per_sample(case), (case, workload)), group)
            )
    return list(groups.values()), [(name, case, reason) for (name, case), reason in skipped.items()]


def _lacking(case: Case, backend: Backend) -> str | None:
    """Why a kind of case is beyond the backend, whatever its size."""
    if (case.collective == pairs.NAME or case.streams) and not backend.point_to_point:
        return f"{backend.name} offers no sends and receives of its own."
    if case.streams == "per-peer" and not (case.device == "cuda" and backend.queues()):
        return f"calls of {backend.name} here are the host's and have no streams (--streams one)."
    if case.mode not in ("graph", "events") or backend.queues():
        return None
    return f"a call of {backend.name} waits for the GPU: only the host clock can time it (--mode latency)."


@dataclass(frozen=True)
class Wrong:
    """What failed its check, the cells that are wrong with it (none: a placement that is not timed), the
    lowest rank that saw it, and what it saw."""

    case: Case
    works: list[Work]
    rank: int
    message: str


def check(
    control: Control, pools: Pools, group: Group, seed: int, device: Device, first: bool
) -> list[Wrong]:
    """Checks every variant of the group on fresh random data; the same list on every rank.

    The `first` time by one call of its own, before which the ranks' calls are compared. After the timed part
    the loops of every cell run once more, so that what was timed is what is checked: the graph, the queue of
    calls. Not so in place, where a second call would work on the result of the first: one call of its own
    again. Raises HangError, on all ranks."""
    wrong = []
    for number, variant in enumerate(group.variants):
        works = [work for work in group.works if work.case.placement == variant.placement]
        loops = [work for work in works if work.probed and not work.dropped]
        if first or variant.placement != PLACEMENTS[0]:
            loops = []
        expected: Expectation | None = None
        for hit in [[work] for work in loops] or [works]:
            case = hit[0].case if loops else variant
            error: str | None = None
            hung = False
            try:
                device.beat(f"the check of {label(case)} on {group.backend.name}")
                if loops:
                    placed, go = _looped(hit[0], pools, device)
                else:
                    placed, go = _called(case, group.backend, pools, device, compared=first)
                arithmetic = placed.read[0].arithmetic or device.arithmetic
                if expected is None:
                    exact, wire = group.backend.bit_exact, group.backend.wire
                    expected = expectation(case, control.rank, seed + number, exact, arithmetic, wire)
                arrange(placed, expected, arithmetic)
                error = go() or inspect(case, placed, expected, arithmetic)
            except Exception as raised:
                hung = isinstance(raised, HangError)
                error = f"{type(raised).__name__}: {raised}"
            told = control.first_error(error)
            if told is not None:
                if any(control.gather(hung, bool)):
                    raise HangError(f"{told[1]} ({label(case)})")
                wrong.append(Wrong(case, hit, told[0], f"{told[1]} ({label(case)})"))
    return wrong


def _called(
    case: Case, backend: Backend, pools: Pools, device: Device, compared: bool
) -> tuple[Placed, Callable[[], str | None]]:
    """The buffers of a call that is made for the check, and what makes it; it returns what went wrong."""
    placed = pools.place(case, backend)
    call = prepared(case, backend, placed, pools.rank)

    def go() -> str | None:
        with backend.checked() if compared else nullcontext():
            call()
        device.finish(backend)
        return None

    return placed, go


def _looped(work: Work, pools: Pools, device: Device) -> tuple[Placed, Callable[[], str | None]]:
    """As `_called`, of what is timed: one sample."""
    runner, placed = work.ready(pools, device)

    def go() -> str | None:
        timed = runner.timed(1, work.state.calls, 0)
        if timed.hung:
            raise HangError(timed.error)
        return timed.error

    return placed, go


def bound_of(work: Work) -> str:
    """What the check of this cell demands, in words."""
    return bound_text(work.case, work.backend.bit_exact, work.backend.wire)
