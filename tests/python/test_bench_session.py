"""A whole run with ranks as threads of this process: what is recorded when backends are right, wrong, broken
or absent."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

import unisono
from bench_threads import options, run_session
from unisono import records
from unisono.bench import cells, device, measure, rank, session, watch
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.backends.unisono import UnisonoBackend
from unisono.bench.cells import Work
from unisono.bench.control import Control, Interrupt
from unisono.bench.device import HangError, HostDevice
from unisono.bench.schedule import Limits, Schedule
from unisono.records import Case, Records

Call = Callable[[], object]


class Wrapped(UnisonoBackend):
    """Unisono under another name; `meddle` gets every call and may make something else of it."""

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
    """Notes of each call whether the ranks compare it."""

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
    """Communicates the first time that a call is made."""

    name = "lazy"

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        made: list[bool] = []

        def once() -> None:
            if case.collective != "all_reduce" or not made:
                call()
            made.append(True)

        return once


class NoWait(Wrapped):
    """Its barrier returns at once, and all else is right."""

    name = "no_wait"

    def meddle(self, call: Call, case: Case, buffers: Buffers) -> Call:
        return (lambda: None) if case.collective == "barrier" else call


class NoWaitLater(Wrapped):
    """Waits in a barrier the first time that it is made."""

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
    name = "raises_later"
    good = 25  # calls: of the first round


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
    """Has no unique id for the others, who wait for it."""

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


KNOWN: dict[str, type[Backend]] = {
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


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Records, list[session.Outcome]]]:
    """Runs a session on 3 ranks that are threads; the ceilings, which take a second, are left out."""

    def load(name: str) -> Backend:
        return KNOWN[name]() if name in KNOWN else UnisonoBackend(name.partition(":")[2] or None)

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


Run = Callable[..., tuple[Records, list[session.Outcome]]]


def test_a_run_records_every_case_on_every_backend(run: Run) -> None:
    found, outcomes = run(["unisono", "wrapped"])
    assert not found.failures
    assert not found.problems
    # two collectives x two sizes x two kinds of memory x two modes, and the barrier's two modes, on two
    # backends
    assert len(found.results) == (2 * 2 * 2 * 2 + 2) * 2
    assert len({(r.case, r.backend) for r in found.results}) == len(found.results)
    for result in found.results:
        assert result.verification.before
        assert result.verification.after
        barrier = result.case.collective == "barrier"
        assert result.verification.bound == ("nobody left before all had entered" if barrier else "bit-exact")
        assert len(result.samples_us) == 8
        assert result.ci_low_us <= result.median_us <= result.ci_high_us
        assert result.skew_us is not None
        assert (result.calls_per_sample == 1) == (result.case.mode == "latency")
        assert result.algorithm is not None or result.case.collective == "barrier"
    assert [o.failures for o in outcomes] == [0, 0, 0]
    assert (found.runs[0].ranks, found.runs[0].machine.cores) == (3, max(5, len(os.sched_getaffinity(0))))
    assert not found.ends[0].interrupted
    assert len(outcomes[0].results) == len(found.results)


def test_bandwidths_follow_from_the_median(run: Run) -> None:
    found, _ = run(["unisono"], collectives=["all_reduce"], sizes=[1 << 16])
    for result in found.results:
        assert result.algbw_gbps == pytest.approx((1 << 16) / (result.median_us * 1e3))
        assert result.busbw_gbps == pytest.approx(result.algbw_gbps * 4 / 3)
        assert result.sol == pytest.approx(result.busbw_gbps / 10.0)
        assert result.ceiling_gbps == 10.0


def test_a_wrong_result_is_a_failure_and_no_time(run: Run) -> None:
    found, outcomes = run(["unisono", "wrong_at_once"])
    timed = {(r.backend, r.case.collective) for r in found.results}
    assert ("wrong_at_once", "all_reduce") not in timed
    assert {("wrong_at_once", "all_gather"), ("unisono", "all_reduce")} <= timed
    assert {f.rank for f in found.failures} == {1}
    assert all("element 3 is" in f.message for f in found.failures)
    assert {f.case.placement for f in found.failures} == {
        "out_of_place",
        "in_place",
    }  # the latter only checked
    assert {o.failures for o in outcomes} == {len(found.failures)}


def test_the_first_call_of_a_cell_compares_the_ranks_calls(run: Run) -> None:
    found, _ = run(["mismatched"], collectives=["all_reduce"], sizes=[64], memories=["plain"])
    assert not found.results
    for failure in found.failures:
        assert "MismatchError: rank 0 called all_reduce(sum) of 16 f32" in failure.message
        assert "but rank 1 called all_reduce(max) of 16 f32" in failure.message
    assert found.failures


def test_the_calls_after_the_first_are_not_compared(run: Run) -> None:
    Notes.compared.clear()
    found, _ = run(["notes"], collectives=["all_reduce"], sizes=[64], memories=["plain"], modes=["latency"])
    assert len(found.results) == 1
    checks = 2 * 3  # out of place and in place, on three ranks
    assert Notes.compared.count(True) == checks
    assert Notes.compared.count(False) > checks


def test_a_result_that_goes_wrong_while_timed_is_shown_as_failed(run: Run) -> None:
    found, _ = run(
        ["wrong_later"], collectives=["all_reduce"], sizes=[4096], memories=["plain"], modes=["latency"]
    )
    (result,) = found.results
    assert result.verification.before
    assert not result.verification.after
    assert result.verification.detail is not None
    assert any(f.message.startswith("after the timed part") for f in found.failures)


@pytest.mark.parametrize("mode", ["latency", "throughput"])
def test_the_calls_that_are_checked_afterwards_are_the_timed_ones(run: Run, mode: str) -> None:
    found, _ = run(["lazy"], sizes=[4096], memories=["plain"], modes=[mode])
    assert {r.case.collective for r in found.results if not r.verification.after} == {"all_reduce"}
    (failure,) = found.failures
    assert (failure.case.mode, failure.case.placement) == (mode, "out_of_place")
    assert failure.message.startswith("after the timed part")


def test_a_cell_that_is_wrong_afterwards_is_told_from_the_others_of_its_group(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong in queues of calls only."""
    looped = cells._looped

    def wrong(work: Work, *others: Any) -> Any:
        placed, go = looped(work, *others)
        return placed, (lambda: "it is wrong") if work.case.mode == "throughput" else go

    monkeypatch.setattr(cells, "_looped", wrong)
    found, _ = run(["unisono"], collectives=["all_reduce"], sizes=[64], memories=["plain"])
    assert {r.case.mode: r.verification.after for r in found.results} == {
        "latency": True,
        "throughput": False,
    }


