"""Messages between nodes by MPI: nonblocking, and polled, since MPI's own wait has no deadline."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..bootstrap_mpi import abandon
from ..clock import Clock
from ..errors import PeerLostError, TimeoutError, UnisonoError
from .engine import Part, Setting

__all__ = ["MpiEngine"]

_LOOK_S = 5e-3  # between two looks at the own node
_SPIN_S = 2e-4  # how long a wait keeps its core, where there are enough
_YIELD_S = 5e-3  # how long it only yields it; then it sleeps between polls
_NAP_S = 1e-4
_TAG = 1


class MpiEngine:
    """Over the bootstrap's own copy of the communicator, on which nothing else sends."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.mpi: Any = sys.modules["mpi4py.MPI"]
        self._comm = setting.bootstrap.communicator
        self._open: list[_Exchange] = []

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> _Exchange:
        """See `Engine.exchange`."""
        comm, byte = self._comm, self.mpi.BYTE
        begun = _Exchange(self, sends, receives)
        self._open.append(begun)
        try:
            for part in receives:
                begun.requests.append(comm.Irecv([part.data, byte], part.rank, _TAG))
            for part in sends:
                begun.requests.append(comm.Isend([part.data, byte], part.rank, _TAG))
        except self.mpi.Exception as error:
            raise PeerLostError(f"MPI could not begin an exchange between nodes: {error}") from error
        return begun

    def ended(self, exchange: _Exchange) -> None:
        """MPI touches its buffers no more."""
        self._open.remove(exchange)

    def close(self) -> None:
        """The communicator is the bootstrap's. What is still under way keeps its buffers."""
        if self._open:
            abandon(*self._open)
        self._open = []


class _Exchange:
    """Requests of the receives, then of the sends."""

    def __init__(self, engine: MpiEngine, sends: Sequence[Part], receives: Sequence[Part]) -> None:
        self._engine, self._sends, self._receives = engine, sends, receives
        self.requests: list[Any] = []

    def wait(self) -> None:
        """See `Pending.wait`."""
        mpi = self._engine.mpi
        test, requests = mpi.Request.Testall, self.requests
        statuses = [mpi.Status() for _ in requests]
        try:
            if not test(requests, statuses):
                self._poll(lambda: bool(test(requests, statuses)))
        except mpi.Exception as error:
            for part, status in zip(self._receives, statuses, strict=False):
                if mpi.Get_error_class(status.Get_error()) == mpi.ERR_TRUNCATE:
                    raise self._other_length(part, "more") from error
            raise PeerLostError(
                f"MPI lost the way between {self._engine.setting.topology} and {self._peers()}: {error}"
            ) from error
        self._engine.ended(self)
        for part, status in zip(self._receives, statuses, strict=False):
            got = status.Get_count(mpi.BYTE)
            if got != part.data.nbytes:
                raise self._other_length(part, f"{got} bytes")

    def _other_length(self, part: Part, sent: str) -> UnisonoError:
        setting = self._engine.setting
        return UnisonoError(
            f"{setting.who(part.rank)} sent {sent} where {setting.topology} expects {part.data.nbytes} "
            "bytes: make the same call on every rank (UNISONO_CHECK=1 compares them)."
        )

    def _poll(self, done: Any) -> None:
        setting = self._engine.setting
        clock, looked = Clock(), 0.0
        spinning = 0.0 if setting.topology.crowded else _SPIN_S
        while not done():
            now = clock()
            if now < spinning:
                continue
            if now < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
            if now - looked < _LOOK_S:
                continue
            looked = now
            setting.look()
            if now > setting.timeout_s:
                raise TimeoutError(
                    f"{setting.topology} has waited {setting.timeout_s:g} s for {self._peers()} over MPI: "
                    "see what that rank and the link between the nodes are doing, or raise UNISONO_TIMEOUT_S."
                )

    def _peers(self) -> str:
        """Those whose requests are not complete, each asked by itself: Testall says it only of all."""

        def complete(request: Any) -> bool:
            try:
                return bool(request.Test())
            except self._engine.mpi.Exception:
                return False

        parts = [*self._receives, *self._sends]
        open_ = {
            part.rank for part, request in zip(parts, self.requests, strict=True) if not complete(request)
        }
        return ", ".join(map(self._engine.setting.who, sorted(open_))) or "its peers"
