"""Across nodes on GPUs: torch for scratch and sums, NCCL between nodes, all of it on the caller's stream."""

from __future__ import annotations

import ctypes
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from .. import nccl
from ..clock import Clock
from ..errors import PeerLostError, ResourceError, TimeoutError, UnisonoError, UsageError
from .engine import Part, Setting
from .space import Quantised
from .torch_wire import decode, encode

__all__ = ["CudaSpace", "NcclEngine", "flat"]

_POLL_S = 1e-4
_WATCH_S = 0.1
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_E4M3_OVERFLOW = 464.0  # half way from 448, which a tie rounds to, to what would be the next number
_TYPES = {
    "f32": (torch.float32, torch.float32),
    "f64": (torch.float64, torch.float64),
    "f16": (torch.float16, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "i8": (torch.int8, torch.int32),
    "u8": (torch.uint8, torch.int32),
    "i32": (torch.int32, torch.int64),
    "i64": (torch.int64, torch.int64),
    "f8e4m3": (torch.float8_e4m3fn, torch.float32),
    "f8e5m2": (torch.float8_e5m2, torch.float32),
}  # a dtype's type, and the type in which it is combined (numeric.hpp has the same widths)


def flat(x: Any) -> Any:
    """A GPU array as bytes, without a copy."""
    tensor = x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)
    return tensor.detach().reshape(-1).view(torch.uint8)


class CudaSpace:
    """Torch tensors of one GPU; see `Space`. Work is queued on the stream of `on`."""

    grain = 1 << 20  # NCCL's start is some 20 us, and nothing else runs on the stream meanwhile

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.options: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._last: torch.cuda.Event | None = None  # the end of the last call
        self._captured = False  # whether a graph may use what `_kept` holds
        self._replaced: list[Any] = []  # by larger scratch, and perhaps still used by a graph

    def handle(self, stream: Any) -> int:
        """Of a stream: torch's or cupy's, or a handle; None: the current one."""
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        named = (getattr(stream, name) for name in ("cuda_stream", "ptr", "handle") if hasattr(stream, name))
        try:
            return operator.index(next(named, stream))
        except TypeError:
            raise UsageError(
                f"{stream!r} is not a stream: pass a torch or cupy stream, or the handle as a number."
            ) from None

    def stream(self, handle: int) -> torch.cuda.Stream:
        """Torch's, of that handle."""
        if handle == 0:  # of an ExternalStream(0) torch makes a new stream
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(handle, self._device)

    @contextmanager
    def on(self, handle: int) -> Iterator[None]:
        """A call: everything inside is queued on the stream of that handle, behind the call before, whose
        scratch it takes. What a graph captures is ordered by whoever launches it."""
        with torch.cuda.stream(stream := self.stream(handle)):
            captured = torch.cuda.is_current_stream_capturing()
            self._captured |= captured
            if self._last is not None and not captured:
                stream.wait_event(self._last)
            self.options["stream"] = handle
            try:
                yield
            finally:
                if not captured:
                    self._last = stream.record_event()

    def scratch(self, name: str, size: int) -> Any:
        """See `Space`."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            if kept is not None and self._captured:
                self._replaced.append(kept)
            elif kept is not None:  # another stream's, perhaps, and still in use on this one
                kept.record_stream(torch.cuda.current_stream(self._device))
            kept = self._kept[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return kept[:size]

    def copy(self, to: Any, source: Any) -> None:
        """See `Space`."""
        if to.data_ptr() != source.data_ptr():
            to.copy_(source)

    def combine(self, out: Any, prior: Any, sources: Sequence[Any], dtype: str, op: str, ranks: int) -> None:
        """See `Space`; the arithmetic is that of numeric.hpp."""
        kind, wide = _TYPES[dtype]
        values = iter([source.view(kind).to(wide) for source in sources])
        total = next(values) if prior is None else prior.view(wide)
        for value in values:
            match op:
                case "prod":
                    total = total * value
                case "min" | "max":
                    better = value < total if op == "min" else value > total
                    total = torch.where(better | value.isnan(), value, total)
                case _:
                    total = total + value
        if ranks == 0:
            out.view(wide).copy_(total)
            return
        if op == "avg" and wide.is_floating_point:
            total = self._divided(total, ranks)
        elif op == "avg":
            total = torch.div(total, ranks, rounding_mode="trunc")
        if dtype == "f8e4m3":  # torch saturates: what rounds to more than 448 is NaN
            total = torch.where(total.abs() > _E4M3_OVERFLOW, torch.nan, total)
        out.view(kind).copy_(total.to(kind))

    def encode(self, out: Any, source: Any, count: int, what: Quantised) -> None:
        """See `Space`."""
        encode(out, source.view(_TYPES[what.dtype][0]).to(torch.float32), what.wire)

    def combine_encoded(self, out: Any, sources: Sequence[Any], count: int, what: Quantised) -> None:
        """See `Space`."""
        total = decode(sources[0], count, what.wire)
        for source in sources[1:]:
            total = total + decode(source, count, what.wire)
        encode(out, self._divided(total, len(sources)) if what.op == "avg" else total, what.wire)

    def decode(self, out: Any, source: Any, count: int, what: Quantised) -> None:
        """See `Space`."""
        out.view(_TYPES[what.dtype][0]).copy_(decode(source, count, what.wire))

    def _divided(self, total: Any, ranks: int) -> Any:
        # by a tensor on the GPU: by a number torch multiplies with its reciprocal, which rounds otherwise
        return total / torch.full((), ranks, dtype=total.dtype, device=self._device)


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