def test_a_barrier_that_does_not_wait_is_a_failure_and_no_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "LATE_S", 0.2)  # however busy the machine is
    found, _ = run(["no_wait", "wrapped"], collectives=["barrier", "all_reduce"], sizes=[64])
    assert {(f.backend, f.case.collective) for f in found.failures} == {("no_wait", "barrier")}
    assert all("let this rank go before rank" in f.message for f in found.failures)
    timed = {(r.backend, r.case.collective) for r in found.results}
    assert timed == {("no_wait", "all_reduce"), ("wrapped", "all_reduce"), ("wrapped", "barrier")}


@pytest.mark.parametrize("mode", ["latency", "throughput"])
def test_the_barrier_that_is_checked_afterwards_is_the_timed_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(cells, "LATE_S", 0.2)
    found, _ = run(["no_wait_later"], collectives=["barrier"], modes=[mode])
    (result,) = found.results
    assert result.verification.before and not result.verification.after
    (failure,) = found.failures
    assert failure.message.startswith("after the timed part: the barrier let this rank go")


def test_an_exception_drops_the_cell_and_the_others_go_on(run: Run) -> None:
    found, _ = run(["raises", "wrapped"], memories=["plain"])
    failed = {(f.backend, f.case.collective) for f in found.failures}
    assert failed == {("raises", "all_gather")}
    assert all(f.rank == 0 and "OSError: the network is gone" in f.message for f in found.failures)
    timed = {(r.backend, r.case.collective) for r in found.results}
    assert {("wrapped", "all_gather"), ("raises", "all_reduce"), ("raises", "barrier")} <= timed
    assert ("raises", "all_gather") not in timed


