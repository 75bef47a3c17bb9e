"""Cells, each a case on a backend, and their checks. Cells that differ only in mode or placement form a group
and share checks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import msgspec

from unisono.bench import pairs, verify, verify_matmul, verify_moe, verify_norm
from unisono.bench.backends.base import Backend, ResultCall
from unisono.bench.buffers import Placed, Pools
from unisono.bench.cases import calls_per_sample, has_in_place
from unisono.bench.control import Control
from unisono.bench.device import Device, HangError, Runner, nothing
from unisono.bench.schedule import Cell
from unisono.bench.timing import Call
from unisono.bench.verify import Arithmetic, Expectation, arrange, inspect, share_of_bound
from unisono.records import Case, vocabulary
from unisono.records.vocabulary import PLACEMENTS, case_text

LATE_S = 0.02  # how much later one rank enters a barrier under check


def prepared(case: Case, backend: Backend, placed: Placed, rank: int) -> Call:
    """Returns the backend's call, or one that does nothing on a rank that takes no part."""
    return backend.prepare(case, placed.buffers) if pairs.takes_part(case, rank) else nothing


@dataclass(eq=False)
class Work:
    """A cell, on every rank. Only rank 0 uses `state`."""

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
    probed: bool = False  # a few calls were timed, so that rank 0 knows the cost of one
    call: Call = nothing  # the call that the loops repeat, once they are made
    _placed: Placed | None = None
    _runner: Runner | None = None

    def ready(self, pools: Pools, device: Device) -> tuple[Runner, Placed]:
        """Returns the timed loops over the prepared call, and its buffers; both made once."""
        if self._runner is None or self._placed is None:
            self._placed = pools.place(self.case, self.backend)
            self.call = prepared(self.case, self.backend, self._placed, pools.rank)
            before = self._placed.rewrite if self.case.inputs == "written" else nothing
            self._runner = device.runner(self.case, self.call, self.backend, before)
            self.algorithm, self.sms = self.backend.algorithm(self.case), self.backend.sms(self.case)
            self.staged = self.backend.staged()
        return self._runner, self._placed

    def abandon(self) -> None:
        """Drops the loops without freeing them, since their library is gone."""
        self._runner = None

    def close(self) -> None:
        """Frees the loops, once the cell is finished."""
        if self._runner is not None:
            if self.case.moe is not None:  # its calls are kernels that follow each other
                self.sms = self._runner.sms
            self._runner.close()
            self._runner = None


@dataclass(eq=False)
class Group:
    """The cells of one case and backend. `variants`: the case in each placement that the backend has."""

    index: int
    backend: Backend
    variants: list[Case]
    works: list[Work] = field(default_factory=list)
    checked_before: bool = False
    finished: bool = False
    check_s: float = 0.0
    error: float | None = (
        None  # the largest of the first check of a quantised result, as a share of the bound
    )

    @property
    def unfinished(self) -> bool:
        return any(not work.state.done for work in self.works)


def make_groups(
    wanted: Sequence[tuple[Case, str | None]], backends: Sequence[Backend]
) -> tuple[list[Group], list[tuple[str, Case, str]]]:
    """Returns the groups of all (case, workload) on all backends, and (backend, case, reason) for each case
    that a backend does not offer."""
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
    """Returns why the backend cannot run such cases of any size, or None."""
    if (case.collective == vocabulary.PINGPONG or case.streams) and not backend.point_to_point:
        return f"{backend.name} offers no sends and receives of its own."
    if case.moe is not None and not backend.moe:
        return f"{backend.name} has no mixture of experts."
    if case.norm is not None and not backend.norm:
        return f"{backend.name} has no all_reduce_rms_norm."
    if case.matmul is not None and not backend.matmul:
        return f"{backend.name} has no matmuls with their collective."
    if (case.moe, case.norm, case.matmul) == (None, None, None) and not backend.collectives:
        return f"{backend.name} has no collectives."
    if case.streams == "per-peer" and not (case.device == "cuda" and backend.queues()):
        return f"calls of {backend.name} here are the host's and have no streams (--streams one)."
    if case.mode not in ("graph", "events") or backend.queues():
        return None
    return f"a call of {backend.name} waits for the GPU: only the host clock can time it (--mode latency)."


def _reference(case: Case) -> Any:
    """Returns the module with `expectation` and `bound_text` of such cases."""
    if case.moe is not None:
        return verify_moe
    if case.matmul is not None:
        return verify_matmul
    return verify if case.norm is None else verify_norm


@dataclass(frozen=True)
class Wrong:
    """A failed check."""

    case: Case
    works: list[Work]  # the cells that are wrong; empty: the placement is not timed
    rank: int  # the lowest with an error
    message: str  # that rank's error


# Buffers, a call on them that returns an error or None, and what it calls.
Made = tuple[Placed, Callable[[], str | None], Call]


