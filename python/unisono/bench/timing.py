"""The timed loops, which hold only the clock, the alignment and the call.

Latency: every iteration starts behind the same alignment for all backends (see `align`). Each rank times it
by the host clock until its own call is complete. Throughput: one alignment, then a queue of calls back to
back, timed as a whole. A sample lasts from the first rank's start to the last rank's end by CLOCK_MONOTONIC,
if all ranks have the same (see `device.one_clock`). Ranks that share a core start far apart, which a rank's
own time leaves out (S. Hunold and A. Carpen-Amarie, Reproducible MPI Benchmarking Is Still Not as Easy as You
Think, IEEE TPDS 27, 2016). Without a common clock, a sample is the longest of the ranks' own times. A sample
is divided by its calls. The skew of a sample is the spread of the start times.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

Call = Callable[[], object]
Nanoseconds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Timed:
    """Start times and durations in ns of one rank's samples. Fewer than asked if there is an `error`.

    No start times without a common clock. `hung`: the GPU will not come back, so that nothing more can be
    measured."""

    starts: Nanoseconds
    durations: Nanoseconds
    error: str | None = None
    hung: bool = False


NOT_TIMED = Timed(np.zeros(0, np.int64), np.zeros(0, np.int64))


@contextmanager
def collector_off() -> Iterator[None]:
    """Turns the garbage collector off inside the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def timed(call: Call, align: Call, samples: int, calls: int, warmup: int) -> Timed:
    """Makes `warmup` untimed calls, then takes `samples` samples of `calls` calls each.

    If the call raises, the remaining alignments are still made, so that no other rank waits there. An error
    of `align` is raised, with the call's error before it."""
    starts, ends = [0] * samples, [0] * samples
    clock, done, warm, error = perf_counter_ns, 0, False, None
    with collector_off():
        try:
            for _ in repeat(None, warmup):
                call()
            warm = True
            if calls == 1:
                for done in range(samples):
                    align()
                    starts[done] = clock()
                    call()
                    ends[done] = clock()
            else:
                for done in range(samples):
                    align()
                    starts[done] = clock()
                    for _ in repeat(None, calls):
                        call()
                    ends[done] = clock()
            done = samples
        except Exception as raised:  # an error of a library fails the cell, not the bench
            if warm and starts[done] == 0:
                raise  # an error of `align`
            error = f"{type(raised).__name__}: {raised}"
    if error is not None:
        started = done + 1 if samples and starts[done] else done
        try:
            for _ in range(samples - started):
                align()
        except Exception as late:
            raise RuntimeError(f"{error}; then {late}") from late
    first = np.asarray(starts[:done], dtype=np.int64)
    return Timed(first, np.asarray(ends[:done], dtype=np.int64) - first, error)


def combine(ranks: list[Timed], calls: int) -> tuple[list[float], list[float]]:
    """Returns (samples, skews) in µs from the times of one batch, of all ranks that have any."""
    ranks = [rank for rank in ranks if len(rank.durations)] or ranks
    count = min(len(rank.durations) for rank in ranks)
    durations = np.stack([rank.durations[:count] for rank in ranks])
    starts = np.stack([rank.starts[:count] for rank in ranks])
    if not starts.size:
        return (durations.max(axis=0) / (1e3 * calls)).tolist(), []
    first = starts.min(axis=0)
    whole = (starts + durations).max(axis=0) - first
    return (whole / (1e3 * calls)).tolist(), ((starts.max(axis=0) - first) / 1e3).tolist()
