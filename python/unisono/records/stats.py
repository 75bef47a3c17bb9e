"""Order statistics for samples that are not normal: medians with exact intervals, quantiles, and verdicts.

The interval of a quantile is the pair of order statistics whose binomial ranks cover it with the wanted
confidence, whatever the distribution: J.-Y. Le Boudec, Performance Evaluation of Computer and Communication
Systems (EPFL Press 2010), section 2.2; T. Hoefler and R. Belli, Scientific Benchmarking of Parallel Computing
Systems (SC15), rules 5 to 8. It holds for samples that are independent. Those of one visit of the bench are
not: a machine has phases, of milliseconds to seconds, in which a copy takes twice its time. So the interval
of a cell also covers that of the medians of its visits, which lie apart in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
TOLERANCE = 0.02  # what differs by less is the same
MIN_SAMPLES = 6  # below it no pair of order statistics covers the median with 95 %
QUANTILES = (0.5, 0.95, 0.99)

Samples = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A median (or other quantile) and the interval that covers the true one; same unit as the samples.
    Not `sure`: of so few samples or visits that it covers it with less than the wanted confidence."""

    median: float
    low: float
    high: float
    sure: bool = True

    @property
    def width(self) -> float:
        """Width relative to the median, 0.05 is 5 %; infinite for a median of zero with a width."""
        if self.high == self.low:
            return 0.0
        return (self.high - self.low) / self.median if self.median > 0 else math.inf


class Verdict(StrEnum):
    """What two intervals of times say about the first; never forced."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNCLEAR = "UNCLEAR"


@lru_cache(maxsize=4096)
def ranks_of(count: int, quantile: float = 0.5) -> tuple[int, int] | None:
    """The 1-based ranks (low, high) of the order statistics that bound `quantile` of `count` samples, equal
    tails, each at most (1 - CONFIDENCE) / 2; None where so few samples carry no such interval (5 for a
    median, 367 for a p99)."""
    tail = (1.0 - CONFIDENCE) / 2.0
    under = np.arange(count)
    choices = np.cumsum(np.log(np.append(1.0, (count - under[:-1]) / (under[:-1] + 1))))  # log of binomials
    logs = choices + under * math.log(quantile) + (count - under) * math.log1p(-quantile)
    below = np.cumsum(np.exp(logs))  # below[i] = P(at most i samples under it)
    low = int(np.searchsorted(below, tail, side="right"))  # the most ranks that can be given up from below
    high = int(np.searchsorted(below, 1.0 - tail, side="left")) + 1
    return (low, high) if low >= 1 and high <= count else None


def quantile_interval(samples: Samples, quantile: float) -> Interval | None:
    """The quantile and its exact interval; None where the number of samples does not carry one."""
    ranks = ranks_of(len(samples), quantile)
    if ranks is None:
        return None
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return Interval(
        float(np.quantile(ordered, quantile)), float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1])
    )


def median_interval(samples: Samples) -> Interval:
    """The median and its exact interval. Below 6 samples the interval is minimum to maximum, and not sure.

    Raises ValueError without samples."""
    if len(samples) == 0:
        raise ValueError("a median needs at least one sample.")
    exact = quantile_interval(samples, 0.5)
    if exact is not None:
        return exact
    values = np.asarray(samples, dtype=np.float64)
    return Interval(float(np.median(values)), float(values.min()), float(values.max()), sure=False)


def visited_interval(samples: Samples, visits: Sequence[int]) -> Interval:
    """The median of samples that were taken in visits, so many in each: its interval is the wider of that of
    the samples and that of the visits' medians, and not sure below 6 visits. Raises ValueError without
    samples."""
    whole = median_interval(samples)
    parts = np.split(np.asarray(samples, dtype=np.float64), np.cumsum(visits)[:-1])
    between = median_interval([float(np.median(part)) for part in parts if len(part)])
    return Interval(
        whole.median, min(whole.low, between.low), max(whole.high, between.high), whole.sure and between.sure
    )


def quantiles(samples: Samples) -> dict[float, float | None]:
    """p50, p95 and p99, each only where its exact 95 % interval exists, else None: from 6, 72 and 368 samples
    on."""
    found = {q: quantile_interval(samples, q) for q in QUANTILES}
    return {q: None if interval is None else interval.median for q, interval in found.items()}


def variation(samples: Samples) -> float | None:
    """Coefficient of variation: sample standard deviation over mean; None below two samples or for a mean of
    zero."""
    values = np.asarray(samples, dtype=np.float64)
    if len(values) < 2 or float(values.mean()) == 0.0:
        return None
    return float(values.std(ddof=1) / values.mean())


def verdict(a: Interval, b: Interval, tolerance: float = TOLERANCE) -> Verdict:
    """Is `a` faster than `b`? Both are intervals of a time.

    FASTER or SLOWER: the intervals do not overlap and the medians differ by more than `tolerance`. SAME:
    everything in either interval lies within `tolerance` of everything in the other. Else UNCLEAR, as where
    either is not sure. verdict(b, a) is the mirror image.
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


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of positive ratios; NaN without any. (A mean of ratios is only meaningful as a geometric one: SC15,
    rule 4.)"""
    if not ratios:
        return math.nan
    return math.exp(math.fsum(math.log(r) for r in ratios) / len(ratios))
