"""The end of a run: hangs, silence, interrupts and a full disk, and the records kept until then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import unisono
from bench_backends import TWO_VISITS, Run, Stuck, session_runs
from unisono import records
from unisono.bench import cells, device, measure, rank, watch
from unisono.bench.cells import Work
from unisono.bench.device import HangError, HostDevice
from unisono.bench.schedule import Limits
from unisono.records import Records


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return session_runs(tmp_path, monkeypatch)


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


def test_a_hang_for_good_ends_the_run_and_keeps_the_samples(run: Run, tmp_path: Path) -> None:
    with pytest.raises(HangError):
        run(["hangs", "wrapped"], memories=["plain"], modes=["latency"])
    found = records.read(tmp_path / "run")
    assert not found.ends
    assert [f.case.collective for f in found.failures] == ["all_gather"]
    assert all(not r.verification.after and r.verification.bound == "not checked" for r in found.results)


def test_an_error_that_ends_the_run_keeps_the_samples(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a GPU whose context is broken, freeing the loops raises too."""
    raised: set[Work] = set()

    def broken(self: Work) -> None:
        if self.dropped and self not in raised:
            raised.add(self)
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Work, "close", broken)
    with pytest.raises(RuntimeError, match="launch failure"):
        run(["raises_later", "wrapped"], sizes=[64], memories=["plain"], modes=["latency"], limits=TWO_VISITS)
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


def test_a_library_that_never_returns_ends_the_run_and_the_samples_are_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[tuple[int, Records]] = []

    def leave(code: int) -> None:
        left.append((code, records.read(tmp_path / "run")))
        Stuck.let_go.set()

    Stuck.let_go.clear()
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(device, "SILENCE_S", 2.0)
    run(["stuck"], sizes=[64], memories=["plain"], modes=["latency"], limits=TWO_VISITS)
    code, found = left[0]
    assert code == 1 and not found.ends
    (result,) = [r for r in found.results if r.case.collective == "all_gather"]
    assert result.samples_us and result.verification.bound == "not checked"
    assert result.verification.detail == "the run ended before the second check: nothing moved any more"
    errors = capsys.readouterr().err
    assert "rank 0: nothing has moved for 2 s in all_gather" in errors
    assert "on stuck; the run ends here" in errors


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
    """The watch must not count the clock, which goes on while the process is stopped."""
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


def test_an_interrupt_on_any_rank_keeps_the_samples(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ENDING_S", 100.0)  # however busy the machine is
    found, outcomes = run(["interrupts"], limits=Limits(budget_s=30, samples=2000, rounds=5))
    assert found.ends[0].interrupted
    assert all(o.interrupted for o in outcomes)
    assert found.results
    assert all(r.verification.after and len(r.samples_us) < 2000 for r in found.results)
    assert not found.failures


def test_results_without_time_for_a_check_after_an_interrupt_are_not_checked(
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


def test_a_full_disk_is_the_only_error_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one line, though the samples of some cells are not recorded yet."""
    write = records.RecordsWriter.write

    def full(self: records.RecordsWriter, record: records.Record) -> None:
        if isinstance(record, records.Result) and not self._file.closed:
            self._file.close()
            self._file = open("/dev/full", "wb")  # noqa: SIM115
        write(self, record)

    monkeypatch.setattr(records.RecordsWriter, "write", full)
    with pytest.raises(unisono.ResourceError) as raised:
        run(["unisono"], ranks=1)
    text = rank.explain(raised.value)
    assert text.startswith("unisono bench: ") and "\n" not in text
    assert "records.jsonl cannot be written: No space left on device" in text
