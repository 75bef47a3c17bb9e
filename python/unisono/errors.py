"""The exceptions of Unisono.

Every error that the library raises on purpose is a `UnisonoError`. Each subclass also derives from the
matching built-in exception, so that `except ValueError` or `except OSError` works. The compiled core raises
these same classes.
"""

from __future__ import annotations

import builtins

__all__ = ["MismatchError", "PeerLostError", "ResourceError", "TimeoutError", "UnisonoError", "UsageError"]


class UnisonoError(Exception):
    """Base of every error that Unisono raises on purpose."""


class UsageError(UnisonoError, ValueError):
    """The call or the way the process was started is wrong. No data moved. The message says what to do."""


class MismatchError(UnisonoError):
    """Ranks called with different arguments (collective, dtype, op, count, root). The message has both."""


class TimeoutError(UnisonoError, builtins.TimeoutError):
    """A wait passed its deadline (`UNISONO_TIMEOUT_S`). The message says which rank waited for which."""


class PeerLostError(UnisonoError, ConnectionError):
    """Another rank ended while this one still needed it. The message names the rank that ended."""


class ResourceError(UnisonoError, OSError):
    """The machine refused shared memory, a process, a socket or another resource, which the message names."""
