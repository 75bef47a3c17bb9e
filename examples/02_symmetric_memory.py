"""Buffers from comm.empty are within every rank's reach: large calls on them copy nothing on the way.

unisono run -n 2 examples/02_symmetric_memory.py
"""

import unisono

with unisono.init() as comm:
    gradient = comm.empty((1024, 1024), "f32")  # collective: the same on every rank
    gradient[:] = comm.rank
    comm.all_reduce(gradient, op="avg", out=gradient)  # in place
    assert (gradient == (comm.size - 1) / 2).all()
    if comm.rank == 0:
        plain = comm.plan("all_reduce", gradient.nbytes)
        symmetric = comm.plan("all_reduce", gradient.nbytes, symmetric=True)
        print(f"plain buffers would go by {plain}, these by {symmetric}")
