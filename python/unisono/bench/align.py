"""The common start of a sample: the same for every backend, and no burden to any.

A rank that is done early must not hold a core that another needs to finish its call: a library with threads
of its own (gloo) would lose milliseconds to a neighbour that spins in a barrier. So the ranks first gather
politely, with a brief look and then asleep, over flags in a page that they share; only when all are here do
they pass through the barrier of the bench's communicator, which lets them go within a fraction of a
microsecond (the skew in the records).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from unisono.bench.control import Control

LOOKS = 300  # about 15 us
NAP_S = 30e-6
PATIENCE_S = 1.0  # then the barrier waits: it has a deadline, and notices a rank that has died
_LINE = 8  # 64-bit words in a cache line: one line a rank


class Aligner:
    """Made and called on all ranks in step; `barrier` is the communicator's. Where the ranks share no
    directory for the page (several machines), the barrier alone aligns them."""

    def __init__(self, control: Control, barrier: Callable[[], object]) -> None:
        self._barrier, self._epoch, self._mine = barrier, 0, control.rank * _LINE
        self._peers = [rank * _LINE for rank in range(control.size) if rank != control.rank]
        self._flags = shared_words(control, control.size * _LINE)

    def __call__(self) -> None:
        flags = self._flags
        if flags is not None:
            self._epoch += 1
            epoch = flags[self._mine] = self._epoch
            for peer in self._peers:
                looks = 0
                while flags[peer] < epoch:
                    looks += 1
                    if looks == LOOKS:
                        _nap(flags, peer, epoch)
                        break
        self._barrier()


def _nap(flags: memoryview, peer: int, epoch: int) -> None:
    deadline = monotonic() + PATIENCE_S
    while flags[peer] < epoch and monotonic() < deadline:
        sleep(NAP_S)


def shared_words(control: Control, count: int) -> memoryview | None:
    """`count` zeroed 64-bit words that all ranks share; the file behind them has no name once all have opened
    it."""
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
