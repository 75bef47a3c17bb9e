"""The timed loops: nothing in them but the clock, the alignment and the call.

Latency: every iteration starts behind the same alignment for all backends (see `align`), and is timed by each
rank on the host clock until its own call is complete. Throughput: one alignment, then a queue of calls back
to back, timed as a whole. A sample lasts from the first rank's start to the last one's end by
CLOCK_MONOTONIC, where that is one for all (see `device.one_clock`): ranks that share a core start far apart,
which each one's own time leaves out (S. Hunold and A. Carpen-Amarie, Reproducible MPI Benchmarking Is Still
Not as Easy as You Think, IEEE TPDS 27, 2016). Elsewhere it is the longest of the ranks' own times. It is
divided by the calls. The skew of a sample is the spread of the start times.
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
    """Start times and durations in ns of one rank's samples; shorter than asked where `error` says why. No
    start times where the clocks of the ranks are not one. `hung`: the GPU will not come back, so that nothing
    more can be measured."""

    starts: Nanoseconds
    durations: Nanoseconds
    error: str | None = None
    hung: bool = False


NOT_TIMED = Timed(np.zeros(0, np.int64), np.zeros(0, np.int64))


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def timed(call: Call, align: Call, samples: int, calls: int, warmup: int) -> Timed:
    """`warmup` untimed calls, then `samples` samples of `calls` calls each.

    Where the call raises, the remaining alignments are still made, so that no other rank waits for this one
    there; what `align` raises goes to the caller, behind what the call raised."""
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
        except Exception as raised:  # whatever a library raises is a failure of its cell, not of the bench
            if warm and starts[done] == 0:
                raise  # it was `align`
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
    """(samples, skews) in us from the times of one batch, of all ranks that have any."""
    ranks = [rank for rank in ranks if len(rank.durations)] or ranks
    count = min(len(rank.durations) for rank in ranks)
    durations = np.stack([rank.durations[:count] for rank in ranks])
    starts = np.stack([rank.starts[:count] for rank in ranks])
    if not starts.size:
        return (durations.max(axis=0) / (1e3 * calls)).tolist(), []
    first = starts.min(axis=0)
    whole = (starts + durations).max(axis=0) - first
    return (whole / (1e3 * calls)).tolist(), ((starts.max(axis=0) - first) / 1e3).tolist()
