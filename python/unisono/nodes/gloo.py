"""Messages between nodes by gloo, which PyTorch brings: for ranks that torchrun or `unisono run` started."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ..errors import PeerLostError, ResourceError, TimeoutError, UnisonoError, UsageError
from .engine import Part, Setting
from .topology import network

__all__ = ["INTERFACE_VARIABLE", "LOOPBACK", "GlooEngine", "make_group", "make_store"]

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
_NO_HOST = "192.0.2.1"  # RFC 5737: what the default route is asked for
_TAG = 1


def make_store(
    rank: int, all_gather: Callable[[bytes], list[bytes]], limit: timedelta, address: str = LOOPBACK
) -> Any:
    """torch's TCPStore, which rank 0 serves at its `address`, on a port that the system chooses. Collective.
    Raises RuntimeError where it cannot be served, or is not reached within `limit`."""
    store_of: Any = importlib.import_module("torch.distributed").TCPStore
    store, port = None, b""
    if rank == 0:
        store = store_of(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        port = str(store.port).encode()
    host, at = all_gather(address.encode() + b" " + port)[0].decode().split()
    if store is None:
        store = store_of(host, int(at), is_master=False, wait_for_workers=False, timeout=limit)
    return store


def make_group(rank: int, size: int, all_gather: Callable[[bytes], list[bytes]], timeout_s: float) -> Any:
    """A gloo process group of all ranks, which meet at a store of rank 0. Collective.

    Raises UsageError where PyTorch is missing or the ranks know no address of each other, TimeoutError or
    ResourceError where they do not reach each other."""
    try:
        dist: Any = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise UsageError(
            f"PyTorch, whose gloo carries data between nodes, cannot be imported ({error}): install torch, "
            "or start the ranks with mpiexec and mpi4py."
        ) from error
    one_network = len(set(all_gather(network().encode()))) == 1
    address = LOOPBACK if one_network else _address()
    limit = timedelta(seconds=timeout_s)
    try:
        store = make_store(rank, all_gather, limit, address)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(store, rank, size, options)
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


def _address() -> str:
    """This host's address on the way to the others."""
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
    """The address that the kernel sends from to `target`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        probe.connect((target, 9))  # sends nothing
        return str(probe.getsockname()[0])


class GlooEngine:
    """A process group of all ranks, of which only those of different nodes speak."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        bootstrap = setting.bootstrap
        self._group = make_group(bootstrap.rank, bootstrap.size, bootstrap.all_gather, setting.timeout_s)
        self._from_numpy = importlib.import_module("torch").from_numpy

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> _Exchange:
        """See `Engine.exchange`."""
        group, tensor, works = self._group, self._from_numpy, []
        rank = receives[0].rank if receives else sends[0].rank
        try:
            for part in receives:
                rank = part.rank
                works.append((group.recv([tensor(part.data)], rank, _TAG), rank))
            for part in sends:
                rank = part.rank
                works.append((group.send([tensor(part.data)], rank, _TAG), rank))
        except RuntimeError as error:
            raise self._failed(rank, error) from error
        return _Exchange(self, works)

    def _failed(self, rank: int, error: RuntimeError) -> Exception:
        setting, text = self.setting, " ".join(str(error).split())
        if _timed_out(text):
            return TimeoutError(
                f"{setting.topology} has waited {setting.timeout_s:g} s for {setting.who(rank)} over gloo: "
                "see what that rank and the link between the nodes are doing, or raise UNISONO_TIMEOUT_S."
            )
        return PeerLostError(
            f"{setting.topology} has lost {setting.who(rank)} over gloo ({text[-200:]}): look at that "
            "process's own output, then start the ranks again."
        )

    def close(self) -> None:
        """See `Engine.close`."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.shutdown()


class _Exchange:
    def __init__(self, engine: GlooEngine, works: list[tuple[Any, int]]) -> None:
        self._engine, self._works = engine, works

    def wait(self) -> None:
        """See `Pending.wait`."""
        deadline = time.monotonic() + self._engine.setting.timeout_s
        for work, rank in self._works:
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
            except RuntimeError as error:
                raise self._engine._failed(rank, error) from error
