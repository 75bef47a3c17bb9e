"""The smallest program: every rank contributes, every rank gets the sum.

Start the program with any launcher, or alone:
    unisono run -n 4 examples/01_all_reduce.py
    mpirun -n 4 python examples/01_all_reduce.py
    torchrun --nproc-per-node 4 examples/01_all_reduce.py
"""

import numpy as np

import unisono

with unisono.init() as comm:
    mine = np.full(1000, comm.rank + 1, dtype=np.float32)
    total = comm.all_reduce(mine, op="sum")
    assert (total == comm.size * (comm.size + 1) / 2).all()
    if comm.rank == 0:
        print(f"{comm.size} ranks, the sum is {total[0]:g} everywhere")
