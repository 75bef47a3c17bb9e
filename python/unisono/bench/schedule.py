"""Which cell is measured next, for how long, and when it has been measured enough. Runs on rank 0; no clock
but `now`.

A cell is one case on one backend; the cells of one case are rivals. In every round all unfinished cells are
visited, a batch of samples each: the cases in a fresh random order, the rivals of a case one right after the
other, in random order too. A cell has enough once it has been in `MIN_ROUNDS` rounds and the 95 % interval of
its median is narrow enough, or its samples or the time are used up; it is finished when its rivals have
enough as well, or it is so much slower than its best rival (`Limits.outclassed`) that no more is asked of it.
So a phase in which the machine is slower reaches all rivals, or none. The time left is divided evenly between
the batches still to come, so that what quick cells leave over goes to slow ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.records import stats

MIN_ROUNDS = stats.MIN_SAMPLES  # as many visits carry an interval of their medians
BATCH = 75  # samples in one visit at most: six visits carry a p99 (368)
LONG_S = 10.0  # what a cell may take past the budget
# where the user fixes the number of samples: a visit can be interrupted after it
BATCH_MOST, BATCH_S = 5000, 0.5
CHEAP_S = 0.005  # samples that take no longer than this together are always taken
WARMUP_S = 0.005  # untimed calls before a batch take this long at most, but are never fewer than one


@dataclass(frozen=True)
class Limits:
    """When to stop. `samples` set: exactly so many for every cell, whatever their spread and the time."""

    budget_s: float
    width: float = 0.05  # of the interval of the median, relative to it
    min_samples: int = 10
    max_samples: int = 1500
    rounds: int = 8
    warmup: int = 10
    samples: int | None = None
    outclassed: float | None = None  # a cell so many times as slow as its best rival is not visited again


@dataclass
class Cell:
    """The state of one cell: its samples so far, and what one of them costs."""

    calls: int = 1  # per sample
    case: Hashable = None  # cells with the same one are rivals; None: without any
    samples_us: list[float] = field(default_factory=list)
    skews_us: list[float] = field(default_factory=list)
    call_s: float = 0.0  # 0: not known yet
    sample_s: float = 0.0
    visit_s: float = 0.0  # what a visit costs beside its samples
    visits: list[int] = field(default_factory=list)  # the samples of each
    spent_s: list[float] = field(default_factory=list)  # and the time of each
    converged: bool = False
    enough: bool = False
    done: bool = False  # it and its rivals have enough

    @property
    def interval(self) -> stats.Interval:
        return stats.visited_interval(self.samples_us, self.visits)

    @property
    def rounds(self) -> int:
        return len(self.visits)

    @property
    def bare_s(self) -> float:
        """Of a sample, without what there is around it."""
        if not self.samples_us:
            return self.sample_s
        return max(1e-6 * self.calls * sum(self.samples_us) / len(self.samples_us), 1e-7)

    @property
    def least(self) -> int:
        """The samples that it gets however short the time is."""
        return max(1, min(stats.MIN_SAMPLES, int(LONG_S / self.sample_s)))

    def estimate(self) -> None:
        """The cost of a visit and of a sample: the line through the visits so far."""
        count, spent = np.asarray(self.visits, float), np.asarray(self.spent_s)
        mean = spent.mean() / max(1.0, count.mean())
        off = count - count.mean()
        slope = (off * spent).sum() / (off * off).sum() if off.any() else mean
        self.sample_s = float(max(1e-7, min(mean, max(slope, self.bare_s))))
        self.visit_s = float(max(0.0, spent.mean() - self.sample_s * count.mean()))


@dataclass(frozen=True)
class Batch:
    """One visit: untimed calls, then `samples` timed ones of `calls` calls each."""

    warmup: int
    samples: int
    calls: int


class Schedule:
    """Over cells 0 .. n-1; `reserve_s` is time that the caller still needs for other things (the checks at
    the end)."""

    def __init__(self, cells: Sequence[Cell], limits: Limits, seed: int, now: Callable[[], float]) -> None:
        self.cells, self.limits, self._now = list(cells), limits, now
        self._random = random.Random(seed)
        self._began = now()
        self._deadline = self._began + limits.budget_s
        self._round = 0
        self._waiting: set[int] = set()  # cells whose visit in this round is still to come
        self._rivals: dict[Hashable, list[int]] = {}
        for index in range(len(self.cells)):
            self._rivals.setdefault(self._case(index), []).append(index)
        self.reserve_s = 0.0

    def _case(self, index: int) -> Hashable:
        case = self.cells[index].case
        return ("none", index) if case is None else ("case", case)

    def rivals(self, index: int) -> list[int]:
        """The cells of the same case, itself included."""
        return self._rivals[self._case(index)]

    def left_s(self) -> float:
        """Seconds until the budget is used up, the reserve kept; not below zero."""
        return max(0.0, self._deadline - self._now() - self.reserve_s)

    def order(self) -> list[int]:
        """The unfinished cells, case by case, in a fresh random order: the next round. Empty: nothing is left
        to do."""
        self._end_outclassed()
        cases = [[i for i in rivals if not self.cells[i].done] for rivals in self._rivals.values()]
        self._random.shuffle(cases)
        for rivals in cases:
            self._random.shuffle(rivals)
        active = [index for rivals in cases for index in rivals]
        self._round += 1
        self._waiting = set(active)
        return active

    def _end_outclassed(self) -> None:
        if self.limits.outclassed is None:
            return
        for rivals in self._rivals.values():
            measured = [self.cells[i] for i in rivals if self.cells[i].samples_us]
            best = min((cell.interval.median for cell in measured), default=0.0)
            for cell in measured:
                if cell.interval.median >= self.limits.outclassed * best:
                    cell.enough = cell.done = True

    def know(self, index: int, call_s: float) -> None:
        """What one call costs; to be said once, before the first batch of the cell."""
        cell = self.cells[index]
        cell.call_s = max(call_s, 1e-7)
        cell.sample_s = cell.call_s * cell.calls

    def batch(self, index: int) -> Batch:
        """How much of the cell to measure in this visit."""
        cell, limits = self.cells[index], self.limits
        warmup = max(1, min(limits.warmup, int(WARMUP_S / cell.call_s)))
        if limits.samples is not None:
            most = max(1, min(BATCH_MOST, int(BATCH_S / cell.sample_s)))
            missing = limits.samples - len(cell.samples_us)
            each = math.ceil(missing / max(1, limits.rounds - cell.rounds))
            return Batch(warmup, min(each, most), cell.calls)
        missing = stats.MIN_SAMPLES - len(cell.samples_us)
        cheap = min(BATCH, int(CHEAP_S / cell.bare_s))
        left = self.left_s()
        if left <= 0.0:
            return Batch(warmup, max(1, cell.least - len(cell.samples_us), cheap), cell.calls)
        active = sum(not c.done for c in self.cells)
        rounds_to_come = max(1, limits.rounds - self._round)  # later rounds take half of what is left each
        slot = left / max(1, len(self._waiting) + active * rounds_to_come)
        least = max(1, cheap, math.ceil(missing / max(1, MIN_ROUNDS - cell.rounds)))  # spread over visits
        wanted = max(least, min(BATCH, int((slot - cell.visit_s) / cell.sample_s)))
        return Batch(warmup, min(wanted, max(1, limits.max_samples - len(cell.samples_us))), cell.calls)

    def add(self, index: int, samples_us: Sequence[float], skews_us: Sequence[float], spent_s: float) -> bool:
        """Takes in a batch and the time that all of it took. True: the case is finished."""
        cell, limits = self.cells[index], self.limits
        self._waiting.discard(index)
        cell.samples_us.extend(samples_us)
        cell.skews_us.extend(skews_us)
        cell.visits.append(len(samples_us))
        cell.spent_s.append(spent_s)
        cell.estimate()
        count = len(cell.samples_us)
        interval = cell.interval
        cell.converged = interval.sure and interval.width <= limits.width
        if limits.samples is not None:
            cell.enough = cell.done = count >= limits.samples
        else:
            narrow = count >= limits.min_samples and cell.converged
            out_of_time = count >= cell.least and self.left_s() <= 0.0
            cell.done = count >= limits.max_samples or out_of_time
            cell.enough = narrow or cell.done
        return self._settle(index)

    def drop(self, index: int) -> None:
        """A cell that failed: never visited again."""
        self.cells[index].enough = self.cells[index].done = True
        self._waiting.discard(index)
        self._settle(index)

    def _settle(self, index: int) -> bool:
        """Finishes the case if all its cells have enough, and have been visited equally often."""
        rivals = self.rivals(index)
        if self._waiting.isdisjoint(rivals) and all(self.cells[i].enough for i in rivals):
            for i in rivals:
                self.cells[i].done = True
        return all(self.cells[i].done for i in rivals)

    def share_done(self) -> float:
        """0 to 1, for the progress bar: finished cells, and of the others the rounds that they have been
        through."""
        rounds = self.limits.rounds + 1
        done = sum(1.0 if cell.done else min(cell.rounds, self.limits.rounds) / rounds for cell in self.cells)
        return done / max(1, len(self.cells))

    def estimate_s(self) -> float | None:
        """Seconds until everything will be done, about. Within a budget: what is left of it, less where the
        unfinished cells need less for as many samples as they may have; None once it is used up, when the
        fewest samples and the second checks may still be to come. For a fixed number of samples: at the pace
        so far."""
        if self.limits.samples is not None:
            share = self.share_done()
            return (self._now() - self._began) * (1.0 - share) / share if share > 0 else self.limits.budget_s
        if self.left_s() <= 0.0:
            return None
        wanted = self.limits.max_samples
        need = sum(
            (wanted - len(c.samples_us)) * (c.sample_s or 0.01) + c.visit_s for c in self.cells if not c.done
        )
        visits = sum(cell.rounds for cell in self.cells)
        untouched = sum(not cell.rounds and not cell.done for cell in self.cells)
        pace = (self._now() - self._began) / max(1, visits)  # every cell is visited, whatever the budget
        return max(min(need, self.left_s()), untouched * pace if visits else 0.0) + self.reserve_s
