"""Backends that are right, wrong, broken or absent, and sessions of the bench that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from bench_threads import options, run_session
from unisono.bench import session
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.backends.unisono import UnisonoBackend
from unisono.bench.control import Control, Interrupt
from unisono.bench.device import HangError, HostDevice
from unisono.bench.schedule import Limits
from unisono.records import Case, Records

Call = Callable[[], object]


class Wrapped(UnisonoBackend):
    """Unisono under another name. `meddle` may replace every call."""

    name = "wrapped"

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).name
        self.rank = -1

    def setup(self, ranks: Ranks) -> None:
        super().setup(ranks)
        self.rank = ranks.rank

    def prepare(self, case: Case, buffers: Buffers) -> Call:
        return self.meddle(super().prepare(case, buffers), case, buffers)

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        return call


class WrongAtOnce(Wrapped):
    name = "wrong_at_once"

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        def wrong() -> None:
            call()
            if self.rank == 1 and buffers.out is not None and case.collective == "all_reduce":
                buffers.out.reshape(-1)[3] += np.float32(1)

        return wrong


class Mismatched(Wrapped):
    """Its rank 1 asks for another operation than the others."""

    name = "mismatched"

    def prepare(self, case: Case, buffers: Buffers) -> Call:
        odd = self.rank == 1 and case.collective == "all_reduce"
        return super().prepare(msgspec.structs.replace(case, op="max") if odd else case, buffers)


class Notes(Wrapped):
    """Notes for each call whether the ranks compare it."""

    name = "notes"
    compared: ClassVar[list[bool]] = []

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        def noting() -> None:
            self.compared.append(self._comm.check)
            call()

        return noting


class WrongLater(WrongAtOnce):
    name = "wrong_later"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        right, wrong = call, super().meddle(call, case, buffers)

        def later() -> None:
            self.calls += 1
            (wrong if self.calls > 8 else right)()

        return later


class Lazy(Wrapped):
    """Its calls communicate only the first time."""

    name = "lazy"

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        made: list[bool] = []

        def once() -> None:
            if case.collective != "all_reduce" or not made:
                call()
            made.append(True)

        return once


class NoWait(Wrapped):
    """Its barrier returns at once. All other calls are right."""

    name = "no_wait"

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        return (lambda: None) if case.collective == "barrier" else call


class NoWaitLater(Wrapped):
    """Its barrier waits only the first time."""

    name = "no_wait_later"

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        made: list[bool] = []

        def once() -> None:
            if not made:
                call()
            made.append(True)

        return once


class Raises(Wrapped):
    name = "raises"
    good = 3

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        count = 0

        def broken() -> None:
            nonlocal count
            call()
            count += 1
            if case.collective == "all_gather" and count > self.good:
                self.fail()

        return broken

    def fail(self) -> None:
        raise OSError("the network is gone")


class RaisesLater(Raises):
    """Fails in its second visit, within the limits `TWO_VISITS`."""

    name = "raises_later"
    good = 50  # calls: the first visit has 31 to 47, with the first check and the probe


TWO_VISITS = Limits(budget_s=30, samples=60, rounds=2)


class Stuck(RaisesLater):
    """Its calls do not return."""

    name = "stuck"
    let_go = threading.Event()

    def fail(self) -> None:
        self.let_go.wait()


class Hangs(Wrapped):
    """Its GPU does not come back from an all_gather."""

    name = "hangs"

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        def hanging() -> None:
            if case.collective == "all_gather":
                raise HangError("rank 0's GPU was not done after 20 s.")
            call()

        return hanging


class Absent(Wrapped):
    name = "absent"

    def available(self, ranks: int) -> str | None:
        return "it is not installed."


class NoStart(Wrapped):
    name = "no_start"

    def setup(self, ranks: Ranks) -> None:
        if ranks.rank == ranks.size - 1:
            raise RuntimeError("no licence")


class NoStartAtRoot(Wrapped):
    """Its rank 0 has no unique id, for which the others wait."""

    name = "no_start_at_root"
    closed: ClassVar[list[int]] = []

    def setup(self, ranks: Ranks) -> None:
        self.rank = ranks.rank
        if ranks.rank == 0:
            raise RuntimeError("no unique id")
        ranks.all_gather(b"")

    def close(self) -> None:
        self.closed.append(self.rank)


class NoMemory(Wrapped):
    """Its rank 1 has no memory, for which the others wait."""

    name = "no_memory"
    own_memory = True

    def setup(self, ranks: Ranks) -> None:
        super().setup(ranks)
        self.ranks = ranks

    def allocate(self, size: int) -> tuple[Any, Any]:
        if self.rank == 1:
            raise MemoryError("out of memory")
        self.ranks.all_gather(b"")
        return np.zeros(size, np.uint8), np.zeros(size, np.uint8)


class NoGather(Wrapped):
    name = "no_gather"

    def supports(self, case: Case) -> str | None:
        return "it has no all_gather." if case.collective == "all_gather" else None


class Interrupts(Wrapped):
    """Presses Ctrl-C on rank 1 after some calls."""

    name = "interrupts"
    pressed: Interrupt | None = None

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        count = 0

        def pressing() -> None:
            nonlocal count
            call()
            count += 1
            if self.rank == 1 and count > 20 and self.pressed is not None:
                self.pressed.asked = True

        return pressing


BACKENDS: dict[str, type[Backend]] = {
    c.name: c
    for c in (
        Wrapped,
        WrongAtOnce,
        Mismatched,
        Notes,
        WrongLater,
        Lazy,
        NoWait,
        NoWaitLater,
        Raises,
        RaisesLater,
        Stuck,
        Hangs,
        Absent,
        NoStart,
        NoStartAtRoot,
        NoMemory,
        NoGather,
        Interrupts,
    )
}


Run = Callable[..., tuple[Records, list[session.Outcome]]]


def session_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs a session with backends of `BACKENDS` on ranks that are threads.

    Records go to `tmp_path`/run. The ceilings, which take a second, are left out.
    """

    def load(name: str) -> Backend:
        return BACKENDS[name]() if name in BACKENDS else UnisonoBackend(name.partition(":")[2] or None)

    monkeypatch.setattr(session, "load", load)
    monkeypatch.setattr(session.Session, "_ceilings", lambda self: 10.0)

    def start(backends: list[str], ranks: int = 3, **changes: Any) -> tuple[Records, list[session.Outcome]]:
        chosen = options(tmp_path / "run", backends, **changes)
        interrupts = [Interrupt() for _ in range(ranks)]
        Interrupts.pressed = interrupts[1 % ranks]

        def session_of(control: Control, align: Any, measured: Any) -> session.Session:
            interrupt = interrupts[control.rank]
            device = HostDevice(align.barrier, rank=control.rank)
            return session.Session(chosen, control, measured, interrupt, "threads", device)

        return run_session(chosen, ranks, session_of, check=False)

    return start
