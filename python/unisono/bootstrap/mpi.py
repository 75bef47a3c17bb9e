"""The bootstrap over MPI, for runs started by mpirun, mpiexec or srun. Needs mpi4py."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

from ..clock import Clock
from ..errors import ResourceError, TimeoutError, UnisonoError, UsageError
from ..launch.detect import World
from .base import at_exit, check_payload, check_timeout
from .hub import FrameError, Header, Kind

__all__ = ["MpiBootstrap", "abandon", "from_launcher"]

_LAUNCHERS = {"openmpi": "mpirun (Open MPI)", "mpich": "mpiexec (PMI)", "slurm": "srun"}
_PAUSE_S = (2e-5, 1e-3)  # shortest and longest sleep between two looks at a pending request
_abandoned: list[object] = []  # requests and buffers that MPI may touch after a timeout, never freed


class MpiBootstrap:
    """All_gather over a copy of an mpi4py communicator. The copy keeps its messages from the caller's.

    Unisono finalizes MPI at exit if it was the first to load mpi4py, except after an uncaught exception or a
    timeout. MPI_Finalize would then wait for ranks that wait for this one; without it, the launcher ends
    those ranks. If the program imports mpi4py first, mpi4py finalizes as `mpi4py.rc` says.

    Args:
        comm: an mpi4py intracommunicator. Making the bootstrap is a collective call on it.
        timeout_s: how long one call waits for the last rank.
    """

    def __init__(self, comm: Any, timeout_s: float = 30.0) -> None:
        self._mpi: Any = sys.modules["mpi4py.MPI"]
        self._timeout_s = check_timeout(timeout_s)
        if comm == self._mpi.COMM_NULL or not isinstance(comm, self._mpi.Intracomm):
            raise UsageError(
                f"bootstrap= is a {type(comm).__name__} that has no group of ranks: give an intracommunicator"
            )
        if not self._mpi.Is_initialized() or self._mpi.Is_finalized():
            raise UsageError(
                "MPI is not running (not initialized, or finalized already): call init() between the two"
            )
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._sequence = 0
        self._closed = False
        self._failed = False
        self._comm = comm
        self._comm, request = self._call(comm.Idup)
        self._wait(request, "init()")

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Bootstrap.all_gather`. MPI does not say which rank is late, so a TimeoutError names none."""
        if self._closed:
            raise UsageError("this bootstrap is closed")
        data = check_payload(data)
        sequence, self._sequence = self._sequence, self._sequence + 1
        mine = Header(Kind.DATA, self.rank, 0, sequence, 0, len(data)).pack()
        heads = bytearray(len(mine) * self.size)
        byte = self._mpi.BYTE
        self._wait(
            self._call(self._comm.Iallgather, [mine, byte], [heads, byte]),
            f"all_gather {sequence}",
            mine,
            heads,
        )
        lengths = [self._length(rank, heads[len(mine) * rank :], sequence) for rank in range(self.size)]
        starts = [sum(lengths[:rank]) for rank in range(self.size)]
        whole = bytearray(sum(lengths))
        target = [whole, lengths, starts, byte]
        self._wait(
            self._call(self._comm.Iallgatherv, [data, byte], target), f"all_gather {sequence}", data, whole
        )
        return [bytes(whole[start : start + length]) for start, length in zip(starts, lengths, strict=True)]

    @property
    def communicator(self) -> Any:
        """Returns the copy of the communicator. The bootstrap sends no point-to-point message on it."""
        return self._comm

    def abandon(self) -> None:
        """Notes that messages may never end. The copy is then not freed nor MPI finalized, as both wait."""
        self._failed = True
        abandon()

    def close(self) -> None:
        """Frees the copy of the communicator. Idempotent."""
        if not self._closed and not self._failed and not self._mpi.Is_finalized():
            self._call(self._comm.Free)
        self._closed = True

    def _length(self, rank: int, head: bytearray, sequence: int) -> int:
        try:
            header = Header.unpack(head)
        except FrameError as error:
            raise UnisonoError(f"rank {rank} sent bytes that are no Unisono message: {error}") from error
        if (header.kind, header.rank, header.sequence) != (Kind.DATA, rank, sequence):
            raise UnisonoError(
                f"rank {rank} sent a message that does not fit: {header}, wanted all_gather {sequence}"
            )
        return header.length

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except self._mpi.Exception as error:
            self._failed = True
            raise ResourceError(f"MPI failed in the bootstrap: {error}") from error

    def _wait(self, request: Any, what: str, *buffers: object) -> None:
        """Waits for `request`, asleep between looks, since MPI's own wait has no deadline. Raises
        TimeoutError, which names `what`."""
        clock, pause = Clock(), _PAUSE_S[0]
        while not self._call(request.Test):
            if clock() >= self._timeout_s:
                self._failed = True
                abandon(request, buffers)
                raise TimeoutError(
                    f"rank {self.rank} waited {self._timeout_s:g} s in {what} of the MPI bootstrap: "
                    f"not all of the {self.size} ranks called it"
                )
            time.sleep(pause)
            pause = min(pause * 2, _PAUSE_S[1])


