"""The common start of a sample on GPUs.

Every rank queues a wait, then the timed work: the host's work is done before any GPU starts. When all ranks
have queued, they meet on the host (see `unisono.bench.align`). Rank 0 then writes one word of shared memory
that all GPUs poll. No library under test takes part, and launches are not timed. The GPUs start within the
time until all see the word, about a microsecond.

The wait is a kernel of one thread, which polls without a pause and has a deadline of its own. A build without
CUDA waits by the stream operation cuStreamWaitValue32.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

from unisono.bench.align import shared_words
from unisono.bench.control import Control
from unisono.bench.cuda.runtime import HOST_REGISTER_PORTABLE_MAPPED, CudaError, Driver, Runtime

PAGE_WORDS = 512  # one page of 64-bit words
FAR_AHEAD = 1 << 20
_MASK = 0xFFFFFFFF


def kernels() -> Any:
    """Returns unisono._core.links (src/cuda/links.hpp), or None in a build without CUDA."""
    return getattr(import_module("unisono._core"), "links", None)


class Gate:
    """One word of host memory, in a page of its own (`words`), for which streams of any GPU can wait."""

    def __init__(self, words: memoryview, runtime: Runtime, deadline_s: float) -> None:
        self._runtime, self._deadline_s = runtime, deadline_s
        self._flag = words.cast("B").cast("I")
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._flag))
        runtime("cudaHostRegister", self._host, len(self._flag) * 4, HOST_REGISTER_PORTABLE_MAPPED)
        self._address = runtime.device_pointer(self._host)
        self._kernels = kernels()
        self._driver = None if self._kernels is not None else Driver()

    def arm(self, stream: int, value: int) -> None:
        """Queues a wait on a stream of the current GPU, until the word is `value` or, cyclically, beyond."""
        if self._driver is None:
            self._kernels.hold(stream, self._address, value & _MASK, self._deadline_s)
        else:
            self._driver.wait_value(stream, self._address, value)

    def open(self, value: int) -> None:
        """Releases all waits for `value`."""
        self._flag[0] = value & _MASK

    def close(self) -> None:
        with contextlib.suppress(CudaError):
            self._runtime("cudaHostUnregister", self._host)


class StartLine:
    """The start line of all ranks, which make, arm and release it in step. Raises CudaError without a shared
    page."""

    def __init__(
        self, control: Control, align: Callable[[], object], runtime: Runtime, stream: int, deadline_s: float
    ) -> None:
        self._rank, self._align, self._stream, self._epoch = control.rank, align, stream, 0
        words = shared_words(control, PAGE_WORDS)
        if words is None:
            raise CudaError("the ranks share no memory: the start of a sample needs them on one machine.")
        self._gate = Gate(words, runtime, deadline_s)

    def arm(self) -> None:
        """Queues the wait. Work that is queued after it starts at the release."""
        self._epoch += 1
        self._gate.arm(self._stream, self._epoch)

    def release(self) -> None:
        """Waits for all ranks, then releases the GPUs, also if the alignment raises."""
        try:
            self._align()
        except BaseException:
            self._gate.open(self._epoch + FAR_AHEAD)
            raise
        if self._rank == 0:
            self._gate.open(self._epoch)

    def pass_by(self) -> None:
        """Meets the other ranks without queued work."""
        self._epoch += 1
        self.release()

    def close(self) -> None:
        self._gate.close()
