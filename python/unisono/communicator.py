"""Makes communicators: finds the rank and the size, the bootstrap, the transport and the plan tables."""

from __future__ import annotations

import atexit
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import _core, launch
from . import bootstrap as bootstraps
from ._core import Communicator, Fabric, device_count, thread_bootstraps
from .errors import UsageError
from .tables import Tables

_DEFAULT_TIMEOUT_S = 30.0
_TRANSPORT = "UNISONO_TRANSPORT"
_open: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()  # by id


@atexit.register
def _close_all(process: int = os.getpid()) -> None:
    """Closes all communicators, so that the other ranks do not take this rank for dead. A forked child leaves
    them to its parent."""
    for communicator in list(_open.values()) if process == os.getpid() else []:
        communicator.close()


def with_id(number: int) -> Communicator:
    """Returns the communicator of this process whose id() that is."""
    return _open[number]


def init(
    rank: int | None = None,
    size: int | None = None,
    bootstrap: Any = None,
    timeout_s: float | None = None,
    check: bool | None = None,
    device: int | None = None,
    max_sms: int = 0,
    peer_access: bool = True,
    lane: str | Fabric | None = None,
) -> Communicator:
    """Returns the communicator of all ranks that were started together. Collective.

    Without arguments the environment tells rank and size: `unisono run`, torchrun, Open MPI, MPICH or another
    PMI launcher, a Slurm step, or a process alone (one rank). Ranks of a node share memory. Messages between
    nodes go by MPI if MPI has started the ranks, else by gloo; UNISONO_TRANSPORT names another transport.
    Arrays on GPUs go between nodes by NCCL.

    Args:
        rank: this rank's number, in place of the environment's. `bootstrap` must then be given, unless size
            is 1.
        size: the number of ranks; rank and size go together.
        bootstrap: an mpi4py communicator (of some of the ranks: `COMM_WORLD.Split(...)`), a torch.distributed
            Store, or an object with rank, size, all_gather(bytes) -> list[bytes] and close(). None: the
            launcher's own.
        timeout_s: deadline of every wait, in seconds; None: UNISONO_TIMEOUT_S, else 30.
        check: whether the ranks' calls are compared before anything moves. None: UNISONO_CHECK, else no.
            Without check, most differences are noticed only on the CPUs of one machine (see `Communicator`).
        device: CUDA ordinal of this rank's GPU, for calls on arrays there; all ranks give one, or none does.
        max_sms: the most SMs that a kernel may take; 0: UNISONO_MAX_SMS, else as many as pay, at most 128.
            The communicator's own GPU memory grows with max_sms: with 128 each GPU has 96 MiB for 2 ranks,
            192 MiB for 4, 256 MiB for 8.
        peer_access: False on any rank (or UNISONO_PEER_ACCESS=0): no GPU touches another's memory. Messages
            then go through pinned host memory, as they do if two of the GPUs cannot reach each other.
        lane: host (shared memory, and a transport between nodes), fabric (libfabric for all ranks), or a
            `Fabric` with a provider, channels and a policy. None: UNISONO_LANE, else host. The same on
            every rank.

    Raises:
        UsageError: the environment or the arguments are wrong or incomplete.
        TimeoutError: a rank did not come in time.
        ResourceError: memory cannot be shared.
    """
    if (rank is None) != (size is None):
        raise UsageError("rank and size go together: give both, or neither.")
    if rank is not None and size is not None:
        rank, size = _number("rank", rank), _number("size", size)
        world = launch.World(rank, size, rank, size, "explicit")
    else:
        world = launch.from_env(os.environ)
    if device is not None:
        device = _number("device", device)
    fabric = _fabric_of(lane)
    timeout_s = _deadline_s(timeout_s)
    meeting = bootstraps.make(world, bootstrap, timeout_s)
    carried = False  # whether messages between nodes go over the bootstrap

    def transport() -> Any:
        nonlocal carried
        made = _transport(meeting, timeout_s)
        carried = True
        return made

    try:
        tables = Tables.of_rank_0(meeting) if fabric is None else Tables()
        communicator = Communicator(
            meeting, timeout_s, check, device, max_sms, peer_access, fabric, transport
        )
        _open[id(communicator)] = communicator
        tables.load(communicator)
    finally:
        if meeting is not bootstrap and not carried:
            meeting.close()
    return communicator


