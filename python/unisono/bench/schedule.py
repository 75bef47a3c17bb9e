"""Which cell is measured next, for how long, and when it has been measured enough. Runs on rank 0; no clock
but `now`.

A cell is one case on one backend. In every round all unfinished cells are visited in a fresh random order, a
batch of samples each, so that drift of the machine reaches all backends alike. A cell is finished once it has
been in `MIN_ROUNDS` rounds and the 95 % interval of its median is narrow enough, or its samples or the time
are used up. The time left is divided evenly between the batches still to come, so that what quick cells leave
over goes to slow ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.bench import stats

MIN_ROUNDS = 3
BATCH = 150  # samples in one visit at most: three visits carry a p99 (368)
BATCH_MOST, BATCH_S = (
    5000,
    2.0,
)  # where the user fixes the number of samples: a visit can be interrupted after it
CHEAP_S = 0.005  # samples that take no longer than this together are always taken
WARMUP_S = 0.005  # untimed calls before a batch take this long at most, but are never fewer than one


@dataclass(frozen=True)
class Limits:
    """When to stop. `samples` set: exactly so many for every cell, whatever their spread and the time."""

    budget_s: float
    width: float = 0.05  # of the interval of the median, relative to it
    min_samples: int = 10
    max_samples: int = 1500
    rounds: int = 5
    warmup: int = 10
    samples: int | None = None


@dataclass
class Cell:
    """The state of one cell: its samples so far, and what one of them costs."""

    calls: int = 1  # per sample
    samples_us: list[float] = field(default_factory=list)
    skews_us: list[float] = field(default_factory=list)
    call_s: float = 0.0  # 0: not known yet
    sample_s: float = 0.0
    rounds: int = 0
    done: bool = False
    converged: bool = False

    @property
    def interval(self) -> stats.Interval:
        return stats.median_interval(self.samples_us)


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
        self._pending = 0  # visits still to come in this round
        self.reserve_s = 0.0

    def left_s(self) -> float:
        """Seconds until the budget is used up, the reserve kept; not below zero."""
        return max(0.0, self._deadline - self._now() - self.reserve_s)

    def order(self) -> list[int]:
        """The unfinished cells in a fresh random order: the next round. Empty: nothing is left to do."""
        active = [index for index, cell in enumerate(self.cells) if not cell.done]
        self._random.shuffle(active)
        self._round += 1
        self._pending = len(active)
        return active

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
            wanted = min(math.ceil(limits.samples / limits.rounds), most)
            return Batch(warmup, min(wanted, limits.samples - len(cell.samples_us)), cell.calls)
        missing = stats.MIN_SAMPLES - len(cell.samples_us)
        cheap = min(BATCH, int(CHEAP_S / cell.sample_s))
        left = self.left_s()
        if left <= 0.0:
            return Batch(warmup, max(1, missing, cheap), cell.calls)
        active = sum(not c.done for c in self.cells)
        rounds_to_come = max(1, limits.rounds - self._round)  # later rounds take half of what is left each
        slot = left / max(1, self._pending + active * rounds_to_come)
        least = max(2, cheap, math.ceil(missing / max(1, limits.rounds - self._round + 1)))
        wanted = max(least, min(BATCH, int(slot / cell.sample_s)))
        return Batch(warmup, min(wanted, max(1, limits.max_samples - len(cell.samples_us))), cell.calls)

    def add(self, index: int, samples_us: Sequence[float], skews_us: Sequence[float], spent_s: float) -> bool:
        """Takes in a batch and the time that all of it took. True: the cell is finished."""
        cell, limits = self.cells[index], self.limits
        self._pending -= 1
        cell.samples_us.extend(samples_us)
        cell.skews_us.extend(skews_us)
        cell.rounds += 1
        cell.sample_s = max(spent_s / max(1, len(samples_us)), 1e-7)
        count = len(cell.samples_us)
        cell.converged = count >= stats.MIN_SAMPLES and cell.interval.width <= limits.width
        if limits.samples is not None:
            cell.done = count >= limits.samples
        else:
            enough = cell.rounds >= MIN_ROUNDS and count >= limits.min_samples and cell.converged
            out_of_time = count >= stats.MIN_SAMPLES and self.left_s() <= 0.0
            cell.done = enough or count >= limits.max_samples or out_of_time
        return cell.done

    def drop(self, index: int) -> None:
        """A cell that failed: never visited again."""
        self.cells[index].done = True
        self._pending -= 1

    def share_done(self) -> float:
        """0 to 1, for the progress bar: finished cells, and of the others the rounds that they have been
        through."""
        rounds = self.limits.rounds + 1
        done = sum(1.0 if cell.done else min(cell.rounds, self.limits.rounds) / rounds for cell in self.cells)
        return done / max(1, len(self.cells))

    def estimate_s(self) -> float:
        """Seconds until everything will be done. Within a budget: at most what is left of it, less where the
        unfinished cells need less for as many samples as they may have. For a fixed number of samples: at the
        pace so far."""
        if self.limits.samples is not None:
            share = self.share_done()
            return (self._now() - self._began) * (1.0 - share) / share if share > 0 else self.limits.budget_s
        wanted = self.limits.max_samples
        need = sum((wanted - len(c.samples_us)) * (c.sample_s or 0.01) for c in self.cells if not c.done)
        visits = sum(cell.rounds for cell in self.cells)
        untouched = sum(not cell.rounds and not cell.done for cell in self.cells)
        pace = (self._now() - self._began) / max(1, visits)  # every cell is visited, whatever the budget
        return max(min(need, self.left_s()), untouched * pace if visits else 0.0)
