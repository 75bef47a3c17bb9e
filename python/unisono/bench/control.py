"""Messages between the ranks about the bench itself: over the bootstrap, never over a measured library."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Bootstrap(Protocol):
    """The bootstrap's call, see unisono.bootstrap."""

    rank: int
    size: int

    def all_gather(self, data: bytes) -> list[bytes]: ...


class _Message(msgspec.Struct):
    """One rank's part of an exchange in a step: bytes, or the end of its step, with an error if any."""

    data: bytes = b""
    ended: bool = False
    error: str | None = None


class Control:
    """Exchanges decisions of rank 0 and reports of all ranks. All ranks call methods in the same order."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self.rank, self.size = bootstrap.rank, bootstrap.size
        self._in_step = False
        self._failed: tuple[int, str] | None = None  # in this step

    def from_root(self, decide: Callable[[], T], kind: type[T]) -> T:
        """Returns the result of `decide` on rank 0, on every rank. Calls `decide` only on rank 0."""
        sent = msgspec.msgpack.encode(decide()) if self.rank == 0 else b""
        return msgspec.msgpack.decode(self.gather_bytes(sent)[0], type=kind)

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Returns every rank's `value`, in rank order."""
        return [
            msgspec.msgpack.decode(data, type=kind)
            for data in self.gather_bytes(msgspec.msgpack.encode(value))
        ]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's bytes. In a step, raises RuntimeError if the step of any rank has ended."""
        if not self._in_step:
            return self._bootstrap.all_gather(data)
        everyone = self._exchange(_Message(data))
        for rank, message in enumerate(everyone):
            if message.ended:
                raise RuntimeError(f"rank {rank} exchanges no more: {message.error or 'it is done'}")
        return [message.data for message in everyone]

    def step(self, work: Callable[[], str | None]) -> tuple[int, str] | None:
        """Runs `work`, in which the ranks may exchange bytes and any rank may fail.

        Once the work of one rank has ended, an exchange of another raises there, so that no rank waits and
        all stay in step. Returns (rank, text) of the first error that `work` returned or raised on any rank,
        the same on every rank."""
        self._failed, self._in_step = None, True
        try:
            error = work()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        finally:
            self._in_step = False
        while not all(message.ended for message in self._exchange(_Message(ended=True, error=error))):
            pass
        return self._failed

    def _exchange(self, mine: _Message) -> list[_Message]:
        sent = self._bootstrap.all_gather(msgspec.msgpack.encode(mine))
        everyone = [msgspec.msgpack.decode(data, type=_Message) for data in sent]
        errors = [(rank, message.error) for rank, message in enumerate(everyone) if message.error]
        self._failed = self._failed or next(iter(errors), None)  # later errors follow from the first
        return everyone

    def first_error(self, error: str | None) -> tuple[int, str] | None:
        """Returns (rank, text) of the lowest rank with an error, or None; the same on every rank."""
        for rank, text in enumerate(self.gather(error or "", str)):
            if text:
                return rank, text
        return None


class Interrupt:
    """Remembers a SIGINT, SIGTERM or SIGHUP until the ranks reach a point at which all can stop."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for any_ in self._before:  # a second signal ends the process at once
            signal.signal(any_, signal.SIG_DFL)

    @contextmanager
    def watched(self) -> Iterator[Interrupt]:
        """Handles the signals inside the block (main thread only), then restores the former handlers."""
        for number in _ASKING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._ask)
        try:
            yield self
        finally:
            for handled, old in self._before.items():
                signal.signal(handled, old)
