"""The exceptions of Unisono.

Every error that the library raises on purpose is a `UnisonoError`. Each subclass also derives from the
built-in exception that a caller would catch without knowing Unisono, so that `except ValueError` or `except
OSError` works. The compiled core raises these same classes.
"""

from __future__ import annotations

import builtins

__all__ = ["MismatchError", "PeerLostError", "ResourceError", "TimeoutError", "UnisonoError", "UsageError"]


class UnisonoError(Exception):
    """Base of every error that Unisono raises on purpose."""


class UsageError(UnisonoError, ValueError):
    """The call, or how the process was started, is wrong; nothing was moved. The message says what to do."""


class MismatchError(UnisonoError):
    """Ranks called with different arguments (collective, dtype, op, count, root); the message has both."""


class TimeoutError(UnisonoError, builtins.TimeoutError):
    """A wait passed its deadline (`UNISONO_TIMEOUT_S`); the message says who waited for whom."""


class PeerLostError(UnisonoError, ConnectionError):
    """Another rank ended while this one still needed it; the message names the rank."""


class ResourceError(UnisonoError, OSError):
    """The machine refused something (shared memory, a process, a socket); the message says what."""
