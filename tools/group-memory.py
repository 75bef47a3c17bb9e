#!/usr/bin/env python3
"""Measures what memory and time each of many communicators of the same ranks takes, by Comm.split.

  unisono run -n 2 python tools/group-memory.py --groups 32 --out FILE

Rank 0 appends a line: KiB a rank and group, after the groups have been made, after a sum of 8 bytes in each,
and after one of 1 MiB. taken: the memory of the groups' shared files, mapped or not. pss: what is mapped, of
all kinds, where a page of several processes counts by its share. With --times instead: the medians over the
groups, in microseconds, of making a group, and of sums in it in turn, each after a barrier of all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import unisono

WARM = 4  # groups made before, whose memory is not counted
SMALL, LARGE = np.ones(2, np.float32), np.ones(1 << 18, np.float32)


def memory_kib() -> np.ndarray:
    """Returns what this process's own shared files have taken, and what it has mapped."""
    files = (
        one.stat() for one in Path("/proc/self/fd").iterdir() if "memfd:unisono" in os.path.realpath(one)
    )
    rollup = Path("/proc/self/smaps_rollup").read_text()
    pss = rollup.partition("\nPss:")[2].split()[0]
    return np.array([sum(one.st_blocks for one in files) // 2, int(pss)], np.int64)


def times_us(whole: unisono.Communicator, groups: int) -> dict[str, float]:
    """Returns the median times of making a group, and of a sum of 8 bytes and of 256 KiB: the first, and each
    of those that follow it."""
    found: dict[str, list[float]] = {}
    made: list[unisono.Communicator] = []  # they live until all have been made

    def timed(name: str, run: Callable[[], object], times: int = 1) -> None:
        whole.barrier()
        began = time.perf_counter()
        for _ in range(times):
            run()
        found.setdefault(name, []).append(1e6 * (time.perf_counter() - began) / times)

    for _ in range(groups):
        timed("made", lambda: made.append(whole.split(0)))
        for size, x in (("8_bytes", SMALL), ("256_kib", LARGE[: 1 << 16])):
            call = partial(made[-1].all_reduce, x, out=x.copy())
            timed(f"{size}_first", call)
            for times in (1, 9, 30):
                timed(f"{size}_next_{times}", call, times)
    return {name: round(statistics.median(times), 1) for name, times in found.items()}


def memory(whole: unisono.Communicator, count: int) -> dict[str, dict[str, float]]:
    """Returns the KiB a rank and group that are taken and mapped after each step."""
    groups: list[unisono.Communicator] = []
    found: dict[str, dict[str, float]] = {}

    def step(name: str, run: Callable[[], object]) -> None:
        run()
        whole.barrier()
        taken, pss = whole.all_reduce(memory_kib() - before) / (count * whole.size)
        found[name] = {"taken_kib": round(taken, 1), "pss_kib": round(pss, 1)}

    def reduce_in_each(x: np.ndarray) -> None:
        out = x.copy()
        for comm in groups:
            comm.all_reduce(x, out=out)

    whole.barrier()
    before = memory_kib()
    step("made", lambda: groups.extend(whole.split(0) for _ in range(count)))
    step("sum_of_8_bytes", lambda: reduce_in_each(SMALL))
    step("sum_of_1_mib", lambda: reduce_in_each(LARGE))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    whole = unisono.init()
    warm = [whole.split(0) for _ in range(WARM)]
    for comm in [whole, *warm]:
        for x in (SMALL, LARGE):
            comm.all_reduce(x, out=x.copy())

    found = {"us": times_us(whole, given.groups)} if given.times else memory(whole, given.groups)
    line = json.dumps({"ranks": whole.size, "groups": given.groups, **found})
    if whole.rank != 0:
        return
    if given.out:
        with given.out.open("a") as out:
            out.write(line + "\n")
    print(line)


main()
