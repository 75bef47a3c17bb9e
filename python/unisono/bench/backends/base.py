"""What a backend is: one small class, found by the entry point group `unisono.bench_backends`.

A backend of your own subclasses `Backend`, names itself, and turns a case and its buffers into a callable:

    class Mine(Backend):
        name = "mine"
        def setup(self, ranks): self.comm = mylib.init(ranks.rank, ranks.size, ranks.all_gather)
        def supports(self, case):
            return None if case.collective == "all_reduce" else "mine has all_reduce only"
        def prepare(self, case, buffers):
            return partial(self.comm.all_reduce, buffers.x, buffers.out, case.op)

and is declared in its package's pyproject.toml:

    [project.entry-points."unisono.bench_backends"]
    mine = "mypackage.bench:Mine"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

from unisono.bench.cases import CaseError
from unisono.records import Case

GROUP = "unisono.bench_backends"
BUILT_IN = {  # those for GPUs last
    "unisono": "unisono.bench.backends.unisono:UnisonoBackend",
    "mpi": "unisono.bench.backends.mpi:MpiBackend",
    "gloo": "unisono.bench.backends.gloo:GlooBackend",
    "fabric": "unisono.bench.backends.fabric:FabricBackend",
    "nccl": "unisono.bench.backends.nccl:NcclBackend",
    "nccl-windows": "unisono.bench.backends.nccl:NcclWindowsBackend",
    "torch-symm": "unisono.bench.backends.torch_symm:TorchSymmBackend",
}


@dataclass(frozen=True)
class Ranks:
    """Who takes part. `all_gather` exchanges bytes between all ranks, for a backend's own bootstrap; in
    `setup` and `allocate` it raises where another rank has failed there.
    `communicator` is the bench's unisono communicator, which also owns the symmetric buffers. On GPUs,
    `device` is this rank's, and every call of a backend is to be queued on `stream`, a CUDA stream as an
    integer; both are current in torch."""

    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]
    communicator: Any
    device: int | None = None
    stream: int = 0

    def close(self) -> None:
        """What unisono.init asks of a bootstrap: the bench's outlives the backends."""


@dataclass(frozen=True)
class Buffers:
    """One rank's buffers for a case, the same memory for every backend; contiguous, shapes as `cases.layout`
    says. Numpy arrays, on GPUs torch tensors.

    In place follows MPI: all_reduce, broadcast, reduce and all_to_all have `out is x`; all_gather and gather
    have `x` in `out[rank]`; reduce_scatter and scatter have `out` in `x[rank]` (gather and scatter at the
    root only). None: this rank has no such buffer. `spare` is scratch of the shape of `x` where a reduce has
    no `out`, for a library that would overwrite its input there. `x_place` and `out_place` are `x` and `out`,
    and on ranks that have none the root's place in their own memory, for a library that asks every rank of a
    rooted call for it."""

    x: Any
    out: Any
    spare: Any = None
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    x_place: Any = None
    out_place: Any = None


