"""The protocol of a bootstrap, and the checks that all bootstraps share."""

from __future__ import annotations

import atexit
import contextlib
import math
from typing import Protocol, runtime_checkable

from ..errors import UsageError
from .hub import MAX_PAYLOAD

MOST_TIMEOUT_S = 1e9  # clocks and sockets count seconds in narrow numbers
# Registered on import, and so run after communicators close at exit: they may still need a bootstrap.
at_exit = contextlib.ExitStack()
atexit.register(at_exit.close)


@runtime_checkable
class Bootstrap(Protocol):
    """Meets the other ranks for a communicator. `make` takes any object of this shape."""

    rank: int
    size: int

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns the `data` of every rank, in rank order. Collective.

        Args:
            data: at most MAX_PAYLOAD bytes; lengths may differ between ranks.

        Raises:
            TimeoutError, PeerLostError, MismatchError, UnisonoError: the bootstrap cannot be used any more.
        """

    def close(self) -> None:
        """Releases the resources of the bootstrap. Idempotent."""


class SingleBootstrap:
    """The bootstrap of a rank that is alone."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns `[data]`."""
        return [check_payload(data)]

    def close(self) -> None:
        """Does nothing."""


def check_payload(data: bytes) -> bytes:
    """Returns `data` as bytes. Raises UsageError above MAX_PAYLOAD bytes."""
    if len(data) > MAX_PAYLOAD:
        raise UsageError(f"an all_gather of the bootstrap takes at most {MAX_PAYLOAD} bytes, not {len(data)}")
    return bytes(data)


def check_timeout(value: object, name: str = "timeout_s") -> float:
    """Returns `value` in seconds. Raises UsageError with `name` unless 0 < value <= MOST_TIMEOUT_S."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds <= MOST_TIMEOUT_S:
        raise UsageError(
            f"{name}={value} is no deadline: give seconds above 0, at most {MOST_TIMEOUT_S:.0e}."
        )
    return seconds
