"""Where the buffers of a run lie, and what follows from that: how they are made, filled, compared, and how
calls on them are timed. `HostDevice` is the CPU; `cuda.device.CudaDevice` is one GPU a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from unisono.bench import ceilings, pairs, provenance, timing
from unisono.bench.backends.base import Backend
from unisono.bench.buffers import Pools
from unisono.bench.control import Control
from unisono.bench.records import Case, Ceiling, Link
from unisono.bench.timing import NOT_TIMED, Call, Timed
from unisono.bench.verify import NUMPY, Arithmetic
from unisono.nodes.topology import boot

MEMORY_SHARE = 0.7  # of the memory that is free on a machine, for all its ranks' buffers together


class HangError(RuntimeError):
    """A GPU did not come back within the deadline: nothing more can be measured by this process, and the
    kernel that waits on it ends only with it."""


class Runner(Protocol):
    """The timed loops of one cell."""

    def timed(self, samples: int, calls: int, warmup: int) -> Timed:
        """As `timing.timed`. In the modes with a queue `calls` is the case's `calls_per_sample`, or 1 to
        learn what a single call costs."""
        ...

    def close(self) -> None:
        """Frees what the loops hold; called once, before the backend is closed."""


class Device(Protocol):
    """One rank's side; all ranks call the same methods in the same order."""

    kind: str  # as in Case.device
    index: int | None  # of the GPU
    stream: int  # on which calls are queued, see backends.base.Ranks
    arithmetic: Arithmetic

    def pools(self, cases: Iterable[Case], rank: int) -> Pools:
        """The plain memory for all `cases`."""
        ...

    def room(self, control: Control, own: int) -> int:
        """Bytes of the largest case for which there is room on every rank, `own` backends having memory of
        their own."""
        ...

    def used_bytes(self) -> tuple[int, int]:
        """Bytes of the memory that are in use, by whomever, and all there are."""
        ...

    def give_back(self) -> None:
        """Returns what is freed already and only kept for later."""

    def runner(self, case: Case, call: Call, backend: Backend) -> Runner:
        """The loops of the case's mode."""
        ...

    def finish(self, backend: Backend) -> None:
        """Waits until the calls queued so far are complete; raises where one has failed."""

    def recover(self, backend: Backend) -> bool:
        """After a hang of `backend`, which is not used any more: whether this rank's GPU could be had
        back."""
        ...

    def beat(self, doing: str) -> None:
        """The run goes on with `doing`, a phrase for the message of a hang."""

    def on_silence(self, save: Callable[[], None]) -> None:
        """`save` is called before this process is ended because nothing has moved for too long."""

    def ceilings(self, control: Control) -> tuple[float | None, list[Ceiling | Link]]:
        """What a rank's bus bandwidth is compared with (GB/s, None where it is unknown), and the records."""
        ...

    def gpus(self) -> list[str]:
        """Names of the GPUs of all ranks of this machine."""
        ...

    def state(self) -> list[str]:
        """Clocks and the like of the GPUs, for the records."""
        ...

    def close(self) -> None:
        """Frees what the device holds."""


def one_clock(control: Control) -> bool:
    """Whether CLOCK_MONOTONIC is the same on all ranks: one machine, no time namespaces that shift it."""
    try:
        offsets = Path("/proc/self/timens_offsets").read_text()
    except OSError:  # before Linux 5.6
        offsets = ""
    return len(set(control.gather(f"{boot()} {offsets}", str))) == 1


class HostRunner:
    """The loops of `timing`, on the host clock; with start times where it is one for all ranks."""

    def __init__(self, call: Call, align: Call, one_clock: bool = True) -> None:
        self._call, self._align, self._one_clock = call, align, one_clock

    def timed(self, samples: int, calls: int, warmup: int) -> Timed:
        found = timing.timed(self._call, self._align, samples, calls, warmup)
        return found if self._one_clock else replace(found, starts=NOT_TIMED.starts)

    def close(self) -> None:
        pass


class Bystander:
    """The runner of a rank that takes no part: it is done at once and waits for the others asleep, in the
    exchange that follows."""

    def timed(self, samples: int, calls: int, warmup: int) -> Timed:
        return NOT_TIMED

    def close(self) -> None:
        pass


class HostDevice:
    """Numpy arrays in this process's memory."""

    kind = "cpu"
    index: int | None = None
    stream = 0
    arithmetic = NUMPY

    def __init__(
        self,
        align: Call,
        with_peer: Callable[[int], Call] | None = None,
        rank: int = 0,
        one_clock: bool = True,
    ) -> None:
        self._align, self._with_peer, self._rank, self._one_clock = align, with_peer, rank, one_clock

    def pools(self, cases: Iterable[Case], rank: int) -> Pools:
        return Pools(cases, rank)

    def room(self, control: Control, own: int) -> int:
        free, machines = int(provenance.free_bytes() * MEMORY_SHARE), control.gather(boot(), str)
        least = min(control.gather(free // machines.count(boot()), int))
        # two regions a rank of either memory, and as much again for what the libraries stage
        return least // (4 + 2 * own)

    def used_bytes(self) -> tuple[int, int]:
        total = provenance.memory_bytes()
        return total - provenance.memory_bytes("MemAvailable"), total

    def give_back(self) -> None:
        pass

    def runner(self, case: Case, call: Call, backend: Backend) -> Runner:
        if case.pair is None or case.ranks == 2 or self._with_peer is None:
            return HostRunner(call, self._align, self._one_clock)
        peer = pairs.peer_of(case, self._rank)
        return Bystander() if peer is None else HostRunner(call, self._with_peer(peer), self._one_clock)

    def finish(self, backend: Backend) -> None:
        pass

    def recover(self, backend: Backend) -> bool:
        return False

    def beat(self, doing: str) -> None:
        pass

    def on_silence(self, save: Callable[[], None]) -> None:
        pass

    def ceilings(self, control: Control) -> tuple[float | None, list[Ceiling | Link]]:
        found = ceilings.measure(control, self._align, self._one_clock)
        return found.per_rank_gbps, [found.one_thread, found.all_threads]

    def gpus(self) -> list[str]:
        return []

    def state(self) -> list[str]:
        return []

    def close(self) -> None:
        pass
