"""The clock of deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LOOK_S", "Clock"]

LOOK_S = 0.1  # how often to look at least while a deadline is ahead
_MOST_COUNTED_S = 0.2


class Clock:
    """Seconds since it was made, of which the time between two looks counts 0.2 at the most: a machine or a
    process that was stopped has not waited. So whoever waits must look every `LOOK_S`.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked = now()
        self._counted = 0.0

    def __call__(self) -> float:
        """The look."""
        now = self._now()
        self._counted += min(now - self._looked, _MOST_COUNTED_S)
        self._looked = now
        return self._counted
