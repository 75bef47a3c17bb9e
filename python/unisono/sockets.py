"""Records between nodes over TCP sockets, for transports whose library has no receive that can be ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from . import _core

__all__ = ["RecordSockets"]

_LENGTH = struct.Struct("!I")  # bytes of the record that follows; 0: the sender leaves in good order
_MOST = 1 << 20  # bytes of a record
_KEY_BYTES = 16
_RANK = struct.Struct("!I")
_PATIENCE_S = 5.0  # with a stranger
_CLOSING_S = 2.0


class _Link:
    """The connection to a peer."""

    def __init__(self, peer: int, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self.peer = peer
        self.socket = connected
        self.coming = bytearray()  # part of a record
        self.unsent: deque[memoryview] = deque()  # with the lock
        self.lock = threading.Lock()
        self.left = False  # the peer has said so


class RecordSockets:
    """Connects all ranks with each other. A thread reads, and writes what a socket does not take at once."""

    def __init__(
        self, rank: int, size: int, all_gather: Callable[[bytes], list[bytes]], address: str, timeout_s: float
    ) -> None:
        """Connects. Collective.

        Args:
            rank: this rank.
            size: the number of ranks.
            all_gather: gathers every rank's bytes, in rank order.
            address: this host's, which the others reach.
            timeout_s: the deadline.

        Raises:
            OSError: a rank is not reached in time.
        """
        self._closed = False
        self._records: _core.Records | None = None
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, daemon=True)
        key = all_gather(os.urandom(_KEY_BYTES))[0]
        until = time.monotonic() + timeout_s
        with socket.create_server((address, 0), backlog=size) as listener:
            places = all_gather(f"{address} {listener.getsockname()[1]}".encode())
            links = {}
            for peer in range(rank):
                host, port = places[peer].decode().split()
                links[peer] = socket.create_connection((host, int(port)), timeout_s)
                links[peer].sendall(key + _RANK.pack(rank))
            while len(links) < size - 1:
                listener.settimeout(max(until - time.monotonic(), 0.001))
                came = listener.accept()[0]
                peer = _who(came, key)
                if rank < peer < size and peer not in links:
                    links[peer] = came
                else:
                    came.close()
        self._links = {peer: _Link(peer, link) for peer, link in links.items()}

    def carry(self, records: _core.Records) -> None:
        """See `unisono.transport.RecordTransport`."""
        self._records = records
        for link in self._links.values():
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._thread.start()

    def send_record(self, to: int, record: bytes) -> None:
        """See `unisono.transport.RecordTransport`."""
        link = self._links[to]
        with link.lock:
            link.unsent.append(memoryview(_LENGTH.pack(len(record)) + record))
            self._write(link)

    def _write(self, link: _Link) -> None:
        """Writes what the socket takes. Requires the lock."""
        assert self._records is not None
        try:
            while link.unsent:
                first = link.unsent[0]
                written = link.socket.send(first)
                if written < len(first):
                    link.unsent[0] = first[written:]
                    continue
                link.unsent.popleft()
                self._records.sent(link.peer)
        except BlockingIOError:
            pass
        except OSError as error:
            self._records.fail(link.peer, "it has closed its communicator" if link.left else str(error))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        with contextlib.suppress(KeyError, ValueError, OSError):  # the peer has left, or this rank
            if self._selector.get_key(link.socket).events != wanted:
                self._selector.modify(link.socket, wanted, link)

    def _run(self) -> None:
        while not self._closed and self._selector.get_map():
            for key, events in self._selector.select():
                if events & selectors.EVENT_WRITE:
                    with key.data.lock:
                        self._write(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)

    def _read(self, link: _Link) -> None:
        assert self._records is not None
        why = "the connection has ended"
        data = b""
        try:
            data = link.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            why = str(error)
        link.coming += data
        at = 0
        while len(link.coming) - at >= _LENGTH.size:
            length = _LENGTH.unpack_from(link.coming, at)[0]
            begin, end = at + _LENGTH.size, at + _LENGTH.size + length
            if length > _MOST:
                data, why = b"", "it has sent what is no record"
                break
            if end > len(link.coming):
                break
            if length == 0:
                link.left = True
            else:
                self._records.arrived(link.peer, bytes(link.coming[begin:end]))
            at = end
        del link.coming[:at]
        if not data:
            self._selector.unregister(link.socket)
            if not link.left and not self._closed:
                self._records.fail(link.peer, why)

    def close(self) -> None:
        """Tells the others that this rank leaves, and ends the thread. Idempotent, not collective."""
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            with contextlib.suppress(OSError), link.lock:
                if not link.unsent:
                    link.socket.send(_LENGTH.pack(0))
                link.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._records is not None:
            self._thread.join(_CLOSING_S)
        for link in self._links.values():
            link.socket.close()
        self._selector.close()


def _who(came: socket.socket, key: bytes) -> int:
    """Returns the rank at the other end, -1 if it is a stranger."""
    hello = b""
    came.settimeout(_PATIENCE_S)
    with contextlib.suppress(OSError):
        while len(hello) < _KEY_BYTES + _RANK.size:
            if not (data := came.recv(_KEY_BYTES + _RANK.size - len(hello))):
                return -1
            hello += data
    if len(hello) < _KEY_BYTES + _RANK.size or hello[:_KEY_BYTES] != key:
        return -1
    return int(_RANK.unpack(hello[_KEY_BYTES:])[0])