def _transport(bootstrap: Any, timeout_s: float) -> Any:
    """Returns the transport that UNISONO_TRANSPORT names; unset: MPI if MPI has started the ranks, else gloo.
    Collective.

    Raises:
        UsageError, ResourceError: the transport cannot be used; the message says what to do.
    """
    from .bootstrap.mpi import MpiBootstrap

    over_mpi = isinstance(bootstrap, MpiBootstrap)
    name = os.environ.get(_TRANSPORT) or ("mpi" if over_mpi else "gloo")
    if name == "mpi" and not over_mpi:
        raise UsageError(
            f"{_TRANSPORT}=mpi needs ranks that MPI has started: use mpiexec or srun, or unset it."
        )
    if name == "mpi":
        return _core.mpi_transport(bootstrap)
    if name == "fabric":
        return _core.fabric_transport(bootstrap, timeout_s)
    if name == "gloo":
        from .gloo import GlooTransport

        return GlooTransport(bootstrap, timeout_s)
    raise UsageError(f"{_TRANSPORT}={name} is no transport: use mpi, gloo or fabric, or unset it.")


def _number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name}={value!r} is no whole number: give one.") from None


def _fabric_of(lane: str | Fabric | None) -> Fabric | None:
    if isinstance(lane, Fabric):
        return lane
    source = f"lane={lane!r}"
    if lane is None:
        lane = os.environ.get("UNISONO_LANE") or "host"
        source = f"UNISONO_LANE={lane}"
    if lane not in ("host", "fabric"):
        raise UsageError(f"{source} is unknown: use host, fabric or a unisono.Fabric.")
    return Fabric() if lane == "fabric" else None


def init_threads(
    n: int, timeout_s: float | None = None, check: bool | None = None, lane: str | Fabric | None = None
) -> list[Communicator]:
    """Returns `n` communicators, one for each of `n` threads of this process; element r is rank r's.

    Calls release the GIL. Every rank reaches every buffer, so that all large calls are zero-copy.

    Args:
        n: the number of ranks.
        timeout_s, check, lane: as in `init`.
    """
    return _of_threads([None] * _number("n", n), timeout_s, check, fabric=_fabric_of(lane))


class Communicators(list[Communicator]):
    """The communicators of the GPUs of one process; element r is rank r's, on the r-th device."""

    def empty(self, shape: Any, dtype: Any = "float32") -> list[Any]:
        """Returns `Communicator.empty` of every rank, in rank order."""
        return self.each(lambda communicator: communicator.empty(shape, dtype))

    def each(self, call: Callable[[Communicator], Any]) -> list[Any]:
        """Runs `call` for every communicator, each in a thread: `call` may wait for the other ranks.

        Returns:
            the result of each call, in rank order.
        """
        with ThreadPoolExecutor(len(self)) as pool:
            return list(pool.map(call, self))


def init_all(
    devices: Sequence[int] | None = None,
    timeout_s: float | None = None,
    check: bool | None = None,
    max_sms: int = 0,
    peer_access: bool = True,
) -> Communicators:
    """Returns a communicator for each of `devices`, in that order: one process drives several GPUs.

    One thread may drive them all, since calls on GPU arrays only enqueue. With check=True, which compares
    calls as they are made, each communicator needs a thread of its own. `Communicators.empty` makes symmetric
    memory of all ranks at once.

    Args:
        devices: CUDA ordinals; None: all that this process sees.
        timeout_s, check, max_sms, peer_access: as in `init`.
    """
    found = list(range(device_count())) if devices is None else list(devices)
    if not found:
        raise UsageError("there is no GPU: init_all() needs one that CUDA sees; init_threads() needs none.")
    return _of_threads(found, timeout_s, check, max_sms, peer_access)


def _of_threads(
    devices: Sequence[int | None],
    timeout_s: float | None,
    check: bool | None,
    max_sms: int = 0,
    peer_access: bool = True,
    fabric: Fabric | None = None,
) -> Communicators:
    timeout_s = _deadline_s(timeout_s)
    n = len(devices)
    meetings = thread_bootstraps(n, timeout_s)
    with ThreadPoolExecutor(max(n, 1)) as pool:
        communicators = Communicators(
            pool.map(
                lambda meeting, device: Communicator(
                    meeting, timeout_s, check, device, max_sms, peer_access, fabric
                ),
                meetings,
                devices,
            )
        )
    _open.update((id(communicator), communicator) for communicator in communicators)
    if fabric is None:
        tables = Tables.find()
        for communicator in communicators:
            tables.load(communicator)
    return communicators


def _deadline_s(timeout_s: float | None) -> float:
    if timeout_s is not None:
        return bootstraps.check_timeout(timeout_s)
    text = os.environ.get("UNISONO_TIMEOUT_S") or str(_DEFAULT_TIMEOUT_S)
    return bootstraps.check_timeout(text, "UNISONO_TIMEOUT_S")
