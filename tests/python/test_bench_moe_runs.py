"""Mixture of experts in whole runs of the bench: all backends are right, and wrong ones are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench_backends import BACKENDS, Run, Wrapped, session_runs
from bench_cli import bench, leave_launchers
from unisono import records
from unisono.bench.backends.base import Buffers, ResultCall
from unisono.bench.cases import CaseError
from unisono.bench.moe import Grid
from unisono.cli import finish
from unisono.cli.app import app
from unisono.cli.asked import Asked
from unisono.cli.resolve import options_of
from unisono.records import Case
from unisono.records.vocabulary import LAYOUTS, MOES, ROUTINGS

SMALL = Grid(tokens=(1, 6), hidden=(40,), experts=12, top_k=(3,), layouts=LAYOUTS, dtypes=("bf16",))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_launchers(monkeypatch)


class SwapsRows(Wrapped):
    """Exchanges two rows of what a dispatch of rank 1 has given."""

    name = "swaps_rows"

    def meddle(self, call: Callable[[], object], case: Case, buffers: Buffers) -> Callable[[], object]:
        assert isinstance(call, ResultCall)
        inner = call.result

        def swapped() -> Any:
            rows = inner().copy()
            if self.rank == 1:
                rows[[0, 1]] = rows[[1, 0]]
            return rows

        return ResultCall(call.call, swapped)


class LosesRow(SwapsRows):
    """Gives one row less."""

    name = "loses_row"

    def meddle(self, call: Callable[[], object], case: Case, buffers: Buffers) -> Callable[[], object]:
        assert isinstance(call, ResultCall)
        inner = call.result
        return ResultCall(call.call, lambda: inner()[:-1])


class WrongSum(Wrapped):
    """Changes the last bit of one sum of rank 1 once it has been checked, and timed a few times."""

    name = "wrong_sum"

    def meddle(self, call: Callable[[], object], case: Case, buffers: Buffers) -> Callable[[], object]:
        assert isinstance(call, ResultCall)
        calls = 0

        def wrong() -> None:
            nonlocal calls
            call()
            calls += 1
            if self.rank == 1 and calls > 3:
                bits = buffers.out.view(np.uint16)
                bits[0, 7] ^= 1

        return ResultCall(wrong, call.result)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for made in (SwapsRows, LosesRow, WrongSum):
        monkeypatch.setitem(BACKENDS, made.name, made)
    return session_runs(tmp_path, monkeypatch)


def test_all_cases_are_right_and_checked_before_and_after(run: Run) -> None:
    grid = Grid(**{**vars_of(SMALL), "routings": ROUTINGS, "modes": ("latency", "throughput")})
    found, _ = run(["unisono"], collectives=list(MOES), moe=grid)
    assert [failure.message for failure in found.failures] == []
    assert len(found.results) == 3 * len(ROUTINGS) * len(LAYOUTS) * 2 * 2
    for result in found.results:
        assert result.verification.before and result.verification.after
        assert result.verification.bound == "bit-exact"
        assert result.case.moe is not None
        share = result.case.moe.remote_bytes / result.case.bytes
        assert result.busbw_gbps == pytest.approx(result.algbw_gbps * share)


def test_combines_keep_their_routes_while_other_sizes_are_measured(run: Run) -> None:
    grid = Grid(**{**vars_of(SMALL), "tokens": (1, 2, 3, 4, 5, 6), "modes": ("throughput",)})
    found, _ = run(["unisono"], collectives=["moe_combine"], moe=grid)
    assert [failure.message for failure in found.failures] == []
    assert len(found.results) == 6 * len(LAYOUTS)


def vars_of(grid: Grid) -> dict[str, Any]:
    return {name: getattr(grid, name) for name in grid.__struct_fields__}


def test_rows_in_another_order_are_a_failure(run: Run) -> None:
    found, _ = run(["unisono", "swaps_rows"], collectives=["moe_dispatch"], moe=SMALL)
    assert {result.backend for result in found.results} == {"unisono"}
    assert {failure.rank for failure in found.failures} == {1}
    assert all("wrong element(s) of the output" in failure.message for failure in found.failures)


def test_a_lost_row_is_a_failure(run: Run) -> None:
    grid = Grid(**{**vars_of(SMALL), "tokens": (6,), "layouts": ("flat",)})
    found, _ = run(["loses_row"], collectives=["moe_dispatch"], moe=grid)
    (failure,) = found.failures
    assert not found.results
    assert "rows of 40 have come, not" in failure.message


def test_a_sum_that_goes_wrong_while_timed_is_a_failure(run: Run) -> None:
    found, _ = run(["wrong_sum"], collectives=["moe_combine"], moe=SMALL)
    assert found.results and found.failures
    for result in found.results:
        assert result.verification.before and not result.verification.after
        assert "element 7 is" in str(result.verification.detail)


def test_a_library_without_it_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapped, "moe", False, raising=False)
    found, _ = run(["unisono", "notes"], collectives=["moe_round", "all_reduce"], sizes=[64], moe=SMALL)
    assert {r.case.collective for r in found.results if r.backend == "notes"} == {"all_reduce"}
    reasons = {skip.reason for skip in found.skips if skip.case and skip.case.moe}
    assert reasons == {"notes has no mixture of experts."}


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_backends_in_one_run_are_right(tmp_path: Path, ranks: int) -> None:
    shape = ["--tokens", "1,70", "--hidden", "130", "--experts", "12", "--top-k", "5"]
    kinds = ["-d", "f32,bf16", "--routing", "uniform,one_hot", "-n", "2"]
    done = bench(tmp_path / "run", "--moe", "--ranks", str(ranks), *shape, *kinds)
    found = records.read(tmp_path / "run")
    assert [failure.message for failure in found.failures] == []
    assert done.returncode == 0, done.stderr
    assert found.skips == []
    for backend in ("unisono", "mpi", "gloo"):
        own = [result for result in found.results if result.backend == backend]
        assert len(own) == 3 * 2 * 2 * 2
        assert {result.case.collective for result in own} == set(MOES)
        assert all(result.verification.before and result.verification.after for result in own)


@pytest.mark.mpi
@pytest.mark.torch
def test_flat_rows_on_all_backends_and_a_report(tmp_path: Path) -> None:
    what = ["moe_round", "moe_dispatch", "--layout", "flat", "--tokens", "3,9", "--hidden", "32"]
    done = bench(tmp_path / "run", "--ranks", "2", *what)
    found = records.read(tmp_path / "run")
    assert [failure.message for failure in found.failures] == [] == found.problems
    assert done.returncode == 0, done.stderr
    assert len(found.results) == 3 * 2 * 2
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    written = (tmp_path / "run" / "report.md").read_text()
    assert "## Mixture of experts" in written
    assert (tmp_path / "run" / "experts_time.png").exists()


@pytest.mark.mpi
@pytest.mark.torch
def test_a_layer_of_a_model(tmp_path: Path) -> None:
    name = "qwen3-235b-moe-tokens-128"
    done = bench(tmp_path / "run", "barrier", "--workload", name, "--ranks", "2", "--backend", "unisono")
    assert done.returncode == 0, done.stderr
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    written = (tmp_path / "run" / "report.md").read_text()
    assert "Per layer and token of a rank" in written
    assert "1 × moe\\_dispatch 128 tokens bf16 per layer" in written  # noqa: RUF001


# ---- options


def test_the_default_is_three_calls_at_a_range_of_tokens() -> None:
    asked = options_of(Asked(moe=True), [])
    assert asked.collectives == list(MOES) and asked.workloads == []
    assert asked.moe == Grid()
    assert (asked.moe.tokens[0], asked.moe.tokens[-1]) == (1, 4096)
    cases = asked.grid(2)
    assert {case.collective for case in cases} == set(MOES)
    assert {(case.dtype, case.mode, case.memory) for case in cases} == {("bf16", "latency", "plain")}


def test_on_gpus_the_modes_and_backends_are_those_of_gpus() -> None:
    asked = options_of(Asked(moe=True, device="cuda", tokens="8"), [])
    assert asked.backends == ["unisono", "nccl", "async-ep", "torch", "moe-ops", "te"]
    cases = asked.grid(2)
    assert {(case.mode, case.device, case.dtype) for case in cases} == {
        (mode, "cuda", "bf16") for mode in ("graph", "events")
    }
    assert "torch" not in options_of(Asked(device="cuda"), []).backends
    both = options_of(Asked(device="cuda", collectives="all_reduce,moe_round"), []).backends
    assert {"nccl-windows", "te"} <= set(both)


def test_options_narrow_it_down() -> None:
    found = options_of(
        Asked(
            collectives="moe_round,all_reduce",
            tokens="512, 8",
            hidden="1024,7168",
            experts=64,
            top_k="2,8",
            routings="zipf",
            layouts="flat",
            dtypes="float,bf16",
        ),
        [],
    )
    assert found.moe == Grid(
        tokens=(8, 512),
        hidden=(1024, 7168),
        experts=64,
        top_k=(2, 8),
        routings=("zipf",),
        layouts=("flat",),
        dtypes=("f32", "bf16"),
    )
    assert {case.collective for case in found.grid(2)} == {"moe_round", "all_reduce"}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tokens": "8"}, "--tokens: of a mixture of experts, so add --moe, or name moe_round"),
        ({"moe": True, "named": ["all_reduce"]}, "--moe stands for its three cases"),
        ({"moe": True, "tokens": "0"}, "--tokens 0: write numbers from 1 on"),
        ({"moe": True, "top_k": "many"}, "--top-k many: write numbers"),
        ({"moe": True, "routings": "random"}, "choose from uniform, zipf, one_hot"),
        ({"moe": True, "layouts": "rank_major"}, "choose from expert_major, flat"),
        ({"moe": True, "dtypes": "f64"}, "has no f64: choose from f32, f16, bf16"),
        ({"moe": True, "device": "cuda", "to_memory_limit": True}, "no form for --fabric and --to-memory"),
    ],
)
def test_impossible_options_are_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(CaseError, match=says):
        options_of(Asked(**asked), [])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--moe --ranks 3", "--experts 256: 3 ranks cannot have as many each"),
        ("--moe --experts 4 --ranks 2", "--top-k 8: there are only 4 experts"),
    ],
)
def test_what_the_ranks_cannot_do_is_refused(arguments: str, says: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert result.exit_code == finish.USAGE
    assert says in " ".join(result.stderr.split())
