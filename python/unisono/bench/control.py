"""What the ranks tell each other about the bench itself: over the bootstrap, never over a measured
library."""

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
    """The one call that every way of starting ranks offers, see unisono.bootstrap."""

    rank: int
    size: int

    def all_gather(self, data: bytes) -> list[bytes]: ...


class _Said(msgspec.Struct):
    """Of one rank in a step: bytes that it exchanges, or that its step has ended, and with which error."""

    data: bytes = b""
    ended: bool = False
    error: str | None = None


class Control:
    """Decisions of rank 0 and reports of all ranks; every method is called on all ranks in the same order."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self.rank, self.size = bootstrap.rank, bootstrap.size
        self._in_step = False
        self._failed: tuple[int, str] | None = None  # in this step

    def from_root(self, decide: Callable[[], T], kind: type[T]) -> T:
        """What `decide` gives on rank 0, on every rank; it is not called on the others."""
        sent = msgspec.msgpack.encode(decide()) if self.rank == 0 else b""
        return msgspec.msgpack.decode(self.gather_bytes(sent)[0], type=kind)

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        return [
            msgspec.msgpack.decode(data, type=kind)
            for data in self.gather_bytes(msgspec.msgpack.encode(value))
        ]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes. Within a step raises RuntimeError where the step of a rank has ended."""
        if not self._in_step:
            return self._bootstrap.all_gather(data)
        everyone = self._say(_Said(data))
        for rank, said in enumerate(everyone):
            if said.ended:
                raise RuntimeError(f"rank {rank} exchanges no more: {said.error or 'it is done'}")
        return [said.data for said in everyone]

    def step(self, work: Callable[[], str | None]) -> tuple[int, str] | None:
        """Runs `work`, in which the ranks may exchange bytes and any may fail: where the work of one ends, an
        exchange of another raises there, so that none waits for it and all stay in step. Returns (rank,
        text) of the first error that any returned or raised, the same on every rank."""
        self._failed, self._in_step = None, True
        try:
            error = work()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        finally:
            self._in_step = False
        while not all(said.ended for said in self._say(_Said(ended=True, error=error))):
            pass
        return self._failed

    def _say(self, mine: _Said) -> list[_Said]:
        sent = self._bootstrap.all_gather(msgspec.msgpack.encode(mine))
        everyone = [msgspec.msgpack.decode(data, type=_Said) for data in sent]
        errors = [(rank, said.error) for rank, said in enumerate(everyone) if said.error]
        self._failed = self._failed or next(iter(errors), None)  # later ones follow from it
        return everyone

    def first_error(self, error: str | None) -> tuple[int, str] | None:
        """(rank, text) of the lowest rank with an error, the same on every rank."""
        for rank, text in enumerate(self.gather(error or "", str)):
            if text:
                return rank, text
        return None


class Interrupt:
    """Remembers a SIGINT, SIGTERM or SIGHUP until the ranks reach a point where all of them can stop."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for any_ in self._before:  # a second one, whichever, ends the process at once
            signal.signal(any_, signal.SIG_DFL)

    @contextmanager
    def watched(self) -> Iterator[Interrupt]:
        """Handles them inside the block (main thread only) and restores what was there."""
        for number in _ASKING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                self._before[number] = signal.signal(number, self._ask)
        try:
            yield self
        finally:
            for handled, old in self._before.items():
                signal.signal(handled, old)
