"""The common start of a sample on GPUs.

Every rank queues a wait, then what is timed: the host's work is done before any GPU starts. When all ranks
have queued, they meet on the host (see `unisono.bench.align`) and rank 0 writes one word of memory that they
share and that all GPUs poll. So no library under test takes part, launch times are not in the figure, and the
GPUs start within the time in which they see that word, about a microsecond.

The wait is a kernel of one thread, which polls without a pause and has a deadline of its own; where this
build has none, the stream operation cuStreamWaitValue32.
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
    """unisono._core.links (src/cuda/links.hpp), None where the extension was built without CUDA."""
    return getattr(import_module("unisono._core"), "links", None)


class Gate:
    """One word of host memory, in a page of its own (`words`), that streams of any GPU can be made to wait
    for."""

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
        """Lets go whatever waits for `value`."""
        self._flag[0] = value & _MASK

    def close(self) -> None:
        with contextlib.suppress(CudaError):
            self._runtime("cudaHostUnregister", self._host)


class StartLine:
    """Made, armed and released on all ranks in step. Raises CudaError where the shared page cannot be had."""

    def __init__(
        self, control: Control, align: Callable[[], object], runtime: Runtime, stream: int, deadline_s: float
    ) -> None:
        self._rank, self._align, self._stream, self._epoch = control.rank, align, stream, 0
        words = shared_words(control, PAGE_WORDS)
        if words is None:
            raise CudaError("the ranks share no memory: the start of a sample needs them on one machine.")
        self._gate = Gate(words, runtime, deadline_s)

    def arm(self) -> None:
        """Queues the wait: what is queued behind it starts at the release."""
        self._epoch += 1
        self._gate.arm(self._stream, self._epoch)

    def release(self) -> None:
        """Returns once all ranks are here and the GPUs have been let go. What the alignment raises goes to
        the caller, and the GPUs are let go all the same."""
        try:
            self._align()
        except BaseException:
            self._gate.open(self._epoch + FAR_AHEAD)
            raise
        if self._rank == 0:
            self._gate.open(self._epoch)

    def pass_by(self) -> None:
        """Meets the other ranks without having queued anything."""
        self._epoch += 1
        self.release()

    def close(self) -> None:
        self._gate.close()
