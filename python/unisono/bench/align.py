"""The common start of a sample on CPUs, the same for every backend.

A rank that finishes early must not hold a core that another rank needs: a library with threads of its own
(gloo) would lose milliseconds to a neighbour that spins in a barrier. The ranks therefore first gather over
flags in a shared page: with a brief look, if each has a core of its own, and then asleep. When all are there,
they pass through the barrier of the bench's communicator. The barrier releases them within a fraction of a
microsecond (the skew in the records), or as they get a core.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep

from unisono.bench.control import Control

LOOKS = 300  # of ranks with a core each: about 15 us
NAP_S = 30e-6
PATIENCE_S = 1.0  # then the barrier waits, which has a deadline and notices a rank that has died
BATCHES, BARRIERS = 9, 50  # of barrier_us
_LINE = 8  # 64-bit words in a cache line: one line a rank


class Aligner:
    """Starts all ranks together. Every rank makes and calls it in step.

    `barrier`: the communicator's. `meet`: returns a barrier of this rank and one other. If the ranks share no
    directory for the page (several machines), the barrier alone aligns them."""

    def __init__(
        self,
        control: Control,
        barrier: Callable[[], object],
        meet: Callable[[int], Callable[[], object]] | None = None,
    ) -> None:
        self._barrier, self._meet, self._rank, self._size = barrier, meet, control.rank, control.size
        self._flags = shared_words(control, self._size * _LINE + self._size**2)
        others = [rank * _LINE for rank in range(self._size) if rank != self._rank]
        self._cores = _cores(control)
        self._pairs: dict[int, Callable[[], object]] = {}
        self._all = _Gathering(self._flags, self._rank * _LINE, others, self._looks(self._size))

    def __call__(self) -> None:
        self._all()
        self._barrier()

    def _looks(self, ranks: int) -> int:
        """Returns how often ranks look for each other before they sleep, if these alone work."""
        return LOOKS if ranks <= self._cores else 0

    def barrier_us(self) -> float:
        """Returns the time of the barrier, by which phases of a machine differ: how far its cores are apart.
        Collective."""
        found = []
        for _ in range(BATCHES):
            self()
            began = perf_counter()
            for _ in range(BARRIERS):
                self._barrier()
            found.append(1e6 * (perf_counter() - began) / BARRIERS)
        return median(found)

    def with_peer(self, peer: int) -> Callable[[], object]:
        """Returns the common start of this rank and `peer`, which calls it too. Other ranks take no part."""
        if self._meet is None:
            raise ValueError("this aligner was made without a way for two ranks to meet.")
        if peer not in self._pairs:
            row = self._size * _LINE
            mine, other = row + self._rank * self._size + peer, row + peer * self._size + self._rank
            gather, meet = _Gathering(self._flags, mine, [other], self._looks(2)), self._meet(peer)

            def start() -> None:
                gather()
                meet()

            self._pairs[peer] = start
        return self._pairs[peer]


class _Gathering:
    """Waits until all `others` have called as often, at most PATIENCE_S; asleep after `looks` looks."""

    def __init__(self, flags: memoryview | None, mine: int, others: list[int], looks: int) -> None:
        self._flags, self._mine, self._others, self._epoch = flags, mine, others, 0
        self._looks = range(looks)

    def __call__(self) -> None:
        flags = self._flags
        if flags is None:
            return
        self._epoch += 1
        epoch = flags[self._mine] = self._epoch
        for other in self._others:
            for _ in self._looks:
                if flags[other] >= epoch:
                    break
            else:
                _nap(flags, other, epoch)


def _cores(control: Control) -> int:
    """Returns how many cores the ranks may use together. Collective."""
    return len(set().union(*control.gather(sorted(os.sched_getaffinity(0)), list[int])))


def _nap(flags: memoryview, peer: int, epoch: int) -> None:
    deadline = monotonic() + PATIENCE_S
    while flags[peer] < epoch and monotonic() < deadline:
        sleep(NAP_S)


def shared_words(control: Control, count: int) -> memoryview | None:
    """Returns `count` zeroed 64-bit words that all ranks share; None if any rank cannot. Collective. The file
    behind the words loses its name once all ranks have opened it."""
    path, error = "", None
    if control.rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix="unisono-align-", dir=folder)
        os.truncate(handle, count * 8)
        os.close(handle)
    path = control.from_root(lambda: path, str)
    words: memoryview | None = None
    try:
        with open(path, "r+b") as file:
            words = memoryview(mmap.mmap(file.fileno(), count * 8)).cast("Q")
    except (OSError, ValueError) as raised:
        error = str(raised)
    failed = control.first_error(error)
    if control.rank == 0:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
    return words if failed is None else None
