"""The clock of deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LOOK_S", "Clock"]

LOOK_S = 0.1  # the longest time between two looks while a deadline is ahead
_MOST_COUNTED_S = 0.2


class Clock:
    """Counts the seconds since its construction. Between two looks it counts at most 0.2 s.

    Time in which the machine or the process was stopped is therefore no wait.

    Requires: whoever waits looks every `LOOK_S`.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked = now()
        self._counted = 0.0

    def __call__(self) -> float:
        """Looks at the time. Returns the seconds counted so far."""
        now = self._now()
        self._counted += min(now - self._looked, _MOST_COUNTED_S)
        self._looked = now
        return self._counted
