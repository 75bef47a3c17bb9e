"""Runs all cells: checks, measures in interleaved rounds, checks again, and records each finished cell.

Every method runs on all ranks in step. Rank 0 decides (see `schedule`) and sends its decisions to the others
over the bootstrap, never over a measured library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from unisono.bench import cells as checks
from unisono.bench import timing
from unisono.bench.backends.base import Backend
from unisono.bench.binding import Binding
from unisono.bench.buffers import Pools
from unisono.bench.cells import Group, Work
from unisono.bench.control import Control, Interrupt
from unisono.bench.device import Device, HangError
from unisono.bench.pairs import messages, place_alone
from unisono.bench.results import result_of
from unisono.bench.schedule import Batch, Limits, Schedule
from unisono.records import NOT_CHECKED, Failure, Record, Result, Skip, Verification
from unisono.records.vocabulary import case_text, size_text

T = TypeVar("T")
PROBE_S = 0.02  # a longer call is timed only once to learn its cost
ENDING_S = 5.0  # of second checks after an interrupt: launchers end ranks 10 s after SIGTERM


def _slowest_s(ranks: list[timing.Timed]) -> float:
    samples, _ = timing.combine(ranks, calls=1)
    return min(samples) / 1e6


def _summary(wrong: list[tuple[bool, int, str]]) -> str:
    """Returns the ranks' errors in one line, the cause first, each text once."""
    first, *others = sorted(wrong)
    known = {first[2]}
    texts = [first[2]]
    for _, rank, text in others:
        if text not in known:
            texts.append(f"rank {rank}: {text}")
            known.add(text)
    return " | ".join(texts)


class Report(msgspec.Struct):
    """One rank's report after a batch."""

    starts: bytes
    durations: bytes
    error: str | None
    hung: bool
    interrupted: bool


