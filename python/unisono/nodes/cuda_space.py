"""GPU memory across nodes: torch for scratch, copies and sums, all of it on the caller's stream."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..errors import UsageError
from .space import Quantised
from .torch_wire import decode, encode

__all__ = ["CudaSpace", "flat"]

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
        self._pool: Any = None  # what torch allocates in a captured call, which nothing else may be given

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
            if captured and self._pool is None:
                self._pool = torch.cuda.MemPool()
            pool = torch.cuda.use_mem_pool(self._pool, self._device) if captured else nullcontext()
            try:
                with pool:
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
