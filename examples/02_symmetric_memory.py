"""Symmetric memory: every rank reaches buffers of comm.empty, so that large calls on them are zero-copy.

unisono run -n 2 examples/02_symmetric_memory.py
"""

import unisono

with unisono.init() as comm:
    gradient = comm.empty((1024, 1024), "f32")  # collective: the same on every rank
    gradient[:] = comm.rank
    comm.all_reduce(gradient, op="avg", out=gradient)  # in place
    assert (gradient == (comm.size - 1) / 2).all()
    if comm.rank == 0:
        for size in (1 << 10, 16 << 10, 1 << 20):
            plain, symmetric = (comm.plan("all_reduce", size, symmetric=kind) for kind in (False, True))
            print(f"{size} bytes: plain buffers go by {plain}, symmetric ones by {symmetric}")