def abandon(*held: object) -> None:
    """Keeps requests that will not complete, and their buffers, for ever. MPI is then never finalized."""
    _abandoned.append(held)


def from_launcher(world: World, timeout_s: float) -> MpiBootstrap:
    """Returns the bootstrap over MPI.COMM_WORLD for a process that an MPI launcher or srun started.

    Raises:
        UsageError: mpi4py is missing, or belongs to another MPI than the launcher.
    """
    mpi = _import_mpi(world)
    comm = mpi.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    if (rank, size) != (world.rank, world.size):
        sees = f"it sees rank {rank} of {size}, and the run would be {world.size} separate copies"
        raise _other_mpi(world, mpi, sees)
    return MpiBootstrap(comm, timeout_s)


def _other_mpi(world: World, mpi: Any, finding: str) -> UsageError:
    library = mpi.Get_library_version().split("\n")[0].strip(" \0")
    pmi = "srun --mpi=pmi2 or --mpi=pmix, or " if world.launcher == "slurm" else ""
    return UsageError(
        f"{_LAUNCHERS[world.launcher]} started this process as rank {world.rank} of {world.size}, but "
        f"mpi4py's MPI ({library}) is not the launcher's: {finding}. Start it with {pmi}the mpiexec of that "
        "MPI (the mpich wheel puts one beside python), set MPI4PY_LIBMPI to the launcher's libmpi.so, or use "
        "`unisono run`."
    )


def _import_mpi(world: World) -> Any:
    """Imports mpi4py.MPI and initializes MPI, unless that has been done."""
    launcher = _LAUNCHERS[world.launcher]
    remedy = "pip install mpi4py, or start the program with `unisono run`"
    try:
        package = importlib.import_module("mpi4py")
        ours = "mpi4py.MPI" not in sys.modules
        if ours:
            package.rc.initialize = False  # MPI is initialized below, if it is the launcher's
            package.rc.finalize = False  # _finalize() below finalizes, except after an error
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
            why = f"mpi4py is not installed: {remedy}"
        else:
            what = " ".join(str(error).split())
            why = f"mpi4py cannot load MPI ({what}): pip install mpich, or start with `unisono run`"
        raise UsageError(f"this process was started by {launcher}, but {why}") from error
    if not mpi.Is_initialized():
        version = mpi.Get_library_version()
        if world.launcher == "openmpi" and version.startswith("MPICH") and "pmix" not in version:
            # its MPI_Init would abort, with words about PMI
            raise _other_mpi(world, mpi, f"it would abort, or run as {world.size} separate copies")
        mpi.Init_thread(getattr(mpi, f"THREAD_{package.rc.thread_level.upper()}"))
        ours = True
    if ours:
        at_exit.callback(_finalize, mpi, os.getpid())
    return mpi


def _finalize(mpi: Any, process: int) -> None:
    if process != os.getpid():
        return  # a forked child: the rank is its parent
    uncaught = hasattr(sys, "last_value") or hasattr(sys, "last_exc")
    if not (mpi.Is_finalized() or uncaught or _abandoned):
        mpi.Finalize()
