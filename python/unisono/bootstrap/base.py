"""What every bootstrap is, and what all of them check."""

from __future__ import annotations

import atexit
import contextlib
import math
from typing import Protocol, runtime_checkable

from ..errors import UsageError
from .hub import MAX_PAYLOAD

MOST_TIMEOUT_S = 1e9  # clocks and sockets count them in narrow numbers
# Registered on import, so as to run after what communicators do at exit, which may still need a bootstrap.
at_exit = contextlib.ExitStack()
atexit.register(at_exit.close)


@runtime_checkable
class Bootstrap(Protocol):
    """What a communicator needs to meet the other ranks; any object of this shape can be given to `make`."""

    rank: int
    size: int

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give `data` (at most MAX_PAYLOAD bytes, lengths may differ), get one entry per rank, in rank order.

        A collective call. Raises TimeoutError, PeerLostError, MismatchError or UnisonoError; afterwards the
        bootstrap is of no more use.
        """

    def close(self) -> None:
        """Release what the bootstrap holds. Idempotent."""


class SingleBootstrap:
    """One rank that is alone."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """`[data]`."""
        return [check_payload(data)]

    def close(self) -> None:
        """Nothing to release."""


def check_payload(data: bytes) -> bytes:
    """`data` as bytes, or UsageError when it is above MAX_PAYLOAD."""
    if len(data) > MAX_PAYLOAD:
        raise UsageError(f"an all_gather of the bootstrap takes at most {MAX_PAYLOAD} bytes, not {len(data)}")
    return bytes(data)


def check_timeout(given: object, name: str = "timeout_s") -> float:
    """It as a number of seconds, or UsageError when it is none from above 0 to MOST_TIMEOUT_S."""
    try:
        seconds = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds <= MOST_TIMEOUT_S:
        raise UsageError(
            f"{name}={given} is no deadline: give seconds above 0, at most {MOST_TIMEOUT_S:.0e}."
        )
    return seconds