def check(
    control: Control, pools: Pools, group: Group, seed: int, device: Device, first: bool
) -> list[Wrong]:
    """Checks every variant of the group on fresh random data. Returns the failures, the same on every rank.

    The `first` check makes one call of its own, before which the library compares the ranks' calls. The check
    after the timed part runs the loops of every cell once more, so that it checks what was timed: the graph,
    the queue of calls. In place, a second call would work on the result of the first. This check therefore
    makes one call of its own again. A barrier leaves no data: one more call shows whether the barrier waits
    for a late rank. Raises HangError on all ranks."""
    wrong, shares = [], list[float]()
    note = shares.append if first and group.backend.wire else None
    backend, late = group.backend, random.Random(seed).randrange(control.size)
    for number, variant in enumerate(group.variants):
        works = [work for work in group.works if work.case.placement == variant.placement]
        loops = [work for work in works if work.probed and not work.dropped]
        if first or variant.placement != PLACEMENTS[0]:
            loops = []
        whose = (control.rank, seed + number, backend.bit_exact)
        expected = cache(partial(_reference(variant).expectation, variant, *whose, wire=backend.wire))
        for hit in [[work] for work in loops] or [works]:
            case = hit[0].case if loops else variant
            device.beat(f"the check of {case_text(case)} on {backend.name}")
            made = partial(_called, case, backend, pools, device, compared=first)
            if loops:
                made = partial(_looped, hit[0], pools, device)
            error = _first_error(
                control, case, partial(_moves, case, made, expected, device, control.rank, note)
            )
            if error is None and case.collective == "barrier":
                single = partial(_called, case, backend, pools, device, call=hit[0].call if loops else None)
                error = _first_error(control, case, partial(_waits, control, late, single))
            if error is not None:
                wrong.append(Wrong(case, hit, error[0], f"{error[1]} ({case_text(case)})"))
    if note is not None:
        group.error = max(control.gather(max(shares, default=0.0), float))
    return wrong


def _first_error(control: Control, case: Case, step: Callable[[], str | None]) -> tuple[int, str] | None:
    """Returns (rank, text) of the lowest rank on which `step` returned or raised an error, or None. Raises
    HangError on all ranks if `step` raised it on any."""
    error, hung = None, False
    try:
        error = step()
    except Exception as raised:
        hung = isinstance(raised, HangError)
        error = f"{type(raised).__name__}: {raised}"
    first = control.first_error(error)
    if first is not None and any(control.gather(hung, bool)):
        raise HangError(f"{first[1]} ({case_text(case)})")
    return first


def _moves(
    case: Case,
    make: Callable[[], Made],
    expected: Callable[[Arithmetic], Expectation],
    device: Device,
    rank: int,
    note: Callable[[float], None] | None,
) -> str | None:
    """Returns what is wrong with the data after a call, or None. Passes the error's share of the bound to
    `note`."""
    placed, go, call = make()
    arithmetic = placed.read[0].arithmetic or device.arithmetic
    wanted = expected(arithmetic)
    arrange(placed, wanted, arithmetic)
    device.beat()  # here and below, since filling and comparing many GiB takes minutes
    error = go()
    device.beat()
    if error is None and isinstance(call, ResultCall):
        result = call.result()
        if case.moe is not None:
            placed, error = verify_moe.with_result(case, rank, placed, result)
    if case.norm is not None:
        placed = verify_norm.decoded(case, placed)
    error = error or inspect(case, placed, wanted, arithmetic)
    if note is not None and error is None:
        note(share_of_bound(placed.buffers.out.reshape(-1), wanted.out, arithmetic))
    return error


def _waits(control: Control, late: int, make: Callable[[], Made]) -> str | None:
    """Returns an error if a barrier does not wait for rank `late`, else None.

    Rank `late` enters LATE_S after an exchange before which all others have begun. Each rank measures by its
    own clock, so that the ranks need no common one."""
    began = time.perf_counter()
    control.gather(True, bool)
    _, go, _ = make()
    if control.rank == late:
        time.sleep(LATE_S)
    error = go()
    if error is None and control.rank != late and time.perf_counter() - began < 0.9 * LATE_S:
        return f"the barrier let this rank go before rank {late} had entered it."
    return error


def _called(
    case: Case,
    backend: Backend,
    pools: Pools,
    device: Device,
    compared: bool = False,
    call: Call | None = None,
) -> Made:
    """Returns the buffers of a call of the check, and a function that makes the call."""
    placed = pools.place(case, backend)
    single = call or prepared(case, backend, placed, pools.rank)

    def go() -> str | None:
        with backend.checked() if compared else nullcontext():
            single()
        device.finish(backend)
        return None

    return placed, go, single


def _looped(work: Work, pools: Pools, device: Device) -> Made:
    """Returns as `_called`, but the function takes one sample of the timed loops."""
    runner, placed = work.ready(pools, device)

    def go() -> str | None:
        timed = runner.timed(1, work.state.calls, 0)
        if timed.hung:
            raise HangError(timed.error)
        return timed.error

    return placed, go, work.call


def bound_of(work: Work) -> str:
    """Returns in words what the check of this cell demands."""
    of_case = _reference(work.case)
    return str(of_case.bound_text(work.case, work.backend.bit_exact, work.backend.wire))