def test_a_backend_that_hung_is_left_out_where_the_gpu_comes_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "recover", lambda self, backend: True)
    found, outcomes = run(["hangs", "wrapped"], memories=["plain"], modes=["latency"])
    (failure,) = found.failures
    assert (failure.backend, failure.case.collective) == ("hangs", "all_gather")
    assert "not done after 20 s" in failure.message
    others = [r for r in found.results if r.backend == "wrapped"]
    assert len(others) == 5
    assert all(r.verification.after for r in others)
    mine = [r for r in found.results if r.backend == "hangs"]
    assert all(r.verification.bound in ("not checked", "bit-exact") for r in mine)
    skipped = [skip for skip in found.skips if skip.backend == "hangs"]
    assert all("left out after it failed for good" in skip.reason for skip in skipped)
    assert len(mine) + len(skipped) + 1 >= 5
    assert found.ends
    assert {o.failures for o in outcomes} == {1}


def test_a_hang_for_good_ends_the_run_and_keeps_what_was_measured(run: Run, tmp_path: Path) -> None:
    with pytest.raises(HangError):
        run(["hangs", "wrapped"], memories=["plain"], modes=["latency"])
    found = records.read(tmp_path / "run")
    assert not found.ends
    assert [f.case.collective for f in found.failures] == ["all_gather"]
    assert all(not r.verification.after and r.verification.bound == "not checked" for r in found.results)


def test_whatever_ends_a_run_what_was_measured_is_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU whose context is broken: nothing of it can be freed either."""
    told: set[Work] = set()

    def broken(self: Work) -> None:
        if self.dropped and self not in told:
            told.add(self)
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Work, "close", broken)
    with pytest.raises(RuntimeError, match="launch failure"):
        run(["raises_later", "wrapped"], sizes=[64], memories=["plain"], modes=["latency"])
    found = records.read(tmp_path / "run")
    assert not found.ends
    assert [f.message for f in found.failures] == ["OSError: the network is gone"]
    assert ("raises_later", "all_gather") not in {(r.backend, r.case.collective) for r in found.results}
    assert len(found.results) == 5
    for result in found.results:
        assert result.verification.before and not result.verification.after
        assert result.verification.detail == (
            "the run ended before the second check: CUDA error: unspecified launch failure"
        )


def test_a_library_that_never_returns_ends_the_run_and_what_was_measured_is_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[tuple[int, Records]] = []

    def leave(code: int) -> None:
        left.append((code, records.read(tmp_path / "run")))
        Stuck.let_go.set()

    Stuck.let_go.clear()
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(device, "SILENCE_S", 2.0)
    run(["stuck"], sizes=[64], memories=["plain"], modes=["latency"])
    code, found = left[0]
    assert code == 1 and not found.ends
    (result,) = [r for r in found.results if r.case.collective == "all_gather"]
    assert result.samples_us and result.verification.bound == "not checked"
    assert result.verification.detail == "the run ended before the second check: nothing moved any more"
    said = capsys.readouterr().err
    assert "rank 0: nothing has moved for 2 s in all_gather" in said and "on stuck; the run ends here" in said


def test_a_watch_saves_before_it_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def leave(code: int) -> None:
        done.append(f"exit {code}")
        raise SystemExit(code)

    def save() -> None:
        done.append("save")
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "_exit", leave)
    watching = watch.Watch(0, 0.0)
    watching.save = save
    with pytest.raises(SystemExit):
        watching._run()
    assert done == ["save", "exit 1"]


def test_a_watch_counts_its_looks_since_the_rank_moved_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the clock, which goes on while the process is stopped."""
    looks: list[float] = []
    watching = watch.Watch(0, 4 * watch.LOOK_S)

    def look(seconds: float) -> bool:
        looks.append(seconds)
        if len(looks) == 3:
            watching.beat()
        return False

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(watching._stopped, "wait", look)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        watching._run()
    assert looks == [watch.LOOK_S] * (3 + 4)


