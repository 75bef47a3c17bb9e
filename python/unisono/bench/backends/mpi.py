"""MPI through mpi4py: the buffer methods, on the MPI that the ranks were started under.

The thread level is funneled unless the user sets MPI4PY_RC_THREAD_LEVEL: only the main thread calls MPI here,
as in most MPI programs, and mpi4py's default (multiple) more than doubles the time of a small call in MPICH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.cases import DTYPES, Array
from unisono.bench.records import Case

THREAD_LEVEL = "funneled"
_NO_REDUCTION = frozenset({"f16", "bf16", "f8e4m3", "f8e5m2"})


def set_thread_level() -> None:
    """Asks for the funneled level; to be called before the first import of mpi4py.MPI, which initialises
    MPI."""
    if find_spec("mpi4py") and "mpi4py.MPI" not in sys.modules and "MPI4PY_RC_THREAD_LEVEL" not in os.environ:
        import mpi4py

        mpi4py.rc.thread_level = THREAD_LEVEL


class MpiBackend(Backend):
    """A duplicate of COMM_WORLD, so that the bench's own traffic stays apart."""

    name = "mpi"

    def __init__(self) -> None:
        self._comm: Any = None

    def available(self, ranks: int) -> str | None:
        if not find_spec("mpi4py"):
            return "mpi4py is not installed: pip install 'mpi4py' 'mpich'."
        set_thread_level()
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            return f"mpi4py finds no MPI library ({error}): pip install mpich, or load your MPI."
        size = MPI.COMM_WORLD.size if MPI.Is_initialized() else 1
        if size != ranks:
            return f"MPI sees {size} rank(s) of {ranks}: start the bench with mpiexec, or let --ranks do it."
        return None

    def version(self) -> str:
        from mpi4py import MPI

        levels = {
            MPI.THREAD_SINGLE: "single",
            MPI.THREAD_FUNNELED: "funneled",
            MPI.THREAD_SERIALIZED: "serialized",
        }
        vendor, numbers = MPI.get_vendor()
        level = levels.get(MPI.Query_thread(), "multiple") if MPI.Is_initialized() else "not started"
        return f"{vendor} {'.'.join(map(str, numbers))}, thread level {level}"

    def setup(self, ranks: Ranks) -> None:
        from mpi4py import MPI

        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (ranks.rank, ranks.size):
            raise RuntimeError("MPI numbers the ranks otherwise than the bootstrap.")
        self._comm = MPI.COMM_WORLD.Dup()
        self._types = {"f32": MPI.FLOAT, "f64": MPI.DOUBLE, "i8": MPI.INT8_T, "u8": MPI.UINT8_T}
        self._types |= {"i32": MPI.INT32_T, "i64": MPI.INT64_T}
        self._ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

    def supports(self, case: Case) -> str | None:
        if case.op == "avg":
            return "MPI has no average."
        if case.op is not None and case.dtype in _NO_REDUCTION:
            return f"MPI has no reduction of {case.dtype}."
        if case.collective == "reduce_scatter" and case.placement == "in_place":
            return "MPI's in-place reduce_scatter leaves the result in block 0, not in the rank's own."
        return None

    def _spec(self, array: Array, case: Case) -> list[Any]:
        """[memory, count, datatype]: with all three given, mpi4py has nothing to look up in a call."""
        from mpi4py import MPI

        memory = MPI.buffer.frombuffer(array.reshape(-1).view(np.uint8))
        if case.dtype in self._types:
            return [memory, array.size, self._types[case.dtype]]
        return [memory, array.nbytes, MPI.BYTE]  # moves only: supports() refuses their reductions

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        from mpi4py import MPI

        comm, n, rank, root = self._comm, self._comm.size, self._comm.rank, case.root
        x = None if buffers.x is None else self._spec(buffers.x, case)
        out = None if buffers.out is None else self._spec(buffers.out, case)
        here = case.placement == "in_place"
        op = self._ops.get(case.op or "")
        match case.collective:
            case "barrier":
                return partial(comm.Barrier)
            case "all_reduce":
                return partial(comm.Allreduce, MPI.IN_PLACE if here else x, out, op)
            case "reduce":
                return partial(comm.Reduce, MPI.IN_PLACE if here and rank == root else x, out, op, root)
            case "broadcast":
                return self._broadcast(case, buffers)
            case "all_gather":
                return partial(comm.Allgather, MPI.IN_PLACE if here else x, self._blocks(out, n))
            case "gather":
                in_place = here and rank == root
                return partial(comm.Gather, MPI.IN_PLACE if in_place else x, self._blocks(out, n), root)
            case "reduce_scatter":
                return partial(comm.Reduce_scatter_block, self._blocks(x, n), out, op)
            case "scatter":
                in_place = here and rank == root
                return partial(comm.Scatter, self._blocks(x, n), MPI.IN_PLACE if in_place else out, root)
            case "all_to_all":
                return partial(
                    comm.Alltoall, MPI.IN_PLACE if here else self._blocks(x, n), self._blocks(out, n)
                )
            case "all_to_all_v":
                assert x is not None and out is not None
                scale = 1 if case.dtype in self._types else DTYPES[case.dtype].itemsize
                send = [x[0], [c * scale for c in buffers.send_counts], x[2]]
                recv = [out[0], [c * scale for c in buffers.recv_counts], out[2]]
                return partial(comm.Alltoallv, send, recv)
            case "send_recv":
                return partial(comm.Sendrecv, x, (rank + 1) % n, 0, out, (rank - 1) % n, 0)
            case _:
                raise ValueError(f"the mpi backend has no {case.collective}.")

    @staticmethod
    def _blocks(spec: list[Any] | None, n: int) -> list[Any] | None:
        return None if spec is None else [spec[0], spec[1] // n, spec[2]]

    def _broadcast(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        assert buffers.x is not None and buffers.out is not None
        if case.placement == "in_place" or self._comm.rank != case.root:
            return partial(self._comm.Bcast, self._spec(buffers.out, case), case.root)
        source, out, spec = buffers.x, buffers.out, self._spec(buffers.x, case)

        def call() -> (
            None
        ):  # MPI's broadcast has one buffer: the root's own copy is part of an out-of-place call
            self._comm.Bcast(spec, case.root)
            np.copyto(out, source)

        return call

    def close(self) -> None:
        if self._comm is not None:
            self._comm.Free()
            self._comm = None
