#!/usr/bin/env python3
"""Counts slow barriers of two ranks that have slept for different times, as programs with uneven work do.

  unisono run -n 2 python tools/after-sleep.py

Rank 0 says how many barriers took more than 30 us, in how many of these both ranks were on one core, and the
median time of the slow ones.
"""

from __future__ import annotations

import ctypes
import random
import time

import numpy as np

import unisono

ROUNDS, BARRIERS, SLOW_US = 400, 75, 30.0
NAPS_S = (0, 0.0002, 0.001, 0.003)


def main() -> None:
    core = ctypes.CDLL(None).sched_getcpu
    comm = unisono.init()
    naps = random.Random(comm.rank)
    took = np.zeros((ROUNDS, BARRIERS))
    cores = np.zeros((ROUNDS, BARRIERS), dtype=np.int32)
    for each in range(ROUNDS):
        time.sleep(naps.choice(NAPS_S))
        for call in range(BARRIERS):
            began = time.perf_counter()
            comm.barrier()
            took[each, call] = 1e6 * (time.perf_counter() - began)
            cores[each, call] = core()
    all_cores = np.zeros((comm.size, *cores.shape), dtype=np.int32)
    comm.all_gather(cores, all_cores)
    if comm.rank != 0:
        return
    slow = took[:, 1:] > SLOW_US  # the first barrier waits for who has slept longer
    together = (all_cores == all_cores[0]).all(axis=0)[:, 1:]
    median = f"{np.median(took[:, 1:][slow]):.0f} us" if slow.any() else "none"
    print(
        f"{slow.sum()} of {slow.size} barriers were slow, {(slow & together).sum()} of them on one core; "
        f"median of the slow ones: {median}"
    )


main()
