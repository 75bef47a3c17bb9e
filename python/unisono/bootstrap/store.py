"""The bootstrap over a torch.distributed Store, or over any store of that shape, for runs of torchrun."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import itertools
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ..errors import PeerLostError, ResourceError, TimeoutError, UnisonoError, UsageError
from ..launch.detect import World
from .base import at_exit, check_payload, check_timeout
from .hub import Decoder, FrameError, Kind, encode

__all__ = ["StoreBootstrap", "from_torchrun"]

_PREFIX = "unisono"
_FAREWELL_S = 5.0  # how long the rank that serves the Store waits at exit until the others have read
_EARLY_S = 0.05  # a Store may round its timeout down
_counter = itertools.count()
_opened: dict[str, Any] = {}  # the launcher's Store, by address
_opening = threading.Lock()


class StoreBootstrap:
    """All_gather through a Store: each rank sets one key, then gets the keys of the others.

    The keys are `unisono/<n>/<sequence>/<rank>`; n counts the bootstraps that a rank made on this Store.
    Every rank must make its bootstraps in the same order. A part of the ranks needs a
    `torch.distributed.PrefixStore` of its own.

    Args:
        store: an object with `set(key: str, value: bytes)` and `get(key: str) -> bytes`, which blocks until
            the key is there. `wait(keys, timedelta)`, `add(key, int)` and `delete_key(key)` are used if the
            store has them. Without `wait`, the Store's own timeout limits a get.
        rank, size: number of this process, and how many there are.
        timeout_s: how long one all_gather waits for the last rank.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float = 30.0) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout_s = check_timeout(timeout_s)
        self._sequence = 0
        self._closed = False
        self._channel = next(_counter)
        if hasattr(store, "add"):
            try:
                self._channel = int(store.add(f"{_PREFIX}/made/{rank}", 1)) - 1
            except Exception as error:
                raise ResourceError(f"the Store refused a key: {error}") from error

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Bootstrap.all_gather`. An error names the first rank that is missing."""
        if self._closed:
            raise UsageError("this bootstrap is closed")
        data = check_payload(data)
        sequence, self._sequence = self._sequence, self._sequence + 1
        deadline = time.monotonic() + self._timeout_s
        message = encode(Kind.DATA, self.rank, (self._channel, sequence), data)
        try:
            self._store.set(self._key(sequence, self.rank), message)
        except Exception as error:
            raise PeerLostError(f"the Store took no key from rank {self.rank}: {error}") from error
        gathered = [
            data if rank == self.rank else self._decode(rank, sequence, self._get(rank, sequence, deadline))
            for rank in range(self.size)
        ]
        if sequence > 0 and hasattr(self._store, "delete_key"):
            # Tidying only: a rank that set a key of this all_gather has read all of the one before.
            with contextlib.suppress(Exception):
                self._store.delete_key(self._key(sequence - 1, self.rank))
        return gathered

    def close(self) -> None:
        """Drops the Store. Idempotent."""
        self._closed = True
        self._store = None

    def _key(self, sequence: int, rank: int) -> str:
        return f"{_PREFIX}/{self._channel}/{sequence}/{rank}"

    def _get(self, rank: int, sequence: int, deadline: float) -> object:
        key = self._key(sequence, rank)
        try:
            if hasattr(self._store, "wait"):
                self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
            return self._store.get(key)
        except Exception as error:  # torch raises several classes, other Stores their own
            if time.monotonic() >= deadline - _EARLY_S or isinstance(error, builtins.TimeoutError):
                raise TimeoutError(
                    f"rank {rank} did not reach all_gather {sequence} of communicator {self._channel}, in "
                    f"which rank {self.rank} waited {self._timeout_s:g} s"
                ) from error
            text = f"the Store was lost while rank {self.rank} waited for rank {rank}"
            raise PeerLostError(
                f"{text} (has the rank or the agent that serves it ended?): {error}"
            ) from error

    def _decode(self, rank: int, sequence: int, value: object) -> bytes:
        key = self._key(sequence, rank)
        if not isinstance(value, bytes | bytearray):
            raise UnisonoError(
                f"the Store gave a {type(value).__name__} for the key {key!r} of rank {rank}, not bytes"
            )
        decoder = Decoder()
        try:
            frames = decoder.feed(bytes(value))
        except FrameError as error:
            raise UnisonoError(
                f"the Store holds for rank {rank} bytes that are no Unisono message: {error}"
            ) from error
        if len(frames) != 1 or decoder.partial:
            raise UnisonoError(
                f"the Store holds a cut message for rank {rank} (key {key!r}, {len(value)} bytes)"
            )
        header, payload = frames[0]
        if (header.kind, header.rank, header.channel, header.sequence) != (
            Kind.DATA,
            rank,
            self._channel,
            sequence,
        ):
            raise UnisonoError(
                f"the Store holds for rank {rank} a message that does not fit its key {key!r}: {header}"
            )
        return payload


def from_torchrun(world: World, timeout_s: float, env: Mapping[str, str]) -> StoreBootstrap:
    """Returns the bootstrap over the Store at MASTER_ADDR:MASTER_PORT, by torch's env:// rendezvous.

    The Store is opened once, and kept. If no agent serves the Store, rank 0 does, and waits up to 5 s at exit
    until the others have finished with it.

    Raises:
        UsageError: torch or an address is missing.
        TimeoutError: nobody serves the Store in time.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UsageError(
                f"RANK and WORLD_SIZE are set, but {name} is not: start the program with torchrun, or set it"
            )
    try:
        distributed: Any = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise UsageError(
            f"RANK and WORLD_SIZE are set, as torchrun does, but torch cannot be imported ({error}): "
            "install torch, or start the program with `unisono run` or mpirun"
        ) from error
    at = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    with _opening:
        if at not in _opened:
            _opened[at] = _open(distributed, world, timeout_s, at)
            if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                at_exit.callback(_farewell, _opened[at], world)
    return StoreBootstrap(_opened[at], world.rank, world.size, timeout_s)


def _open(distributed: Any, world: World, timeout_s: float, at: str) -> Any:
    try:
        attempt = distributed.rendezvous(
            f"env://?rank={world.rank}&world_size={world.size}", timeout=timedelta(seconds=timeout_s)
        )
        store, _, _ = next(attempt)
    except ValueError as error:
        raise UsageError(f"MASTER_ADDR and MASTER_PORT ({at}) are no address of a Store: {error}") from error
    except Exception as error:
        raise TimeoutError(
            f"no Store at MASTER_ADDR:MASTER_PORT ({at}) within {timeout_s:g} s: {error}"
        ) from error
    return store


def _farewell(store: Any, world: World) -> None:
    names = [f"{_PREFIX}/done/{rank}" for rank in range(world.size)]
    with contextlib.suppress(Exception):  # a lost Store must not fail the exit
        store.set(names[world.rank], b"1")
        if world.rank == 0:
            store.wait(names, timedelta(seconds=_FAREWELL_S))
