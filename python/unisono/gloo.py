"""The gloo transport between nodes, from PyTorch, for ranks that torchrun or `unisono run` started."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from .errors import ResourceError, TimeoutError, UnisonoError, UsageError
from .machine import network
from .sockets import RecordSockets
from .transport import Message

__all__ = ["INTERFACE_VARIABLE", "LOOPBACK", "GlooTransport", "make_group", "make_store"]

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
_NO_HOST = "192.0.2.1"  # no host's (RFC 5737): a target whose route is the default route
_LENGTH, _BYTES = 1, 2  # tags
_FAILURE = "unisono failure"  # a key of the store
_PATIENCE = 1.5  # gloo's deadline over the communicator's
_LISTEN_S = 0.05  # between two looks at the store
_TELLING_S = 0.5
_CLOSING_S = 2.0


def make_store(
    rank: int, all_gather: Callable[[bytes], list[bytes]], limit: timedelta, address: str = LOOPBACK
) -> Any:
    """Returns torch's TCPStore, which rank 0 serves at its `address`, on a port of the system's choice.
    Collective. Raises RuntimeError if the store cannot be served, or is not reached within `limit`."""
    store_of: Any = importlib.import_module("torch.distributed").TCPStore
    store, port = None, b""
    if rank == 0:
        store = store_of(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        port = str(store.port).encode()
    host, at = all_gather(address.encode() + b" " + port)[0].decode().split()
    if store is None:
        store = store_of(host, int(at), is_master=False, wait_for_workers=False, timeout=limit)
    return store


def make_group(
    rank: int, size: int, all_gather: Callable[[bytes], list[bytes]], timeout_s: float
) -> tuple[Any, Any]:
    """Returns a gloo process group of all ranks, and rank 0's store, at which they meet. Collective.

    Raises:
        UsageError: PyTorch is missing, or a rank knows no address of its own that the others reach.
        TimeoutError, ResourceError: the ranks do not reach each other.
    """
    try:
        dist: Any = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise UsageError(
            f"PyTorch, whose gloo carries data between nodes, cannot be imported ({error}): install torch, "
            "or start the ranks with mpiexec and mpi4py."
        ) from error
    address = _reached_address(all_gather)
    limit = timedelta(seconds=timeout_s)
    try:
        store = make_store(rank, all_gather, limit, address)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(store, rank, size, options), store
    except RuntimeError as error:
        if isinstance(error, UnisonoError):
            raise
        text = " ".join(str(error).split())
        kind = TimeoutError if _timed_out(text) else ResourceError
        raise kind(
            f"rank {rank} cannot join the others over gloo from {address} ({text[:200]}): see that every "
            f"node reaches rank 0's, and set {INTERFACE_VARIABLE} to the interface between them."
        ) from error


def _timed_out(text: str) -> bool:
    return "timed out" in text.lower() or "timeout" in text.lower()


def _reached_address(all_gather: Callable[[bytes], list[bytes]]) -> str:
    """Returns this host's address, which all ranks reach. Collective. Raises UsageError if there is none."""
    one_network = len(set(all_gather(network().encode()))) == 1
    return LOOPBACK if one_network else _address()


def _address() -> str:
    """Returns this host's address on the network to the other nodes. Raises UsageError if there is none."""
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    try:
        # rank 0's host may know its own name as a loopback address (Debian's /etc/hosts)
        for target in (os.environ.get("MASTER_ADDR") or _NO_HOST, _NO_HOST):
            if not (address := _source(target, interface)).startswith("127."):
                return address
        raise OSError(f"only {address}")
    except OSError as error:
        raise UsageError(
            f"this host knows no way to the other nodes ({error}): set {INTERFACE_VARIABLE} to its "
            "network interface, or MASTER_ADDR to rank 0's address, on every rank."
        ) from error


