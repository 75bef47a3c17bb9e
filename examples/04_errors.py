"""Errors: one sentence, the same on every rank, and no rank hangs.

unisono run -n 2 examples/04_errors.py
"""

import numpy as np

import unisono

with unisono.init(check=True) as comm:
    try:
        comm.broadcast(np.zeros(10)[::2], root=0)
    except unisono.UsageError as error:  # wrong by itself: no data moved, and the communicator goes on
        first = str(error)
    comm.barrier()
    try:
        comm.all_reduce(np.zeros(4 + comm.rank, np.float32))
    except unisono.MismatchError as error:  # the ranks' calls differ: the communicator fails on every rank
        if comm.rank == 0:
            print(first, error, sep="\n")
