"""Makes a call of a library for host memory work on GPU buffers, through pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec
import numpy as np

from unisono.bench.backends.base import Buffers
from unisono.bench.buffers import Pools, Region
from unisono.bench.device import HangError
from unisono.records import Case

WAIT_S = 60.0


def pinned_region(size: int) -> Region:
    """Returns `size` bytes of pinned host memory."""
    import torch

    return Region(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy())


def staged(
    case: Case,
    rank: int,
    buffers: Buffers,
    bind: Callable[[Case, Buffers], Callable[[], object]],
    region: Callable[[int], Region] = pinned_region,
) -> Callable[[], object]:
    """Returns the call of `bind` on host buffers, with copies before and after. The call returns when all is
    complete. The host buffers are in place if the device's are."""
    plain = msgspec.structs.replace(case, memory="plain")
    host = Pools([plain], rank, region).place(plain).buffers
    call = bind(case, host)
    source, sink = _bytes_of(buffers.x), _bytes_of(buffers.out)
    first, last = _host_bytes(host.x), _host_bytes(host.out)

    def around() -> None:
        if source is not None:
            first.copy_(source, non_blocking=True)
            _wait(source)
        call()
        if sink is not None:
            sink.copy_(last, non_blocking=True)
            _wait(sink)

    return around


def _bytes_of(tensor: Any) -> Any:
    import torch

    return None if tensor is None else tensor.reshape(-1).view(torch.uint8)


def _host_bytes(array: Any) -> Any:
    import torch

    return None if array is None else torch.from_numpy(array.reshape(-1).view(np.uint8))


def _wait(tensor: Any) -> None:
    """Waits until the current stream of the tensor's GPU is empty. Returns at once for one of the CPU."""
    import torch

    if not tensor.is_cuda:
        return
    stream, deadline = torch.cuda.current_stream(tensor.device), monotonic() + WAIT_S
    while not stream.query():
        if monotonic() > deadline:
            raise HangError(f"a copy between GPU and host memory was not done after {WAIT_S:.0f} s.")
