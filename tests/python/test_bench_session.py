"""Whole runs of the bench with ranks as threads of this process: the records of a run."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

import unisono
from bench_backends import NoStartAtRoot, Run, session_runs
from unisono.bench import session


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return session_runs(tmp_path, monkeypatch)


def test_a_run_records_every_case_on_every_backend(run: Run) -> None:
    found, outcomes = run(["unisono", "wrapped"])
    assert not found.failures
    assert not found.problems
    # (2 collectives x 2 sizes x 2 kinds of memory x 2 modes, and 2 modes of the barrier) on 2 backends
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


def test_backends_that_cannot_run_are_skipped_with_a_reason(run: Run) -> None:
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


def test_a_workload_is_recorded_with_its_own_results(run: Run) -> None:
    found, _ = run(["unisono"], collectives=["barrier"], workloads=["llama-3-70b-tp-decode-batch-1"])
    (workload,) = found.workloads
    (step,) = workload.steps
    (result,) = [r for r in found.results if r.workload == workload.name]
    key = (result.case.collective, result.case.bytes, result.case.dtype, result.case.op)
    assert key == (step.collective, step.bytes, step.dtype, step.op)


def test_the_cores_are_those_of_all_ranks_together(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has bound each rank to a core of its own."""
    cores = itertools.count()
    monkeypatch.setattr(session.Binding, "allowed", property(lambda self: frozenset({next(cores)})))
    found, _ = run(["unisono"], cores=1, collectives=["barrier"])
    assert found.runs[0].machine.cores == 3


def test_sizes_below_an_element_are_printed_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
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
