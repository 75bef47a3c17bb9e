"""What a backend is: one small class, found by the entry point group `unisono.bench_backends`.

A backend of your own subclasses `Backend`, names itself, and turns a case and its buffers into a callable:

    class Mine(Backend):
        name = "mine"
        def setup(self, ranks): self.comm = mylib.init(ranks.rank, ranks.size, ranks.all_gather)
        def supports(self, case): return None if case.collective == "all_reduce" else "mine has all_reduce
        only" def prepare(self, case, buffers): return partial(self.comm.all_reduce, buffers.x, buffers.out,
        case.op)

and is declared in its package's pyproject.toml:

    [project.entry-points."unisono.bench_backends"]
    mine = "mypackage.bench:Mine"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

from unisono.bench.cases import Array, CaseError
from unisono.bench.records import Case

GROUP = "unisono.bench_backends"
BUILT_IN = {
    "unisono": "unisono.bench.backends.unisono:UnisonoBackend",
    "mpi": "unisono.bench.backends.mpi:MpiBackend",
    "gloo": "unisono.bench.backends.gloo:GlooBackend",
}


@dataclass(frozen=True)
class Ranks:
    """Who takes part. `all_gather` exchanges bytes between all ranks, for a backend's own bootstrap;
    `communicator` is the bench's unisono communicator, which also owns the symmetric buffers."""

    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]
    communicator: Any


@dataclass(frozen=True)
class Buffers:
    """One rank's buffers for a case, the same memory for every backend; contiguous, shapes as `cases.layout`
    says.

    In place follows MPI: all_reduce, broadcast, reduce and all_to_all have `out is x`; all_gather and gather
    have `x` in `out[rank]`; reduce_scatter and scatter have `out` in `x[rank]` (gather and scatter at the
    root only). None: this rank has no such buffer. `spare` is scratch of the shape of `x` where a reduce has
    no `out`, for a library that would overwrite its input there."""

    x: Array | None
    out: Array | None
    spare: Array | None = None
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()


class Backend(Protocol):
    """A library under test. Subclass it explicitly to inherit the defaults. Every method is called on all
    ranks alike."""

    name: str
    bit_exact: bool = (
        False  # True: float sums are combined in rank order and must match the reference bit by bit
    )

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
        skipped."""

    def supports(self, case: Case) -> str | None:
        """None where this library offers the case, else the reason; the same answer on every rank."""
        return None

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        """A callable that performs the collective once, to completion on this rank; everything bound
        beforehand, so that a timed call carries as little Python as the library allows."""
        ...

    def algorithm(self, case: Case) -> str | None:
        """The algorithm that the library will use, where it can say."""
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
        made = points[0].load()
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


def check_names(wanted: Sequence[str]) -> None:
    """Raises CaseError for the first name that `load` does not know, and for a variant that its class
    refuses."""
    for name in wanted:
        if name.partition(":")[0] not in names():
            raise CaseError(f"unknown backend {name!r}: choose from {', '.join(names())}.")
        if ":" in name:
            load(name)
