"""MPI, by the buffer methods of mpi4py, on the MPI that started the ranks.

The thread level is funneled unless the user sets MPI4PY_RC_THREAD_LEVEL. Only the main thread calls MPI here,
as in most MPI programs. mpi4py's default (multiple) more than doubles the time of a small call in MPICH.

On GPUs, an MPI that says it is CUDA-aware gets the device buffers. Any other is staged: the call copies the
input to pinned host memory, MPI works there, and the call copies the output back. Either way the call waits
for the GPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from unisono.bench import mpis, pairs
from unisono.bench.backends import norms, sends
from unisono.bench.backends.base import Backend, Buffers, Ranks, moe_call
from unisono.bench.backends.mpi_moe import MpiMoe
from unisono.bench.backends.permutation import Scratch
from unisono.records import Case, vocabulary
from unisono.records.vocabulary import DTYPES

THREAD_LEVEL = "funneled"
NO_LOCAL = "MPIR_CVAR_NOLOCAL"
MOST_STAGED = 256 << 20
_NO_REDUCTION = frozenset({"f16", "bf16", "f8e4m3", "f8e5m2"})


def set_thread_level() -> None:
    """Asks mpi4py for the funneled level. Must come before the first import of mpi4py.MPI, which initialises
    MPI."""
    if find_spec("mpi4py") and "mpi4py.MPI" not in sys.modules and "MPI4PY_RC_THREAD_LEVEL" not in os.environ:
        import mpi4py

        mpi4py.rc.thread_level = THREAD_LEVEL


def cuda_aware(library: str) -> bool:
    """Returns whether the MPI below mpi4py's module `library` says that it takes device memory
    (MPIX_Query_cuda_support of Open MPI and others)."""
    try:
        return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False


class MpiBackend(Backend):
    """Calls on a duplicate of COMM_WORLD, apart from the bench's own messages."""

    name = "mpi"
    devices = ("cpu", "cuda")
    point_to_point = moe = norm = True

    def __init__(self) -> None:
        self._comm: Any = None
        self._on_gpu = self._staged = False
        self._scratch = Scratch()  # of mixture of experts

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
        vendor = MPI.get_vendor()[0]
        if vendor != mpis.NAMES.get(self.name, vendor):
            return f"these ranks run {vendor}: `unisono bench --mpi {self.name}` starts others."
        if len(files := mpis.loaded()) > 1:
            return f"{' and '.join(files)} in one process define the same functions: load one MPI only."
        if vendor == "Open MPI" and NO_LOCAL in os.environ:  # as --fabric sets it
            return f"{NO_LOCAL} keeps MPICH off shared memory, not {vendor}: install mpich, or unset it."
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
        how = ""
        if self._on_gpu:
            how = ", staged through pinned host memory" if self._staged else ", CUDA-aware"
        return f"{vendor} {'.'.join(map(str, numbers))}, thread level {level}{how}"

    def setup(self, ranks: Ranks) -> None:
        from mpi4py import MPI

        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (ranks.rank, ranks.size):
            raise RuntimeError("MPI numbers the ranks otherwise than the bootstrap.")
        self._on_gpu = ranks.device is not None
        self._staged = self._on_gpu and not cuda_aware(MPI.__file__)
        self._comm = MPI.COMM_WORLD.Dup()
        self._types = {"f32": MPI.FLOAT, "f64": MPI.DOUBLE, "i8": MPI.INT8_T, "u8": MPI.UINT8_T}
        self._types |= {"i32": MPI.INT32_T, "i64": MPI.INT64_T}
        self._ops = {op: getattr(MPI, op.upper()) for op in vocabulary.OPS if op != "avg"}

    def supports(self, case: Case) -> str | None:
        if case.device == "cuda" and self._staged and case.bytes > MOST_STAGED:
            return f"staged through host memory it is measured to {MOST_STAGED >> 20} MiB."
        if case.moe is not None and case.device == "cuda":
            return "numpy permutes its rows, in the host's memory only."
        if case.op == "avg":
            return "MPI has no average."
        if case.norm is not None and case.norm.quant != vocabulary.QUANTS[0]:
            return "numpy has no 8-bit floats."
        if (case.op is not None or case.norm is not None) and case.dtype in _NO_REDUCTION:
            return f"MPI has no reduction of {case.dtype}."
        if case.collective == "reduce_scatter" and case.placement == "in_place":
            return "MPI's in-place reduce_scatter leaves the result in block 0, not in the rank's own."
        return None

    def queues(self) -> bool:
        return False

    def _spec(self, array: Any, case: Case) -> list[Any]:
        """Returns [memory, count, datatype], with which mpi4py has nothing to look up in a call."""
        from mpi4py import MPI

        if isinstance(array, np.ndarray):
            memory = MPI.buffer.frombuffer(array.reshape(-1).view(np.uint8))
        else:
            memory = MPI.buffer.fromaddress(array.data_ptr(), array.nbytes)
        if case.dtype in self._types:
            return [memory, array.nbytes // DTYPES[case.dtype].itemsize, self._types[case.dtype]]
        return [memory, array.nbytes, MPI.BYTE]  # only moved: supports() refuses reductions of these

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.moe is not None:
            return moe_call(case, MpiMoe(self._comm, case, buffers, self._scratch))
        if case.norm is not None:
            return norms.by_numpy(case, buffers, self._all_reduce)
        bind = self._pingpong if case.collective == vocabulary.PINGPONG else self._bound
        if case.streams:
            bind = self._all_to_all
        if not self._staged or case.collective == "barrier":
            return bind(case, buffers)
        from unisono.bench.cuda.staging import staged

        return staged(case, self._comm.rank, buffers, bind)

    def _all_reduce(self, case: Case, x: Any, out: Any) -> Callable[[], object]:
        """Returns MPI's sum of x into out."""
        return partial(self._comm.Allreduce, self._spec(x, case), self._spec(out, case), self._ops["sum"])

    def _bound(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Returns MPI's own call on these buffers."""
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

    def _pingpong(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        comm, peer = self._comm, pairs.peer_of(case, self._comm.rank)
        x = None if buffers.x is None else self._spec(buffers.x, case)
        out = None if buffers.out is None else self._spec(buffers.out, case)
        verbs = {
            "send": partial(comm.Send, x, peer, 0),
            "recv": partial(comm.Recv, out, peer, 0),
            "exchange": partial(comm.Sendrecv, x, peer, 0, out, peer, 0),
        }
        return sends.pingpong(case, comm.rank, verbs.__getitem__)

    def _all_to_all(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """Returns a call: Irecv and Isend of every block, the own one included, then Waitall."""
        from mpi4py import MPI

        comm, n = self._comm, self._comm.size
        order = [(comm.rank, comm.rank), *sends.steps(comm.rank, n)]
        takes = [(self._spec(buffers.out[source], case), source) for _, source in order]
        gives = [(self._spec(buffers.x[to], case), to) for to, _ in order]
        irecv, isend, wait = comm.Irecv, comm.Isend, MPI.Request.Waitall

        def call() -> None:
            wait(
                [irecv(spec, source, 0) for spec, source in takes]
                + [isend(spec, to, 0) for spec, to in gives]
            )

        return call

    def _broadcast(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        assert buffers.x is not None and buffers.out is not None
        if case.placement == "in_place" or self._comm.rank != case.root:
            return partial(self._comm.Bcast, self._spec(buffers.out, case), case.root)
        source, out, spec = buffers.x, buffers.out, self._spec(buffers.x, case)

        # MPI's broadcast has one buffer. Out of place, the root's own copy is therefore part of the call.
        def call() -> None:
            self._comm.Bcast(spec, case.root)
            out[...] = source

        return call

    def staged(self) -> bool:
        return self._staged

    def close(self) -> None:
        if self._comm is not None:
            self._comm.Free()
            self._comm = None


class MpichBackend(MpiBackend):
    """MPI, if MPICH has started the ranks (`--mpi mpich`)."""

    name = "mpich"
    asked_for = True


class IntelMpiBackend(MpiBackend):
    """MPI, if Intel MPI has started the ranks."""

    name = "impi"
    asked_for = True


class OpenMpiBackend(MpiBackend):
    """MPI, if Open MPI has started the ranks."""

    name = "openmpi"
    asked_for = True
