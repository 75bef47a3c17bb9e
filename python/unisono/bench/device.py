"""Devices, which make, fill and compare the buffers of a run and time calls on them. `HostDevice` is the CPU,
`cuda.device.CudaDevice` one GPU a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from unisono.bench import ceilings, pairs, provenance, timing
from unisono.bench.align import Aligner
from unisono.bench.backends.base import Backend
from unisono.bench.buffers import Pools
from unisono.bench.control import Control
from unisono.bench.timing import NOT_TIMED, Call, Timed
from unisono.bench.verify import NUMPY, Arithmetic
from unisono.bench.watch import Watch
from unisono.machine import boot
from unisono.records import Case, Ceiling, Link

MEMORY_SHARE = 0.7  # of a machine's free memory, for the buffers of all its ranks together
SILENCE_S = 360.0  # longer than the deadlines of session.py, whose errors name the missing rank


def nothing() -> None:
    """Does nothing."""


class HangError(RuntimeError):
    """A GPU did not come back within its deadline. This process can measure nothing more, and the kernel that
    waits on the GPU ends only with the process."""


class Runner(Protocol):
    """The timed loops of one cell. Subclass it explicitly to inherit the default."""

    sms: int | None = None  # SMs of a GPU that the calls take, as far as the loops know

    def timed(self, samples: int, calls: int, warmup: int) -> Timed:
        """Takes samples, as `timing.timed`. In the modes with a queue, `calls` is the case's
        `calls_per_sample`, or 1 to measure the cost of a single call."""
        ...

    def close(self) -> None:
        """Frees the resources of the loops. Called once, before the backend is closed."""


class Device:
    """One rank's side. All ranks call the same methods in the same order. A subclass defines the methods that
    raise here."""

    kind: str  # as in Case.device
    index: int | None = None  # of the GPU
    stream: int = 0  # the stream of all calls, see backends.base.Ranks
    arithmetic: Arithmetic
    watch: Watch

    def pools(self, cases: Iterable[Case], rank: int) -> Pools:
        """Returns the plain memory for all `cases`."""
        raise NotImplementedError

    def room(self, control: Control, own: int) -> int:
        """Returns the bytes of the largest case with room on every rank. `own`: the number of backends with
        memory of their own."""
        raise NotImplementedError

    def used_bytes(self) -> tuple[int, int]:
        """Returns the bytes of memory in use, by any process, and all bytes."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Returns freed memory that is kept for reuse to the system."""

    def runner(self, case: Case, call: Call, backend: Backend, before: Call = nothing) -> Runner:
        """Returns the loops of the case's mode. `before`: made before each sample, of calls that the host's
        clock times."""
        raise NotImplementedError

    def finish(self, backend: Backend) -> None:
        """Waits until the calls queued so far are complete. Raises if one has failed."""

    def recover(self, backend: Backend) -> bool:
        """Returns whether this rank's GPU works again after a hang of `backend`, which the run leaves out."""
        return False

    def beat(self, doing: str | None = None) -> None:
        """Notes that the run goes on. `doing`: a phrase for the message of a hang."""
        self.watch.beat(doing)

    def ceilings(self, control: Control) -> tuple[float | None, list[Ceiling | Link]]:
        """Returns the ceiling of a rank's bus bandwidth (GB/s, None if unknown), and the records."""
        raise NotImplementedError

    def barrier_us(self) -> float | None:
        """Returns the time of the barrier before samples; None if no barrier starts them. Collective."""
        return None

    def gpus(self) -> list[str]:
        """Returns the names of the GPUs of all ranks of this machine."""
        return []

    def state(self) -> list[str]:
        """Returns clocks, temperatures and the like of the GPUs, for the records."""
        return []

    def close(self) -> None:
        """Frees the resources of the device."""
        self.watch.stop()


def one_clock(control: Control) -> bool:
    """Returns whether CLOCK_MONOTONIC is the same on all ranks: one machine, no shift by a time namespace.
    Collective."""
    try:
        offsets = Path("/proc/self/timens_offsets").read_text()
    except OSError:  # before Linux 5.6
        offsets = ""
    return len(set(control.gather(f"{boot()} {offsets}", str))) == 1


class HostRunner(Runner):
    """The loops of `timing`, by the host clock, with start times if all ranks have one clock. Calls `beat`
    before each sample, since a batch of long samples is long, and `before`."""

    def __init__(
        self, call: Call, align: Call, one_clock: bool = True, beat: Call = nothing, before: Call = nothing
    ) -> None:
        def start() -> None:
            beat()
            before()
            align()

        self._call, self._align, self._one_clock = call, start, one_clock

    def timed(self, samples: int, calls: int, warmup: int) -> Timed:
        found = timing.timed(self._call, self._align, samples, calls, warmup)
        return found if self._one_clock else replace(found, starts=NOT_TIMED.starts)

    def close(self) -> None:
        pass


class Bystander(Runner):
    """The runner of a rank that takes no part. The rank then sleeps in the exchange that follows."""

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
        free, machines = int(provenance.free_bytes() * MEMORY_SHARE), control.gather(boot(), str)
        least = min(control.gather(free // machines.count(boot()), int))
        # Two regions a rank of plain and of symmetric memory, the libraries' staging in the rest.
        return least // (4 + 2 * own)

    def runner(self, case: Case, call: Call, backend: Backend, before: Call = nothing) -> Runner:
        align = self._align
        if case.pair is not None and case.ranks > 2 and self._with_peer is not None:
            peer = pairs.peer_of(case, self._rank)
            if peer is None:
                return Bystander()
            align = self._with_peer(peer)
        return HostRunner(call, align, self._one_clock, self.watch.beat, before)

    def barrier_us(self) -> float | None:
        return self._align.barrier_us() if isinstance(self._align, Aligner) else None

    def ceilings(self, control: Control) -> tuple[float | None, list[Ceiling | Link]]:
        found = ceilings.measure(control, self._align, self._one_clock)
        return found.per_rank_gbps, [found.one_thread, found.all_threads]
