"""The checks in a whole run: what is recorded when backends are wrong or raise."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from bench_backends import Notes, Run, session_runs
from unisono.bench import cells, session
from unisono.bench.cells import Work
from unisono.bench.device import HostDevice
from unisono.bench.schedule import Schedule


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return session_runs(tmp_path, monkeypatch)


def test_a_wrong_result_is_a_failure_and_no_time(run: Run) -> None:
    found, outcomes = run(["unisono", "wrong_at_once"])
    timed = {(r.backend, r.case.collective) for r in found.results}
    assert ("wrong_at_once", "all_reduce") not in timed
    assert {("wrong_at_once", "all_gather"), ("unisono", "all_reduce")} <= timed
    assert {f.rank for f in found.failures} == {1}
    assert all("element 3 is" in f.message for f in found.failures)
    placements = {f.case.placement for f in found.failures}
    assert placements == {"out_of_place", "in_place"}  # in place is only checked, not timed
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


def test_only_the_wrong_cell_of_a_group_fails_afterwards(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is wrong only in queues of calls."""
    looped = cells._looped

    def wrong(work: Work, *others: Any) -> Any:
        placed, go, call = looped(work, *others)
        return placed, (lambda: "it is wrong") if work.case.mode == "throughput" else go, call

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


def test_a_check_tells_the_watch_before_and_after_its_call(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch must not end a check: buffers of many GiB take minutes to fill and to compare."""
    log: dict[int, list[str]] = {}

    def noted(word: str, function: Any) -> Any:
        def noting(*args: Any) -> Any:
            log.setdefault(threading.get_ident(), []).append(word)
            return function(*args)

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
def test_time_is_reserved_only_for_checks_still_to_come(
    run: Run, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    seen: list[tuple[Schedule, str]] = []
    monkeypatch.setattr(HostDevice, "recover", lambda self, backend: True)
    monkeypatch.setattr(session.Display, "show", lambda self, *shown: seen.append(shown))
    run([backend, "wrapped"], modes=["latency"])
    assert seen[-1][0].reserve_s == pytest.approx(0.0, abs=1e-9)
    assert any(doing.startswith("checking ") and "on wrapped" in doing for _, doing in seen)


def test_without_checks_the_records_say_so(run: Run) -> None:
    found, _ = run(["wrong_at_once"], check=False, collectives=["all_reduce"])
    assert found.results
    assert not found.failures
    assert {(r.verification.before, r.verification.bound) for r in found.results} == {(False, "not checked")}
