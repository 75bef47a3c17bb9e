"""A rank that makes one communicator after another."""

from __future__ import annotations

import os

import numpy as np

import unisono

total = 0.0
for _ in range(3):
    with unisono.init(timeout_s=60) as comm:
        total += float(comm.all_reduce(np.ones(1, np.float32))[0])
os.write(1, f"{comm.rank} {comm.size} {total}\n".encode())