def test_the_watch_is_told_before_and_after_the_call_of_a_check(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of many GiB take minutes to fill and to compare."""
    log: dict[int, list[str]] = {}

    def noted(word: str, of: Any) -> Any:
        def noting(*args: Any) -> Any:
            log.setdefault(threading.get_ident(), []).append(word)
            return of(*args)

        return noting

    monkeypatch.setattr(HostDevice, "beat", noted("beat", HostDevice.beat))
    for name in ("arrange", "inspect"):
        monkeypatch.setattr(cells, name, noted(name, getattr(cells, name)))
    run(["unisono"], collectives=["all_reduce"], sizes=[64], memories=["plain"], modes=["latency"])
    assert len(log) == 3
    for words in log.values():
        (first, *_) = (n for n, word in enumerate(words) if word == "arrange")
        assert words[first - 1 : first + 4] == ["beat", "arrange", "beat", "beat", "inspect"]


@pytest.mark.parametrize("backend", ["wrong_at_once", "hangs"])
def test_time_is_kept_only_for_checks_that_are_still_made(
    run: Run, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    seen: list[tuple[Schedule, str]] = []
    monkeypatch.setattr(HostDevice, "recover", lambda self, backend: True)
    monkeypatch.setattr(session.Display, "show", lambda self, *told: seen.append(told))
    run([backend, "wrapped"], modes=["latency"])
    assert seen[-1][0].reserve_s == pytest.approx(0.0, abs=1e-9)
    assert any(doing.startswith("checking ") and "on wrapped" in doing for _, doing in seen)


def test_what_cannot_run_is_skipped_with_its_reason(run: Run) -> None:
    found, _ = run(["absent", "no_start", "no_gather"], memories=["plain"], modes=["latency"])
    whole = {skip.backend: skip.reason for skip in found.skips if skip.case is None}
    assert whole["absent"] == "it is not installed."
    assert "no licence" in whole["no_start"]
    assert {s.case.collective for s in found.skips if s.case is not None} == {"all_gather"}
    assert {r.backend for r in found.results} == {"no_gather"}


@pytest.mark.parametrize(
    ("name", "why"), [("no_start_at_root", "no unique id"), ("no_memory", "out of memory")]
)
def test_a_backend_that_fails_on_one_rank_is_left_out_on_all(run: Run, name: str, why: str) -> None:
    NoStartAtRoot.closed.clear()
    found, _ = run([name, "wrapped"], modes=["latency"])
    assert [skip.backend for skip in found.skips if why in skip.reason] == [name]
    assert {r.backend for r in found.results} == {"wrapped"}
    assert not found.failures and found.ends
    assert sorted(NoStartAtRoot.closed) == ([0, 1, 2] if name == "no_start_at_root" else [])


def test_an_interrupt_on_any_rank_keeps_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ENDING_S", 100.0)  # however busy the machine is
    found, outcomes = run(["interrupts"], limits=Limits(budget_s=30, samples=2000, rounds=5))
    assert found.ends[0].interrupted
    assert all(o.interrupted for o in outcomes)
    assert found.results
    assert all(r.verification.after and len(r.samples_us) < 2000 for r in found.results)
    assert not found.failures


def test_what_there_is_no_time_to_check_after_an_interrupt_is_recorded_as_not_checked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ENDING_S", 0.0)
    found, outcomes = run(["interrupts"], limits=Limits(budget_s=30, samples=2000, rounds=5))
    assert found.ends[0].interrupted
    assert all(o.interrupted for o in outcomes)
    assert found.results and not found.failures
    for result in found.results:
        assert result.verification.before and not result.verification.after
        assert result.verification.bound == "not checked"
        assert result.verification.detail == "the run was interrupted before the second check"


def test_an_interrupt_is_noticed_between_the_last_checks_too(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = measure.Measurement._checked

    def pressing(self: measure.Measurement, group: cells.Group, phase: int) -> list[cells.Wrong]:
        if phase == 1 and self.control.rank == 1:
            self._interrupt.asked = True
        return checked(self, group, phase)

    monkeypatch.setattr(measure, "ENDING_S", 0.0)
    monkeypatch.setattr(measure.Measurement, "_checked", pressing)
    found, outcomes = run(["unisono"], sizes=[64], memories=["plain"], modes=["latency"])
    assert all(o.interrupted for o in outcomes) and found.ends[0].interrupted
    assert sorted(r.verification.after for r in found.results) == [False, False, True]


def test_a_workload_is_recorded_with_its_own_results(run: Run) -> None:
    found, _ = run(["unisono"], collectives=["barrier"], workloads=["llama-3-70b-tp-decode-batch-1"])
    (workload,) = found.workloads
    (step,) = workload.steps
    (result,) = [r for r in found.results if r.workload == workload.name]
    key = (result.case.collective, result.case.bytes, result.case.dtype, result.case.op)
    assert key == (step.collective, step.bytes, step.dtype, step.op)


def test_without_checks_the_records_say_so(run: Run) -> None:
    found, _ = run(["wrong_at_once"], check=False, collectives=["all_reduce"])
    assert found.results
    assert not found.failures
    assert {(r.verification.before, r.verification.bound) for r in found.results} == {(False, "not checked")}


def test_a_disk_that_fills_is_all_that_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though cells are left whose samples are not recorded yet."""
    write = records.RecordsWriter.write

    def full(self: records.RecordsWriter, record: records.Record) -> None:
        if isinstance(record, records.Result) and not self._file.closed:
            self._file.close()
            self._file = open("/dev/full", "wb")  # noqa: SIM115
        write(self, record)

    monkeypatch.setattr(records.RecordsWriter, "write", full)
    with pytest.raises(unisono.ResourceError) as raised:
        run(["unisono"], ranks=1)
    said = rank.explain(raised.value)
    assert said.startswith("unisono bench: ") and "\n" not in said
    assert "records.jsonl cannot be written: No space left on device" in said


def test_the_cores_are_those_of_all_ranks_together(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launcher has bound each to one of its own."""
    cores = itertools.count()
    monkeypatch.setattr(session.Binding, "allowed", property(lambda self: frozenset({next(cores)})))
    found, _ = run(["unisono"], cores=1, collectives=["barrier"])
    assert found.runs[0].machine.cores == 3


def test_sizes_below_an_element_are_said_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = run(["unisono"], sizes=[3, 64], memories=["plain"], collectives=["all_reduce"])
    assert {r.case.bytes for r in found.results} == {4, 64}
    assert capsys.readouterr().out.count("3 B of f32: less than an element") == 1


def test_cases_that_do_not_fit_in_memory_are_skipped(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session.provenance, "memory_bytes", lambda field="": 100_000)
    found, _ = run(["unisono"], collectives=["all_reduce"], sizes=[4096, 1 << 20])
    assert {r.case.bytes for r in found.results} == {4096}
    assert any("do not fit" in skip.reason for skip in found.skips)
    left_out = "The largest cases are left out, 4 of 8: 3 ranks have room for buffers of 0 MiB each."
    assert left_out in capsys.readouterr().out


def test_without_symmetric_memory_the_plain_cases_are_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, size: int, communicator: object) -> None:
        raise unisono.ResourceError(28, "no space left in shared memory")

    monkeypatch.setattr(session.Pools, "add_symmetric", full)
    found, _ = run(["unisono"], collectives=["all_reduce"])
    assert {r.case.memory for r in found.results} == {"plain"}
    assert any("no space left" in skip.reason for skip in found.skips)


def test_an_algorithm_can_be_forced(run: Run) -> None:
    found, _ = run(["unisono:two_shot"], collectives=["all_reduce", "all_gather"], memories=["plain"])
    assert {(r.backend, r.algorithm) for r in found.results} == {("unisono:two_shot", "two_shot")}
    assert any("all_gather has no algorithm two_shot" in skip.reason for skip in found.skips)
