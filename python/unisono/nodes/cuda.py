"""NCCL between nodes, on the caller's stream."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import torch

from .. import nccl
from ..clock import Clock
from ..errors import PeerLostError, ResourceError, TimeoutError, UnisonoError, UsageError
from .cuda_space import CudaSpace
from .engine import Part, Setting

__all__ = ["NcclEngine"]

_POLL_S = 1e-4
_WATCH_S = 0.1
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class _Queued:
    def wait(self) -> None:
        """The stream's order is all that is needed."""


@dataclass
class _UnderWay:
    """An exchange between two events of its stream; the second is there once NCCL has queued it."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event | None = None


class NcclEngine:
    """A communicator of NCCL's over all ranks; sends and receives are one group on the space's stream.

    Past the deadline NCCL is aborted, whoever waits: a thread of the engine's watches what is under way, but
    not what graphs have captured."""

    def __init__(self, setting: Setting, space: CudaSpace, device: int) -> None:
        self.setting, self._space = setting, space
        self._peers: set[int] = set()
        self._under_way: deque[_UnderWay] = deque()
        self._late = False  # NCCL has been aborted past the deadline
        self._aborting, self._closed = threading.Lock(), threading.Event()
        bootstrap, made = setting.bootstrap, b""
        problem = ""
        try:
            library = nccl.Library()
            made = library.unique_id() if bootstrap.rank == 0 else b"ready"
        except nccl.NcclError as error:
            problem = str(error)
        gathered = bootstrap.all_gather(made)
        if not all(gathered):
            raise UsageError(
                f"GPUs of several nodes speak by NCCL, which a rank lacks: {problem or 'see its error'}"
            )
        joined: Future[nccl.Communicator] = Future()

        def join() -> None:  # NCCL's own wait for the others has no deadline
            try:
                with torch.cuda.device(device):
                    comm = nccl.Communicator(library, bootstrap.rank, bootstrap.size, gathered[0], 0)
                joined.set_result(comm)
            except Exception as error:
                joined.set_exception(error)

        threading.Thread(target=join, name="unisono-nccl-init", daemon=True).start()
        if not self._within_deadline(joined.done):
            raise TimeoutError(
                f"{setting.topology} has waited {setting.timeout_s:g} s for the others to join NCCL: see "
                "what NCCL_DEBUG=WARN prints, and set NCCL_SOCKET_IFNAME to the interface between the nodes."
            )
        try:
            self._comm = joined.result()
        except nccl.NcclError as error:
            raise ResourceError(str(error)) from error
        self._watcher = threading.Thread(
            target=self._watch, args=(device,), name="unisono-nccl-watch", daemon=True
        )
        self._watcher.start()

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> _Queued:
        """See `Engine.exchange`."""
        stream, kind, bound = self._space.options["stream"], nccl.DTYPES["u8"], self._comm.bound
        peers = {part.rank for part in (*sends, *receives)}
        self._raise_if_late()
        self._peers |= peers
        under_way = None
        if not torch.cuda.is_current_stream_capturing():
            under_way = _UnderWay(torch.cuda.current_stream().record_event())
            self._under_way.append(under_way)
        try:
            self._comm.raise_if_failed()
            calls = [
                bound(name, part.data.data_ptr(), len(part.data), kind, part.rank, stream=stream)
                for name, parts in (("ncclSend", sends), ("ncclRecv", receives))
                for part in parts
            ]
            self._comm.grouped(calls)()
        except nccl.NcclError as error:
            self._raise_if_late()
            who = ", ".join(map(self.setting.who, sorted(peers)))
            raise PeerLostError(f"{self.setting.topology} cannot reach {who} over NCCL: {error}") from error
        if under_way is not None:
            under_way.ended = torch.cuda.current_stream().record_event()
        return _Queued()

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        """Waits for the stream. Raises TimeoutError past the deadline, and NCCL is aborted then."""
        if not self._within_deadline(stream.query):
            self._abort(late=True)
        self._raise_if_late()
        self._peers.clear()

    def close(self) -> None:
        """See `Engine.close`: an abort, since NCCL's orderly end is collective. What is under way ends before
        it, unless the node has failed or the deadline passes."""
        with suppress(UnisonoError):
            self._within_deadline(lambda: not (self._under_way and self._watcher.is_alive()))
        self._closed.set()
        self._abort()

    def _within_deadline(self, over: Callable[[], bool]) -> bool:
        clock = Clock()
        while not over():
            self.setting.look()
            if clock() > self.setting.timeout_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _abort(self, late: bool = False) -> None:
        with self._aborting:
            self._late |= late
            self._comm.abort()

    def _raise_if_late(self) -> None:
        if self._late:
            setting = self.setting
            who = ", ".join(map(setting.who, sorted(self._peers)))
            raise TimeoutError(
                f"{setting.topology} has waited {setting.timeout_s:g} s on its GPU for {who} over NCCL: "
                "see what those ranks and their links are doing, or raise UNISONO_TIMEOUT_S."
            )

    def _watch(self, device: int) -> None:
        """Whoever waits for a stream by CUDA itself would wait for a lost peer for ever."""
        torch.cuda.set_device(device)  # this thread's; on another, a query would make a context there
        mode = ctypes.c_int(_THREAD_LOCAL)  # a query of an event ends no other thread's capture then
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        oldest, clock = None, Clock()
        while not self._closed.wait(_WATCH_S):
            while self._under_way and (ended := self._under_way[0].ended) is not None and ended.query():
                self._under_way.popleft()
            if not self._under_way or not self._under_way[0].begun.query():
                continue
            if self._under_way[0] is not oldest:
                oldest, clock = self._under_way[0], Clock()
            elif clock() > self.setting.timeout_s:
                return self._abort(late=True)
