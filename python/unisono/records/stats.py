"""Order statistics for samples that are not normal: medians with exact intervals, quantiles, and verdicts.

The interval of a quantile is the pair of order statistics whose binomial ranks cover the quantile with the
wanted confidence, for any distribution: J.-Y. Le Boudec, Performance Evaluation of Computer and Communication
Systems (EPFL Press 2010), section 2.2; T. Hoefler and R. Belli, Scientific Benchmarking of Parallel Computing
Systems (SC15), rules 5 to 8. The interval holds for independent samples. Samples of one visit of the bench
depend on each other: a machine has phases, of milliseconds to seconds, in which a copy takes twice its time.
The interval of a cell therefore also covers that of its visits' medians, which lie apart in time. How a
process lies in memory and on its cores differs from launch to launch, whatever the number of samples: S.
Hunold and A. Carpen-Amarie, Reproducible MPI Benchmarking Is Still Not as Easy as You Think (TPDS 2016).
Several launches have an interval of their own therefore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
TOLERANCE = 0.02  # times that differ by a smaller share are the same
MIN_SAMPLES = 6  # or visits, or launches: of fewer, no pair of order statistics covers the median with 95 %
QUANTILES = (0.5, 0.95, 0.99)

Samples = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A median (or other quantile), and the interval that covers the true value; in the unit of the samples.
    `sure` is False if there are too few samples or visits for the wanted confidence."""

    median: float
    low: float
    high: float
    sure: bool = True

    @property
    def width(self) -> float:
        """Returns the width relative to the median, 0.05 is 5 %; infinite for a median of 0 with a width."""
        if self.high == self.low:
            return 0.0
        return (self.high - self.low) / self.median if self.median > 0 else math.inf


class Verdict(StrEnum):
    """The result of comparing two intervals of times: how the first one is. See `verdict`."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNCLEAR = "UNCLEAR"


@lru_cache(maxsize=4096)
def ranks_of(count: int, quantile: float = 0.5) -> tuple[int, int] | None:
    """Returns the 1-based ranks (low, high) of the order statistics that bound `quantile` of `count` samples.

    Each tail is at most (1 - CONFIDENCE) / 2. None: too few samples (at most 5 for a median, 367 for a p99).
    """
    tail = (1.0 - CONFIDENCE) / 2.0
    under = np.arange(count)
    choices = np.cumsum(np.log(np.append(1.0, (count - under[:-1]) / (under[:-1] + 1))))  # log of binomials
    logs = choices + under * math.log(quantile) + (count - under) * math.log1p(-quantile)
    below = np.cumsum(np.exp(logs))  # below[i] = P(at most i samples under it)
    low = int(np.searchsorted(below, tail, side="right"))  # the most ranks that may be left out from below
    high = int(np.searchsorted(below, 1.0 - tail, side="left")) + 1
    return (low, high) if low >= 1 and high <= count else None


def quantile_interval(samples: Samples, quantile: float) -> Interval | None:
    """Returns the quantile and its exact interval, or None if there are too few samples for one."""
    ranks = ranks_of(len(samples), quantile)
    if ranks is None:
        return None
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return Interval(
        float(np.quantile(ordered, quantile)), float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1])
    )


def median_interval(samples: Samples) -> Interval:
    """Returns the median and its exact interval. Below 6 samples: minimum to maximum, and not sure.

    Raises ValueError without samples."""
    if len(samples) == 0:
        raise ValueError("a median needs at least one sample.")
    exact = quantile_interval(samples, 0.5)
    if exact is not None:
        return exact
    values = np.asarray(samples, dtype=np.float64)
    return Interval(float(np.median(values)), float(values.min()), float(values.max()), sure=False)


def _parts(samples: Samples, visits: Sequence[int]) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Returns the samples of each visit."""
    return np.split(np.asarray(samples, dtype=np.float64), np.cumsum(visits)[:-1])


def visited_interval(samples: Samples, visits: Sequence[int]) -> Interval:
    """Returns the median of samples taken in visits, and its interval; `visits`: the samples of each visit.

    The interval covers both that of the samples and that of the visits' medians. Below 6 visits it is not
    sure. Raises ValueError without samples."""
    whole = median_interval(samples)
    between = median_interval([float(np.median(part)) for part in _parts(samples, visits) if len(part)])
    return Interval(
        whole.median, min(whole.low, between.low), max(whole.high, between.high), whole.sure and between.sure
    )


