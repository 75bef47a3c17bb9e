"""Ends a run in which nothing moves any more."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

LOOK_S = 2.0
LATER_S = 6.0  # for rank 0 to end first, since it has the records and may be in the same process


class Watch:
    """Ends the process once its rank has not moved for `silence_s`, even inside a library.

    Before, `save` records all samples. The other ranks notice the end of this one. The watch counts its own
    looks, so that a stopped process does not count as silent."""

    def __init__(self, rank: int, silence_s: float) -> None:
        self.doing = "the start"
        self.save: Callable[[], None] = lambda: None
        self._limit_s = silence_s + (LATER_S if rank else 0.0)
        self._rank, self._moved, self._stopped = rank, True, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="bench-watch")

    def start(self) -> None:
        self._thread.start()

    def beat(self, doing: str | None = None) -> None:
        """Notes that the rank moves. `doing`: a phrase for its work from now on."""
        self._moved = True
        if doing is not None:
            self.doing = doing

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()  # the thread would hold the objects of `save` until the end of the process

    def _run(self) -> None:
        silent_s, look_s = 0.0, min(LOOK_S, self._limit_s / 4)
        while not self._stopped.wait(look_s):
            silent_s = 0.0 if self._moved else silent_s + look_s
            self._moved = False
            if silent_s >= self._limit_s:
                sys.stderr.write(
                    f"unisono bench: rank {self._rank}: nothing has moved for {self._limit_s:.0f} s in "
                    f"{self.doing}; the run ends here; what was recorded until then is kept.\n"
                )
                sys.stderr.flush()
                try:
                    self.save()
                finally:
                    os._exit(1)