class Measurement:
    """Measures the cells of `groups`. `emit` gets the records, `show` the progress between batches, both on
    rank 0."""

    def __init__(
        self,
        control: Control,
        pools: Pools,
        groups: Sequence[Group],
        limits: Limits,
        seed: int,
        binding: Binding,
        interrupt: Interrupt,
        emit: Callable[[Record], None],
        show: Callable[[Schedule, str], None],
        verified: bool,
        ceiling_gbps: float | None,
        device: Device,
        launch: int = 1,
    ) -> None:
        self.control, self.pools, self.groups = control, pools, list(groups)
        self.device = device
        self.works = [work for group in groups for work in group.works]
        self.schedule = Schedule([work.state for work in self.works], limits, seed, time.monotonic)
        self.interrupted = False
        self.failures = 0
        self._check_until = math.inf
        self._seed, self._binding, self._interrupt = seed, binding, interrupt
        self._emit, self._show, self._verified = emit, show, verified
        self._ceiling, self._launch = ceiling_gbps, launch

    def run(self) -> list[Result]:
        """Returns the results on rank 0, an empty list on others. Sets `interrupted` and `failures`. Before
        it raises an error, it records all samples taken so far. Raises HangError on all ranks."""
        self.device.watch.save = partial(self._record_unfinished, "nothing moved any more")
        try:
            return self._run()
        except BaseException as error:
            self._record_unfinished(str(error))
            raise

    def _run(self) -> list[Result]:
        results: list[Result] = []
        while not self.interrupted:
            order = self.control.from_root(self.schedule.order, list[int])
            if not order:
                break
            for index in order:
                work = self.works[index]
                if not work.dropped:
                    self._surviving(work.group, partial(self._visit, index, work))
                    for rival in self.schedule.rivals(index):
                        group = self.works[rival].group
                        if not group.finished and not self._unfinished(group):
                            results += self._surviving(group, partial(self._finish, group)) or []
                if self.interrupted:
                    break
        # The quickest checks first, since there is no time for all after an interrupt.
        rest = sorted((g for g in self.groups if not g.finished), key=lambda group: group.check_s)
        for index in self.control.from_root(lambda: [group.index for group in rest], list[int]):
            group = self.groups[index]
            if not group.finished:
                results += self._surviving(group, partial(self._finish, group)) or []
        return results

    def _surviving(self, group: Group, step: Callable[[], T]) -> T | None:
        """Returns the result of `step`. None: it hung, the GPUs came back, and the backend is left out.
        Raises HangError if the GPUs did not come back."""
        try:
            return step()
        except HangError as hung:
            came_back = self.device.recover(group.backend)
            if not all(self.control.gather(came_back, bool)):
                raise
            self._lose(group.backend, str(hung))
            return None

    def _lose(self, backend: Backend, why: str) -> None:
        """Leaves the backend out from now on. Records its samples as not checked."""
        reason = f"left out after it failed for good: {why}"
        for index, work in enumerate(self.works):
            if work.backend is not backend:
                continue
            work.abandon()
            self._leave(work.group)
            if work.dropped or work.recorded:
                continue
            self.schedule.drop(index)
            if work.state.samples_us:
                self._record_unchecked([work], reason)
            else:
                self._emit(Skip(backend=backend.name, reason=reason, case=work.case))
            work.dropped = True

    def _leave(self, group: Group) -> None:
        """Ends the group, and frees the time reserved for its second check."""
        if not group.finished:
            group.finished = True
            self.schedule.reserve_s -= group.check_s

    def _unfinished(self, group: Group) -> bool:
        return self.control.from_root(lambda: group.unfinished, bool)

    def _visit(self, index: int, work: Work) -> None:
        """Measures one batch of one cell, after the first check and the probe if these are still to come."""
        if not work.group.checked_before:
            self._check_before(work.group)
            if work.dropped:
                return
        if not work.probed:
            call_s = self._probe(work)
            if call_s is None:
                return
            if self.control.rank == 0:
                self.schedule.know(index, call_s)
        self._tell("", work)
        batch = self.control.from_root(lambda: self.schedule.batch(index), Batch)
        began = time.monotonic()
        ranks = self._batch(work, batch)
        if ranks is not None and self.control.rank == 0:
            samples, skews = timing.combine(ranks, batch.calls * messages(work.case))
            self.schedule.add(index, samples, skews, time.monotonic() - began)

    def _tell(self, doing: str, work: Work) -> None:
        if self.control.rank == 0:
            case = work.case
            self._show(self.schedule, f"{doing}{case.collective} {size_text(case)} on {work.backend.name}")

    def _probe(self, work: Work) -> float | None:
        """Prepares the call on all ranks. Returns its time in seconds, of a quick call the least of a few;
        None if it failed."""
        error: str | None = None
        try:
            work.ready(self.pools, self.device)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        failed = self.control.first_error(error)
        if failed is not None:
            self._drop(work, *failed)
            return None
        work.probed = True
        once = self._batch(work, Batch(0, 1, 1))
        if once is None:
            return None
        if self.control.from_root(lambda: _slowest_s(once) >= PROBE_S, bool):
            return _slowest_s(once)
        again = self._batch(work, Batch(1, 3, 1))
        return None if again is None else _slowest_s(again)

    def _batch(self, work: Work, batch: Batch) -> list[timing.Timed] | None:
        """Returns all ranks' times. None: the cell failed on a rank and is dropped."""
        self.device.beat(f"{case_text(work.case)} on {work.backend.name}")
        runner, placed = work.ready(self.pools, self.device)
        self._binding.bind(work.backend.own_threads, place_alone(work.case, self.control.rank))
        placed.prime()
        mine = runner.timed(batch.samples, batch.calls, batch.warmup)
        placed.soil()
        asked = self._interrupt.asked
        report = Report(mine.starts.tobytes(), mine.durations.tobytes(), mine.error, mine.hung, asked)
        reports = self.control.gather(report, Report)
        self.interrupted |= any(rank.interrupted for rank in reports)
        # A rank that did not hang comes first: its error is why others hung.
        wrong = [(report.hung, rank, report.error) for rank, report in enumerate(reports) if report.error]
        failed = (min(wrong)[1], _summary(wrong)) if wrong else None
        if failed is not None:
            hung = any(rank.hung for rank in reports)
            self._drop(work, *failed, hung)
            if hung:
                raise HangError(failed[1])
            return None
        return [
            timing.Timed(np.frombuffer(one.starts, np.int64), np.frombuffer(one.durations, np.int64))
            for one in reports
        ]

    def _drop(self, work: Work, rank: int | None, message: str, hung: bool = False) -> None:
        """Records the failure of a cell, which no rank measures any more."""
        if not work.dropped:
            work.dropped = True
            self.schedule.drop(self.works.index(work))
            self._fail(work, rank, message)
            if not hung:
                work.close()

    def _record_unfinished(self, why: str) -> None:
        self._record_unchecked(self.works, f"the run ended before the second check: {why}")

    def _record_unchecked(self, works: Sequence[Work], why: str) -> None:
        """Records the results of the cells that have samples but no second check."""
        if self.control.rank != 0:
            return
        unchecked = Verification(before=self._verified, after=False, bound=NOT_CHECKED, detail=why)
        for work in works:
            if work.state.samples_us and not work.dropped and not work.recorded:
                work.recorded = True
                self._emit(result_of(work, unchecked, self._ceiling, self._launch))

    def _fail(self, work: Work, rank: int | None, message: str) -> None:
        self.failures += 1
        self._emit(Failure(backend=work.backend.name, case=work.case, rank=rank, message=message))

    def _check_before(self, group: Group) -> None:
        group.checked_before = True
        if not self._verified:
            return
        began = time.monotonic()
        wrong = self._checked(group, 0)
        group.check_s = time.monotonic() - began
        self.schedule.reserve_s += group.check_s
        for one in wrong:
            for work in one.works:
                self._drop(work, one.rank, one.message)
            if not one.works:
                self._fail_untimed(group, one)

    def _checked(self, group: Group, phase: int) -> list[checks.Wrong]:
        seed = (self._seed * 1_000_003 + group.index * 8 + phase * 4) % 2**63
        try:
            return checks.check(self.control, self.pools, group, seed, self.device, first=phase == 0)
        except HangError as hung:
            self._fail(group.works[0], None, str(hung))
            raise

    def _fail_untimed(self, group: Group, wrong: checks.Wrong) -> None:
        """Records the failure of a placement that is checked but not timed."""
        self.failures += 1
        self._emit(
            Failure(backend=group.backend.name, case=wrong.case, rank=wrong.rank, message=wrong.message)
        )

    def _finish(self, group: Group) -> list[Result]:
        """Makes the second check of a group whose cells are all measured. Returns their results."""
        self._leave(group)
        wrong: list[checks.Wrong] = []
        if self._verified and self.control.from_root(
            lambda: any(w.state.samples_us for w in group.works), bool
        ):
            if self._in_time(group):
                self._tell("checking ", group.works[0])
                wrong = self._checked(group, 1)
            else:
                self._record_unchecked(group.works, "the run was interrupted before the second check")
        for one in wrong:
            if not one.works:
                self._fail_untimed(group, one)
        results = []
        for work in group.works:
            work.state.done = True
            work.close()
            if self.control.rank != 0 or work.dropped or work.recorded or not work.state.samples_us:
                continue
            after = next((one for one in wrong if work in one.works), None)
            if after is not None:
                self._fail(work, after.rank, f"after the timed part: {after.message}")
            verification = Verification(
                before=self._verified,
                after=self._verified and after is None,
                bound=checks.bound_of(work) if self._verified else NOT_CHECKED,
                error=group.error,
                detail=None if after is None else after.message,
            )
            results.append(result_of(work, verification, self._ceiling, self._launch))
            work.recorded = True
            self._emit(results[-1])
        return results

    def _in_time(self, group: Group) -> bool:
        """Returns whether there is time for the group's second check. After an interrupt of any rank, all
        second checks together have ENDING_S."""
        self.interrupted |= any(self.control.gather(self._interrupt.asked, bool))
        now = time.monotonic()
        if self.interrupted:
            self._check_until = min(self._check_until, now + ENDING_S)
        return self.control.from_root(lambda: now + group.check_s <= self._check_until, bool)
