"""Measures, in the same run, how fast one rank alone and all ranks together copy memory.

`copy_one_thread`: rank 0 copies, the others sleep. `copy_all_threads`: every rank copies a buffer of its own,
all at once; bytes of all ranks over the time from the first begin to the last end. Both copy between buffers
well beyond the last-level cache with numpy's copyto (memcpy). Each byte counts once, though a copy reads and
writes it.

The ceiling of a case is copy_all_threads divided by the ranks that work: the rate of each rank when all copy.
% of the ceiling (SoL) is bus bandwidth over the ceiling. At 100 % a rank's bus bytes took as long as one
plain copy of them. More is possible if the data stays in the caches, or if a sum saves a pass over memory.

UNISONO_CEILING_BYTES, for tests, is the size of a buffer.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from unisono.bench import provenance
from unisono.bench.buffers import Bytes
from unisono.bench.control import Control
from unisono.bench.timing import Call, collector_off
from unisono.records import Case, Ceiling

SAMPLES = 7
LEAST_BYTES, MOST_BYTES = 32 << 20, 256 << 20
USUAL_CACHE = 32 << 20  # if the system does not say
CACHES = 4  # the buffers of all ranks together over the last-level cache


@dataclass(frozen=True)
class Ceilings:
    """One measurement. `per_rank_gbps` is the ceiling of a case on all ranks."""

    one_thread: Ceiling
    all_threads: Ceiling
    per_rank_gbps: float


def measure(control: Control, align: Call, one_clock: bool) -> Ceilings:
    """Measures for about a second. All ranks call it in step. Raises MemoryError if two buffers do not fit.
    `one_clock`: whether the ranks have one clock, see `timing`."""
    size = int(os.environ.get("UNISONO_CEILING_BYTES", "0")) or usual_bytes(control.size)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    np.copyto(target, source)
    alone: list[float] = []
    control.gather(0.0, float)
    if control.rank == 0:
        alone = [size / _longest([_copied(source, target)], True) for _ in range(SAMPLES)]
        control.gather(0.0, float)
    else:
        # Asleep while rank 0 copies at 1 GB/s or more, not spinning in the bootstrap.
        time.sleep(1e-9 * size * SAMPLES)
        control.gather(0.0, float)
    together: list[float] = []
    with collector_off():
        for _ in range(SAMPLES):
            align()
            times = control.gather(_copied(source, target), tuple[int, int])
            together.append(control.size * size / _longest(times, one_clock))
    total = float(np.median(together))
    return Ceilings(
        Ceiling(
            name="copy_one_thread", bytes=size, gbps=float(np.median(alone or [0.0])), samples_gbps=alone
        ),
        Ceiling(name="copy_all_threads", bytes=size * control.size, gbps=total, samples_gbps=together),
        total / control.size,
    )


def usual_bytes(ranks: int) -> int:
    """Returns the size of a buffer of each rank."""
    cache = max(provenance.caches().values(), default=USUAL_CACHE)
    return min(max(LEAST_BYTES, CACHES * cache // ranks), MOST_BYTES)


def of_case(case: Case, per_rank_gbps: float) -> float:
    """Returns the ceiling of a case in GB/s. On CPUs, the two ranks of a pair alone share the rate of all
    ranks. GPUs have links of their own."""
    alone = case.pair is not None and case.device == "cpu"
    return per_rank_gbps * case.ranks / 2 if alone else per_rank_gbps


def _copied(source: Bytes, target: Bytes) -> tuple[int, int]:
    """Copies. Returns the times of begin and end, in ns."""
    began = time.perf_counter_ns()
    np.copyto(target, source)
    return began, time.perf_counter_ns()


def _longest(times: list[tuple[int, int]], one_clock: bool) -> int:
    """Returns the ns that all copies took: from the first begin to the last end if the ranks have one clock,
    else the longest copy."""
    if one_clock:
        return max(1, max(ended for _, ended in times) - min(began for began, _ in times))
    return max(1, *(ended - began for began, ended in times))
