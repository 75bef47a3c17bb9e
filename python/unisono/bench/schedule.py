"""Decides which cell is measured next, for how long, and when a cell has enough. Runs on rank 0; its only
clock is `now`.

A cell is one case on one backend; the cells of one case are rivals. Every round visits all unfinished cells,
for a batch of samples each: the cases in a fresh random order, the rivals of a case one right after the
other, in random order too. A cell has enough after `MIN_ROUNDS` rounds if the 95 % interval of its median is
narrow. Used-up samples or time are enough too. A cell is finished when its rivals have enough too, or when it
is too slow beside its best rival (`Limits.outclassed`). A phase in which the machine is slower therefore
reaches all rivals, or none. The time left is divided evenly between the batches still to come: slow cells get
the time that quick cells leave.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.records import stats

MIN_ROUNDS = stats.MIN_SAMPLES  # the fewest visits whose medians have an interval
BATCH = 75  # the most samples of a visit; six visits have enough for a p99 (368)
LONG_S = 10.0  # the time of a cell beyond the budget
# The longest visit if the user fixes the number of samples: an interrupt waits for its end.
BATCH_MOST, BATCH_S = 5000, 0.5
CHEAP_S = 0.005  # samples that together take no longer are always taken
WARMUP_S = 0.005  # the longest time of the untimed calls before a batch; at least one call is made


@dataclass(frozen=True)
class Limits:
    """When to stop. With `samples`, every cell gets exactly so many, whatever their spread and the time."""

    budget_s: float
    width: float = 0.05  # of the median's interval, relative to the median
    min_samples: int = 10
    max_samples: int = 1500
    rounds: int = 8
    warmup: int = 10
    samples: int | None = None
    outclassed: float | None = None  # a cell this many times as slow as its best rival is not visited again

    @property
    def batch(self) -> int:
        """Returns the most samples of a visit. Those of one visit share what chance has given it: a launch
        of many, which takes few samples, spreads them over all rounds too."""
        return min(BATCH, math.ceil(self.max_samples / self.rounds))


@dataclass
class Cell:
    """The state of one cell: its samples so far, and the time of one sample."""

    calls: int = 1  # per sample
    case: Hashable = None  # cells of the same case are rivals; None: no rivals
    samples_us: list[float] = field(default_factory=list)
    skews_us: list[float] = field(default_factory=list)
    call_s: float = 0.0  # 0: not known yet
    sample_s: float = 0.0
    visit_s: float = 0.0  # the time of a visit beside its samples
    visits: list[int] = field(default_factory=list)  # the number of samples of each visit
    spent_s: list[float] = field(default_factory=list)  # the time of each visit
    converged: bool = False
    enough: bool = False
    done: bool = False  # the cell and its rivals have enough

    @property
    def interval(self) -> stats.Interval:
        return stats.visited_interval(self.samples_us, self.visits)

    @property
    def rounds(self) -> int:
        return len(self.visits)

    @property
    def bare_s(self) -> float:
        """Returns the time of a sample in seconds, without the work around it."""
        if not self.samples_us:
            return self.sample_s
        return max(1e-6 * self.calls * sum(self.samples_us) / len(self.samples_us), 1e-7)

    @property
    def least(self) -> int:
        """Returns the number of samples that the cell gets however short the time is."""
        return max(1, min(stats.MIN_SAMPLES, int(LONG_S / self.sample_s)))

    def estimate(self) -> None:
        """Sets the time of a visit and of a sample, by the line through the visits so far."""
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
    """The schedule of cells 0 .. n-1. `reserve_s`: seconds that the caller needs for checks at the end."""

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
        """Returns the cells of the same case, this cell included."""
        return self._rivals[self._case(index)]

    def left_s(self) -> float:
        """Returns the seconds of the budget that are left, without the reserve; not below zero."""
        return max(0.0, self._deadline - self._now() - self.reserve_s)

    def order(self) -> list[int]:
        """Begins a round. Returns the unfinished cells, case by case, in a fresh random order."""
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
        """Sets the time of one call. Called once, before the first batch of the cell."""
        cell = self.cells[index]
        cell.call_s = max(call_s, 1e-7)
        cell.sample_s = cell.call_s * cell.calls

    def batch(self, index: int) -> Batch:
        """Returns how much of the cell to measure in this visit."""
        cell, limits = self.cells[index], self.limits
        warmup = max(1, min(limits.warmup, int(WARMUP_S / cell.call_s)))
        if limits.samples is not None:
            most = max(1, min(BATCH_MOST, int(BATCH_S / cell.sample_s)))
            missing = limits.samples - len(cell.samples_us)
            each = math.ceil(missing / max(1, limits.rounds - cell.rounds))
            return Batch(warmup, min(each, most), cell.calls)
        missing = stats.MIN_SAMPLES - len(cell.samples_us)
        cheap = min(limits.batch, int(CHEAP_S / cell.bare_s))
        left = self.left_s()
        if left <= 0.0:
            return Batch(warmup, max(1, cell.least - len(cell.samples_us), cheap), cell.calls)
        active = sum(not c.done for c in self.cells)
        rounds_to_come = max(1, limits.rounds - self._round)  # later rounds take half of the time left each
        slot = left / max(1, len(self._waiting) + active * rounds_to_come)
        least = max(1, cheap, math.ceil(missing / max(1, MIN_ROUNDS - cell.rounds)))  # spread over rounds
        wanted = max(least, min(limits.batch, int((slot - cell.visit_s) / cell.sample_s)))
        return Batch(warmup, min(wanted, max(1, limits.max_samples - len(cell.samples_us))), cell.calls)

    def add(self, index: int, samples_us: Sequence[float], skews_us: Sequence[float], spent_s: float) -> bool:
        """Adds a batch, and the time of the whole visit. Returns whether the case is finished."""
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
        """Ends a cell that failed."""
        self.cells[index].enough = self.cells[index].done = True
        self._waiting.discard(index)
        self._settle(index)

    def _settle(self, index: int) -> bool:
        """Finishes the case if all its cells have enough, after equally many visits. Returns whether it is
        finished."""
        rivals = self.rivals(index)
        if self._waiting.isdisjoint(rivals) and all(self.cells[i].enough for i in rivals):
            for i in rivals:
                self.cells[i].done = True
        return all(self.cells[i].done for i in rivals)

    def share_done(self) -> float:
        """Returns the finished share of the work, 0 to 1, by finished cells and the rounds of the others."""
        rounds = self.limits.rounds + 1
        done = sum(1.0 if cell.done else min(cell.rounds, self.limits.rounds) / rounds for cell in self.cells)
        return done / max(1, len(self.cells))

    def estimate_s(self) -> float | None:
        """Returns about how many seconds are left until the end of the run.

        Within a budget: the rest of it, or less if the unfinished cells need less for all of their samples.
        None: the budget is used up; the fewest samples and the second checks may still be to come. For a
        fixed number of samples: by the pace so far."""
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
        pace = (self._now() - self._began) / max(1, visits)  # every cell is visited, even beyond the budget
        return max(min(need, self.left_s()), untouched * pace if visits else 0.0) + self.reserve_s