def _source(target: str, interface: str) -> str:
    """Returns the address from which the kernel sends to `target`. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        probe.connect((target, 9))  # sends nothing
        return str(probe.getsockname()[0])


class GlooTransport:
    """Carries messages over a process group of all ranks. A thread waits: gloo's wait cannot be polled.

    Each message is two messages of gloo, the length and the bytes: gloo ends the process if a receive has
    another length than its send. Records go over sockets: gloo cannot end a wait for a message that may never
    come. See `unisono.transport.RecordTransport`.
    """

    name = "gloo"

    def __init__(self, bootstrap: Any, timeout_s: float) -> None:
        self._torch: Any = importlib.import_module("torch")
        # the core's own deadline comes first: it names the peer
        self._limit = timedelta(seconds=timeout_s * _PATIENCE + 1)
        self._group, self._store = make_group(
            bootstrap.rank, bootstrap.size, bootstrap.all_gather, self._limit.total_seconds()
        )
        try:
            self._sockets = RecordSockets(
                bootstrap.rank,
                bootstrap.size,
                bootstrap.all_gather,
                _reached_address(bootstrap.all_gather),
                self._limit.total_seconds(),
            )
        except OSError as error:
            raise ResourceError(
                f"rank {bootstrap.rank} cannot connect with the others ({error}): see that all nodes reach "
                f"each other, and set {INTERFACE_VARIABLE} to the interface between them."
            ) from error
        self.carry = self._sockets.carry
        self.send_record = self._sockets.send_record
        self._heard: str | None = None
        self._busy = False  # an exchange is under way, or has failed
        self._closed = threading.Event()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._work, self._listen)]
        for thread in self._threads:
            thread.start()

    def exchange(self, exchange: Any, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """See `unisono.transport.Transport`."""
        job = _Job(exchange, [], [])
        rank = -1
        try:
            for rank, data in receives:
                length = self._torch.zeros(1, dtype=self._torch.int64)
                job.receives.append((rank, data, length, self._group.recv([length], rank, _LENGTH)))
            for rank, data in sends:
                length = self._torch.tensor([data.nbytes], dtype=self._torch.int64)
                bytes_ = self._torch.from_numpy(data)
                job.sends.extend(
                    (
                        (rank, self._group.send([length], rank, _LENGTH), length),
                        (rank, self._group.send([bytes_], rank, _BYTES), bytes_),
                    )
                )
        except RuntimeError as error:
            exchange.fail(rank, _brief(error))
        else:
            self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._busy = True
            rank = -1
            try:
                under_way = []
                for rank, data, length, work in job.receives:
                    work.wait(self._limit)
                    if (sent := int(length[0])) != data.nbytes:
                        job.exchange.other_length(rank, sent, data.nbytes)
                        return
                    under_way.append((rank, self._group.recv([self._torch.from_numpy(data)], rank, _BYTES)))
                for rank, work in under_way:
                    work.wait(self._limit)
                    job.exchange.arrived(rank)
                for rank, work, _ in job.sends:
                    job.exchange.awaits(rank)  # also after its own messages have come
                    work.wait(self._limit)
                    job.exchange.arrived(rank)
            except RuntimeError as error:
                job.exchange.fail(rank, _brief(error))
                return
            self._busy = False
            job.exchange.complete()

    def tell(self, failure: str) -> None:
        """Writes the failure to the store. See `unisono.transport.Transport`."""

        def write() -> None:
            with contextlib.suppress(RuntimeError):
                self._store.set(_FAILURE, failure)

        writer = threading.Thread(target=write, daemon=True)  # rank 0, which serves the store, may be gone
        writer.start()
        writer.join(_TELLING_S)

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(_LISTEN_S) and not self._store.check([_FAILURE]):
                pass
            if not self._closed.is_set():
                self._heard = self._store.get(_FAILURE).decode()

    def heard(self) -> str | None:
        """See `unisono.transport.Transport`."""
        return self._heard

    def close(self) -> None:
        """See `unisono.transport.Transport`.

        Waits for the threads: a thread that returns from gloo after Python's end kills the process.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._jobs.put(None)
        self._sockets.close()
        if self._busy:
            with contextlib.suppress(RuntimeError):
                self._group.shutdown()  # ends the thread's waits
        for thread in self._threads:
            thread.join(_CLOSING_S)


class _Job(NamedTuple):
    exchange: Any
    receives: list[tuple[int, Any, Any, Any]]  # rank, bytes, the length to come, gloo's receive of the length
    sends: list[tuple[int, Any, Any]]  # rank, gloo's send, the memory that the send reads


def _brief(error: RuntimeError) -> str:
    return " ".join(str(error).split())[-200:]