def medians(samples: Samples, visits: Sequence[int], launches: Sequence[int]) -> dict[int, float]:
    """Returns the median of each launch by its number; `launches`: the launch of each visit."""
    of_sample = np.repeat(np.asarray(launches), np.asarray(visits))
    values = np.asarray(samples, dtype=np.float64)
    return {number: float(np.median(values[of_sample == number])) for number in dict.fromkeys(launches)}


def visit_medians(samples: Samples, visits: Sequence[int], launches: Sequence[int]) -> dict[int, list[float]]:
    """Returns the median of each visit of a launch, in their order, by the launch's number."""
    found: dict[int, list[float]] = {number: [] for number in dict.fromkeys(launches)}
    for part, launch in zip(_parts(samples, visits), launches, strict=True):
        if len(part):
            found[launch].append(float(np.median(part)))
    return found


def ratios(above: Mapping[int, Sequence[float]], below: Mapping[int, Sequence[float]]) -> Interval | None:
    """Returns the median of the launches' ratios, and its interval. None: the two have no launch in common.

    A launch's ratio is the median over its rounds, in each of which the two were visited one right after the
    other: what one round does to both is not in it. above, below: `visit_medians`."""
    found = [
        float(np.median([time / other for time, other in zip(times, below[launch], strict=False)]))
        for launch, times in above.items()
        if times and below.get(launch)
    ]
    return median_interval(found) if found else None


def launched_interval(samples: Samples, visits: Sequence[int], launches: Sequence[int]) -> Interval:
    """Returns the median of the launches' medians, and its interval; `launches`: the launch of each visit.

    The unit is the launch: samples of one share what chance has given it. From 6 launches on, the interval is
    that of their medians. Below, it covers them and `visited_interval`, and is as sure as that."""
    visited = visited_interval(samples, visits)
    between = median_interval(list(medians(samples, visits, launches).values()))
    if between.sure:
        return between
    low, high = min(visited.low, between.low), max(visited.high, between.high)
    return Interval(between.median, low, high, visited.sure)


def quantiles(samples: Samples) -> dict[float, float | None]:
    """Returns p50, p95 and p99. None: below 6, 72 and 368 samples there is no exact 95 % interval."""
    found = {q: quantile_interval(samples, q) for q in QUANTILES}
    return {q: None if interval is None else interval.median for q, interval in found.items()}


def variation(samples: Samples) -> float | None:
    """Returns the coefficient of variation: sample standard deviation over mean. None: fewer than two
    samples, or a mean of zero."""
    values = np.asarray(samples, dtype=np.float64)
    if len(values) < 2 or float(values.mean()) == 0.0:
        return None
    return float(values.std(ddof=1) / values.mean())


def verdict(a: Interval, b: Interval, tolerance: float = TOLERANCE) -> Verdict:
    """Returns whether `a` is faster than `b`, both intervals of a time.

    FASTER or SLOWER: the intervals do not overlap, and the medians differ by more than `tolerance`. SAME: all
    values of either interval lie within `tolerance` of all values of the other. UNCLEAR: anything else, and
    if either interval is not sure. verdict(b, a) is the mirror image.
    """
    if not (a.sure and b.sure):
        return Verdict.UNCLEAR
    if a.high < b.low and a.median * (1.0 + tolerance) < b.median:
        return Verdict.FASTER
    if b.high < a.low and b.median * (1.0 + tolerance) < a.median:
        return Verdict.SLOWER
    if max(a.high, b.high) <= min(a.low, b.low) * (1.0 + tolerance):
        return Verdict.SAME
    return Verdict.UNCLEAR


def verdict_on_ratios(found: Interval, tolerance: float) -> Verdict:
    """Returns whether B is faster than A; `found`: A's time over B's, of launches that both ran in.

    FASTER: the whole interval lies above 1 by more than `tolerance`. SLOWER is the mirror image. SAME: the
    interval lies within `tolerance` of 1. UNCLEAR: anything else. Stricter than `verdict`, since equal builds
    may differ by 1 to 2 % over the launches of a run (docs/notes/bench.md)."""
    most = 1.0 + tolerance
    if not found.sure:
        return Verdict.UNCLEAR
    if found.low > most:
        return Verdict.FASTER
    if found.high < 1.0 / most:
        return Verdict.SLOWER
    return Verdict.SAME if found.low >= 1.0 / most and found.high <= most else Verdict.UNCLEAR


def geometric_mean(ratios: Sequence[float]) -> float:
    """Returns the geometric mean of positive ratios, NaN without any. Any other mean of ratios has no meaning
    (SC15, rule 4)."""
    if not ratios:
        return math.nan
    return math.exp(math.fsum(math.log(r) for r in ratios) / len(ratios))