class Backend(Protocol):
    """A library under test. Subclass it explicitly to inherit the defaults. Every method is called on all
    ranks alike."""

    name: str
    # True: float sums are combined in rank order and must match the reference bit by bit
    bit_exact: bool = False
    wire: str | None = None  # a name of cases.WIRES: it quantises, and is held to that bound
    devices: tuple[str, ...] = ("cpu",)  # where the buffers may lie
    threads: bool = False  # True: ranks may be threads of one process
    own_memory: bool = False  # True: symmetric cases lie in memory that `allocate` makes
    memory: str | None = None  # where that lies: host, pinned or device; None: as all buffers of the run
    variants: tuple[str, ...] = ()  # what the name alone stands for, as `name:variant` each

    point_to_point: bool = False  # True: it offers ping-pongs, and all_to_all built of sends and receives
    asked_for: bool = False  # True: measured only where it is named

    own_threads: bool = False  # True: the library works in threads of its own, which need a core too

    def available(self, ranks: int) -> str | None:
        """None where the library can serve `ranks` processes started as they were, else the reason in one
        sentence."""
        return None

    def version(self) -> str:
        """Version of the library for the report's provenance; called where `available` gave None."""
        return ""

    def setup(self, ranks: Ranks) -> None:
        """Creates the communicator. May communicate; raises where it cannot, and the backend is then
        skipped, by `abort` and `close` on the ranks where it could and on those where it could not."""

    def supports(self, case: Case) -> str | None:
        """None where this library offers the case, else the reason; the same answer on every rank."""
        return None

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """A callable that performs the collective once, to completion on this rank (on GPUs it may only queue
        it, see `queues`); everything bound beforehand, so that a timed call carries as little Python as the
        library allows."""
        ...

    def checked(self) -> AbstractContextManager[None]:
        """Around the first call of a cell, which is not timed: a library that can compare the ranks' calls
        before anything moves does so within."""
        return nullcontext()

    def queues(self) -> bool:
        """On GPUs: whether a call returns once it is queued on the stream. One that waits for the GPU can be
        neither captured in a graph nor timed by events, and is measured in the modes of the host clock."""
        return True

    def allocate(self, size: int) -> tuple[Any, Any]:
        """Where `own_memory` is set: input and output memory of `size` bytes each, as arrays of bytes, or as
        `buffers.Region` where it does not lie where the run's does. Called once, on all ranks alike; raises
        where it cannot, and the symmetric cases are then skipped."""
        raise NotImplementedError

    def raise_if_failed(self) -> None:
        """On GPUs, called when the stream is done: raises where a queued call has failed there."""

    def algorithm(self, case: Case) -> str | None:
        """The algorithm that the library will use, where it can say."""
        return None

    def abort(self) -> None:
        """On GPUs, after a hang, and anywhere after a setup that failed on some rank: ends what is under way
        as far as it can, without the other ranks. Nothing but `close` is called afterwards."""

    def staged(self) -> bool:
        """On GPUs: whether the data goes through the host's memory."""
        return False

    def sms(self, case: Case) -> int | None:
        """The SMs that the call takes of a GPU, where the library can say; 0 where copy engines do it."""
        return None

    def close(self) -> None:
        """Frees what setup made."""


def names() -> list[str]:
    """All known backends, built in ones first."""
    return list(dict.fromkeys([*BUILT_IN, *(point.name for point in entry_points(group=GROUP))]))


def load(name: str) -> Backend:
    """A new backend of that name; `name:variant` gives the class its variant (unisono takes an algorithm).

    Raises CaseError for an unknown name (it lists the known) and where the backend takes no variant."""
    base, _, variant = name.partition(":")
    made: Callable[..., Backend]
    points = [point for point in entry_points(group=GROUP) if point.name == base]
    if base in BUILT_IN:
        module, _, attribute = BUILT_IN[base].partition(":")
        made = getattr(import_module(module), attribute)
    elif points:
        try:
            made = points[0].load()
        except Exception as error:  # another package's code
            raise CaseError(
                f"backend {base!r} cannot be loaded ({type(error).__name__}: {error}): mend or remove the "
                "package that brings it."
            ) from error
    else:
        raise CaseError(f"unknown backend {base!r}: choose from {', '.join(names())}.")
    if not variant:
        return made()
    try:
        return made(variant)
    except TypeError:
        raise CaseError(
            f"backend {base!r} has no variants, so {name!r} cannot be run: name it {base!r}."
        ) from None


def expanded(wanted: Sequence[str]) -> list[str]:
    """The names with those that stand for several variants replaced by these."""
    found = []
    for name in wanted:
        variants = () if ":" in name else load(name).variants
        found += [f"{name}:{variant}" for variant in variants] or [name]
    return list(dict.fromkeys(found))


def names_for(device: str) -> list[str]:
    """All known backends that work on buffers of that device and need not be named; none of other packages
    that cannot be loaded, of which `unisono info` tells."""
    found = []
    for name in names():
        try:
            backend = load(name)
        except CaseError:
            continue
        if device in backend.devices and not backend.asked_for:
            found.append(name)
    return found


def check_names(wanted: Sequence[str]) -> None:
    """Raises CaseError for the first name that `load` does not know, and for a variant that its class
    refuses."""
    for name in wanted:
        if name.partition(":")[0] not in names():
            raise CaseError(f"unknown backend {name!r}: choose from {', '.join(names())}.")
        if ":" in name:
            load(name)
