"""Inside an MPI program: Unisono joins the ranks of an mpi4py communicator, and works beside MPI.

mpirun -n 2 python examples/05_mpi_program.py
"""

import numpy as np
from mpi4py import MPI

import unisono

world = MPI.COMM_WORLD
with unisono.init(bootstrap=world) as comm:
    x = np.random.default_rng(world.rank).standard_normal(10_000)
    ours, theirs = comm.all_reduce(x), np.empty_like(x)
    world.Allreduce(x, theirs)
    assert np.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    if world.rank == 0:
        print("the same sum as MPI's, with bits that do not depend on the algorithm")
