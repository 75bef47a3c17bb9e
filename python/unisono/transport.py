"""What carries messages between nodes: MPI, gloo, the fabric lane, or an object of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from . import _core

__all__ = ["Message", "Transport"]

Message = tuple[int, Any]  # a rank, and a view of its bytes: a numpy array of uint8, never empty


class Transport(Protocol):
    """Messages between the ranks of a communicator, which the core calls from one thread at a time.

    Between two ranks they arrive in the order of the exchanges. All ranks begin their exchanges in the same
    order, and both ends of a message are in the same one.

    Attributes:
        name: the library's name, for the text of errors.
    """

    name: str

    def exchange(
        self, exchange: _core.Exchange, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        """Begins all messages and returns without waiting for a peer.

        Args:
            exchange: its `complete`, `fail` or `other_length` is called once, from any thread, when the
                messages are over; the views may not be used after that.
            sends: (rank, bytes) of each message that goes.
            receives: (rank, bytes) of each message that comes.
        """

    def tell(self, failure: str) -> None:
        """Tells the other ranks, as far as they can be reached, of a failure. Does not wait for them."""

    def heard(self) -> str | None:
        """Returns what another rank has told. Called every few milliseconds of a wait: it must not block."""

    def close(self) -> None:
        """Frees what was made. Idempotent, not collective, from any thread."""
