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
from unisono.bench.timing import NOT_TIMED, Call, Timed
from unisono.bench.verify import NUMPY, Arithmetic
from unisono.bench.watch import Watch
from unisono.records import Case, Ceiling, Link

MEMORY_SHARE = 0.7  # of the memory that is free on a machine, for all its ranks' buffers together
SILENCE_S = 360.0  # more than the deadlines of session.py, whose errors say who is missing


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


class Device:
    """One rank's side; all ranks call the same methods in the same order. Those that raise here are for a
    subclass to define."""

    kind: str  # as in Case.device
    index: int | None = None  # of the GPU
    stream: int = 0  # on which calls are queued, see backends.base.Ranks
    arithmetic: Arithmetic
    watch: Watch

    def pools(self, cases: Iterable[Case], rank: int) -> Pools:
        """The plain memory for all `cases`."""
        raise NotImplementedError

    def room(self, control: Control, own: int) -> int:
        """Bytes of the largest case for which there is room on every rank, `own` backends having memory of
        their own."""
        raise NotImplementedError

    def used_bytes(self) -> tuple[int, int]:
        """Bytes of the memory that are in use, by whomever, and all there are."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Returns what is freed already and only kept for later."""

    def runner(self, case: Case, call: Call, backend: Backend) -> Runner:
        """The loops of the case's mode."""
        raise NotImplementedError

    def finish(self, backend: Backend) -> None:
        """Waits until the calls queued so far are complete; raises where one has failed."""

    def recover(self, backend: Backend) -> bool:
        """After a hang of `backend`, which is not used any more: whether this rank's GPU could be had
        back."""
        return False

    def beat(self, doing: str | None = None) -> None:
        """The run goes on, with `doing`, a phrase for the message of a hang."""
        self.watch.beat(doing)

    def ceilings(self, control: Control) -> tuple[float | None, list[Ceiling | Link]]:
        """What a rank's bus bandwidth is compared with (GB/s, None where it is unknown), and the records."""
        raise NotImplementedError

    def gpus(self) -> list[str]:
        """Names of the GPUs of all ranks of this machine."""
        return []

    def state(self) -> list[str]:
        """Clocks and the like of the GPUs, for the records."""
        return []

    def close(self) -> None:
        """Frees what the device holds."""
        self.watch.stop()


def one_clock(control: Control) -> bool:
    """Whether CLOCK_MONOTONIC is the same on all ranks: one machine, no time namespaces that shift it."""
    try:
        offsets = Path("/proc/self/timens_offsets").read_text()
    except OSError:  # before Linux 5.6
        offsets = ""
    return len(set(control.gather(f"{provenance.boot()} {offsets}", str))) == 1


class HostRunner:
    """The loops of `timing`, on the host clock; with start times where it is one for all ranks. Before each
    sample it tells `beat`, since a batch of long ones is long."""

    def __init__(self, call: Call, align: Call, one_clock: bool = True, beat: Call = lambda: None) -> None:
        def start() -> None:
            beat()
            align()

        self._call, self._align, self._one_clock = call, start, one_clock

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


class HostDevice(Device):
    """Numpy arrays in this process's memory."""

    kind = "cpu"
    arithmetic = NUMPY

    def __init__(
        self,
        align: Call,
        with_peer: Callable[[int], Call] | None = None,
        rank: int = 0,
        one_clock: bool = True,
    ) -> None:
        self._align, self._with_peer, self._rank, self._one_clock = align, with_peer, rank, one_clock
        self.watch = Watch(rank, SILENCE_S)

    def pools(self, cases: Iterable[Case], rank: int) -> Pools:
        return Pools(cases, rank)

    def room(self, control: Control, own: int) -> int:
        free, machines = int(provenance.free_bytes() * MEMORY_SHARE), control.gather(provenance.boot(), str)
        least = min(control.gather(free // machines.count(provenance.boot()), int))
        # two regions a rank of either memory, and as much again for what the libraries stage
        return least // (4 + 2 * own)

    def runner(self, case: Case, call: Call, backend: Backend) -> Runner:
        align = self._align
        if case.pair is not None and case.ranks > 2 and self._with_peer is not None:
            peer = pairs.peer_of(case, self._rank)
            if peer is None:
                return Bystander()
            align = self._with_peer(peer)
        return HostRunner(call, align, self._one_clock, self.watch.beat)

    def ceilings(self, control: Control) -> tuple[float | None, list[Ceiling | Link]]:
        found = ceilings.measure(control, self._align, self._one_clock)
        return found.per_rank_gbps, [found.one_thread, found.all_threads]
