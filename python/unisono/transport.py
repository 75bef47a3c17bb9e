"""The protocol of a transport, which carries messages between nodes: MPI, gloo, the fabric or a program's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from . import _core

__all__ = ["Message", "RecordTransport", "Transport"]

Message = tuple[int, Any]  # a rank, and a view of its bytes: a numpy array of uint8, never empty


class Transport(Protocol):
    """Carries messages between the ranks of a communicator. The core calls it from one thread at a time.

    Order: between two ranks, messages arrive in the order of the exchanges. All ranks begin their exchanges
    in the same order, and both ends of a message belong to the same exchange. Messages with tags need a
    RecordTransport.

    Attributes:
        name: the library's name, for the text of errors.
    """

    name: str

    def exchange(
        self, exchange: _core.Exchange, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        """Begins all messages and returns without waiting for a peer.

        Args:
            exchange: the transport calls `complete`, `fail` or `other_length` once, from any thread, when the
                messages are over. The transport may not use the views after that.
            sends: (rank, bytes) of each message to send.
            receives: (rank, bytes) of each message to receive.
        """

    def tell(self, failure: str) -> None:
        """Sends the text of a failure to all ranks that can be reached. Does not wait for them."""

    def heard(self) -> str | None:
        """Returns the failure that another rank has sent, or None. Must not block: waits call it every few
        milliseconds."""

    def close(self) -> None:
        """Frees all resources. Idempotent, not collective, from any thread."""


class RecordTransport(Transport, Protocol):
    """Carries records too, of which messages with tags are made: short messages that no receive has asked
    for. All ranks have such a transport, or none.

    Order: between two ranks, records arrive in the order in which they were sent.
    """

    def carry(self, records: _core.Records) -> None:
        """Begins to carry records. Called once, before any is sent.

        Args:
            records: the transport calls `arrived` for each record that has come, `sent` when the oldest
                record to a rank needs this process no more, and `fail` when a peer is lost, from any thread.
        """

    def send_record(self, to: int, record: bytes) -> None:
        """Sends a record, and returns without waiting for the peer. At most 16 to a rank are under way.

        Called from one thread at a time, also while another one calls `exchange`.
        """
