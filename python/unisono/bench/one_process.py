"""A run whose ranks are threads of this process, one GPU each (`unisono bench --device cuda --one-process`).

Only the GPU's clock is used, since Python's lock would be part of every time by the host's clock.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from unisono.bench.align import Aligner
from unisono.bench.control import Control, Interrupt
from unisono.bench.cuda.device import LIBRARY_S, CudaDevice
from unisono.bench.options import Options
from unisono.bench.session import ALIGN_TIMEOUT_S, EXCHANGE_TIMEOUT_S, Outcome, Session

SWITCH_S = 50e-6  # between switches of Python's threads; shorter than the default


@dataclass
class Meeting:
    """The bootstrap between the threads. All ranks share `slots` and `door`. A failed rank breaks the door,
    and the others then fail at it."""

    rank: int
    size: int
    slots: list[bytes]
    door: threading.Barrier

    def all_gather(self, data: bytes) -> list[bytes]:
        self.slots[self.rank] = data
        self.door.wait(EXCHANGE_TIMEOUT_S)
        found = list(self.slots)
        self.door.wait(EXCHANGE_TIMEOUT_S)
        return found


def run(options: Options) -> Outcome:
    """Runs `options.threads` ranks. Returns rank 0's outcome. Raises the first failed rank's error."""
    import unisono

    sys.setswitchinterval(SWITCH_S)
    ranks = options.threads
    slots, door = [b""] * ranks, threading.Barrier(ranks)
    aligning = unisono.init_threads(ranks, timeout_s=ALIGN_TIMEOUT_S)
    measured = unisono.init_all(list(range(ranks)), timeout_s=LIBRARY_S)
    failed: list[BaseException] = []
    with Interrupt().watched() as interrupt, ThreadPoolExecutor(ranks) as pool:

        def rank(number: int) -> Outcome | None:
            try:
                control = Control(Meeting(number, ranks, slots, door))
                align = Aligner(control, aligning[number].barrier)
                device = CudaDevice(number, control, align)
                session = Session(options, control, measured[number], interrupt, "one process", device)
                outcome = session.run()
                session.close()
                return outcome
            except BaseException as error:
                failed.append(error)
                door.abort()
                return None

        outcomes = list(pool.map(rank, range(ranks)))
    if failed:
        raise next(
            (error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0]
        )
    for communicator in (*measured, *aligning):
        communicator.close()
    found = outcomes[0]
    assert found is not None
    return found
