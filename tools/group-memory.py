#!/usr/bin/env python3
"""Measures what memory each of many communicators of the same ranks takes, by Comm.split.

  unisono run -n 2 python tools/group-memory.py --groups 32 --out FILE

Rank 0 appends a line: KiB a rank and group, after the groups have been made, after a sum of 8 bytes in each,
and after one of 1 MiB. taken: the memory of the groups' shared files, mapped or not. pss: what is mapped, of
all kinds, where a page of several processes counts by its share.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

import unisono

WARM = 4  # groups made before, whose memory is not counted


def memory_kib() -> np.ndarray:
    """Returns what this process's own shared files have taken, and what it has mapped."""
    files = (
        one.stat() for one in Path("/proc/self/fd").iterdir() if "memfd:unisono" in os.path.realpath(one)
    )
    rollup = Path("/proc/self/smaps_rollup").read_text()
    pss = rollup.partition("\nPss:")[2].split()[0]
    return np.array([sum(one.st_blocks for one in files) // 2, int(pss)], np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    whole = unisono.init()
    small, large = np.ones(2, np.float32), np.ones(1 << 18, np.float32)
    warm = [whole.split(0) for _ in range(WARM)]
    for comm in [whole, *warm]:
        for x in (small, large):
            comm.all_reduce(x, out=x.copy())

    groups: list[unisono.Communicator] = []
    found: dict[str, dict[str, float]] = {}

    def step(name: str, run: Callable[[], object]) -> None:
        run()
        whole.barrier()
        taken, pss = whole.all_reduce(memory_kib() - before) / (given.groups * whole.size)
        found[name] = {"taken_kib": round(taken, 1), "pss_kib": round(pss, 1)}

    def reduce_in_each(x: np.ndarray) -> None:
        out = x.copy()
        for comm in groups:
            comm.all_reduce(x, out=out)

    whole.barrier()
    before = memory_kib()
    step("made", lambda: groups.extend(whole.split(0) for _ in range(given.groups)))
    step("sum_of_8_bytes", lambda: reduce_in_each(small))
    step("sum_of_1_mib", lambda: reduce_in_each(large))
    line = json.dumps({"ranks": whole.size, "groups": given.groups, **found})
    if whole.rank != 0:
        return
    if given.out:
        with given.out.open("a") as out:
            out.write(line + "\n")
    print(line)


main()
