"""Fused norms in the bench: cases, the reference of the checks, whole runs, options, and the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import report_data as data
from bench_backends import BACKENDS, Run, Wrapped, session_runs
from bench_cli import bench, leave_launchers
from norm_reference import codes_and_scales, joined, normalised
from unisono import records, report
from unisono.bench import norm, verify, verify_norm
from unisono.bench.backends.base import Buffers
from unisono.bench.buffers import Pools
from unisono.bench.cases import CaseError, buffer_bytes, layout
from unisono.bench.norm import KIB, Grid
from unisono.cli.app import app
from unisono.cli.asked import Asked
from unisono.cli.resolve import options_of
from unisono.records import Case
from unisono.records.vocabulary import DTYPES, NORM, QUANTS, bus_factor_of, case_text
from unisono.report import analysis, model, studies

SMALL = Grid(sizes=(1, 10 * KIB), hidden=(128, 1152), dtypes=("f32", "f16", "bf16"), quants=QUANTS)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_launchers(monkeypatch)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for made in (WrongLast, WrongCode):
        monkeypatch.setitem(BACKENDS, made.name, made)
    return session_runs(tmp_path, monkeypatch)


# ---- cases


def test_a_case_has_the_rows_of_its_bytes_and_at_least_one() -> None:
    one, many = norm.case(4, 1, 100, "bf16"), norm.case(4, 100 * 2 * 7 + 199, 100, "bf16", mode="throughput")
    assert (norm.shape(one).rows, one.bytes, norm.shape(many).rows, many.bytes) == (1, 200, 7, 1400)
    assert (layout(many, 1).x, layout(many, 1).out) == ((15, 100), (14, 100))
    assert buffer_bytes(many) == 15 * 100 * 2
    assert bus_factor_of(many) == 1.5
    assert case_text(many) == f"{NORM}, hidden 100 1.37 KiB bf16, 4 ranks, throughput, plain"
    quantised = norm.case(2, 64 * KIB, 4096, "f32", "fp8_128")
    assert case_text(quantised) == f"{NORM}, hidden 4096, fp8_128 64 KiB f32, 2 ranks, latency, plain"


def test_the_usual_grid_has_one_quantised_case() -> None:
    found = Grid().cases(2)
    assert len(found) == len(set(found)) == 11
    sizes = {case.bytes for case in found if case.dtype == "f32"}
    assert sizes == {64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB}
    quantised = [(case.bytes, case.dtype) for case in found if norm.shape(case).quant != "none"]
    assert quantised == [(1024 * KIB, "bf16")]
    assert len(SMALL.cases(2)) == 2 * 3 * 2 * 2


# ---- the reference


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("ranks", "hidden"), [(1, 128), (3, 2304)])
def test_the_reference_is_that_of_the_contract(ranks: int, hidden: int, dtype: str, quant: str) -> None:
    """Rows repeat, so that the case has some of them twice."""
    size = 470 * hidden * DTYPES[dtype].itemsize
    case = norm.case(ranks, size, hidden, dtype, quant)
    placed, xs = Pools([case], 0).place(case), []
    for rank in range(ranks):
        expected = verify_norm.expectation(case, rank, 5, True, verify.NUMPY)
        verify.arrange(placed, expected)
        found = norm.arrays(case, placed.buffers.x, placed.buffers.out)
        xs.append(found.x.copy())
    found.residual_out[:] = joined(xs, found.residual)
    rows = normalised(found.residual_out, found.weight, None, norm.EPS, "rms")
    if quant == "none":
        found.out[:] = rows
    else:
        found.out[:], found.scales[:] = codes_and_scales(rows, quant)
    assert len({row.tobytes() for row in found.x}) < 470 or hidden == 128
    assert len({xs[0].tobytes(), *(x.tobytes() for x in xs)}) == ranks
    assert verify.inspect(case, verify_norm.decoded(case, placed), expected) is None
    found.residual_out[469, hidden - 1] *= found.residual_out.dtype.type(1.01)
    assert "1 wrong element" in str(verify.inspect(case, verify_norm.decoded(case, placed), expected))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_another_order_is_within_the_bound_and_a_lost_rank_or_a_wrong_eps_is_not(dtype: str) -> None:
    case = norm.case(3, 64 * KIB, 512, dtype)
    pieces = list(verify_norm.expectation(case, 0, 5, False, verify.NUMPY).out)
    made = verify_norm.make_data(case, 5)
    kind = DTYPES[dtype]

    def wrong(xs: list[Any], factor: float = 1.0) -> int:
        total = made.residual
        for x in xs:
            total = (total + x).astype(kind)
        wide = total.astype(np.float64)
        wide *= factor / np.sqrt((wide**2).mean(axis=1, keepdims=True) + norm.EPS)
        out = (wide * made.weight.astype(np.float64)).astype(kind)
        return verify.differences(np.concatenate([out, total]).reshape(-1), pieces)[0]

    assert wrong(made.xs[::-1]) == 0
    assert wrong(made.xs[1:]) > made.residual.size
    assert wrong(made.xs, factor=1.2) > made.residual.size // 2


# ---- runs


class WrongLast(Wrapped):
    """Changes the last bit of the last normalised element once it has been checked, and timed a few times."""

    name = "wrong_last"

    def meddle(self, call: Callable[[], object], case: Case, buffers: Buffers) -> Callable[[], object]:
        calls = 0

        def wrong() -> None:
            nonlocal calls
            call()
            calls += 1
            if self.rank == 1 and calls > 3:
                buffers.out[norm.shape(case).rows - 1, -1:].view("u1")[0] ^= 1

        return wrong


class WrongCode(Wrapped):
    """Changes a code, or without codes a normalised element."""

    name = "wrong_code"

    def meddle(self, call: Callable[[], object], case: Case, buffers: Buffers) -> Callable[[], object]:
        out = norm.arrays(case, buffers.x, buffers.out).out

        def wrong() -> None:
            call()
            out[:1, :1].view("u1")[0, -1] ^= 1

        return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_unisono_is_right_to_the_bit_by_every_algorithm(run: Run, ranks: int) -> None:
    backends = ["unisono", *(f"unisono:{name}" for name in ("one_shot", "two_shot", "apart"))]
    grid = msgspec.structs.replace(SMALL, memories=("plain", "symmetric"))
    found, _ = run(backends, ranks, collectives=[NORM], norm=grid)
    assert [failure.message for failure in found.failures] == [] == found.skips
    assert len(found.results) == 4 * len(grid.cases(ranks)) == 8 * len(SMALL.cases(ranks))
    for result in found.results:
        assert result.verification.before and result.verification.after
        assert result.verification.bound == "bit-exact"
        assert result.algorithm == (result.backend.partition(":")[2] or None)


def test_a_wrong_bit_is_a_failure_at_once_or_while_timed(run: Run) -> None:
    found, _ = run(["wrong_code"], collectives=[NORM], norm=SMALL)
    assert not found.results and len(found.failures) == len(SMALL.cases(3))
    assert all("1 wrong element(s) of the output: element 0" in one.message for one in found.failures)


def test_what_goes_wrong_while_timed_is_a_failure(run: Run) -> None:
    grid = msgspec.structs.replace(SMALL, quants=QUANTS[:1])
    found, _ = run(["wrong_last"], collectives=[NORM], norm=grid)
    assert found.results and found.failures
    assert all(r.verification.before and not r.verification.after for r in found.results)


def test_who_has_none_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapped, "norm", False, raising=False)
    found, _ = run(
        ["unisono:apart", "unisono:direct", "unisono:fp8", "notes"],
        collectives=[NORM, "all_reduce"],
        sizes=[64],
        norm=SMALL,
    )
    reasons = {skip.backend: skip.reason for skip in found.skips if skip.case and skip.case.norm}
    has = "it has one_shot, two_shot, apart."
    assert reasons == {
        "unisono:direct": f"{NORM} has no direct: {has}",
        "unisono:fp8": f"{NORM} has no fp8: {has}",
        "notes": f"notes has no {NORM}.",
    }
    others = {skip.backend: skip.reason for skip in found.skips if skip.case and not skip.case.norm}
    assert others["unisono:apart"] == "apart is a form of fused calls."


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_backends_in_one_run_are_right_and_a_report(tmp_path: Path, ranks: int) -> None:
    shape = ["--sizes", "1,70K", "--hidden", "128,1152", "--quant", "none,fp8_128", "-d", "f32,f16,bf16"]
    done = bench(tmp_path / "run", "--norm", "--ranks", str(ranks), *shape, "-n", "2")
    found = records.read(tmp_path / "run")
    assert [failure.message for failure in found.failures] == [] == found.problems
    assert done.returncode == 0, done.stderr
    counts = {"unisono": 24, "unisono:apart": 24, "gloo": 24, "mpi": 4}  # MPI sums f32 alone
    for backend, count in counts.items():
        own = [result for result in found.results if result.backend == backend]
        assert len(own) == count
        assert all(result.verification.before and result.verification.after for result in own)
    assert {skip.backend for skip in found.skips} == {"mpi"}
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    assert "## Fused norms" in (tmp_path / "run" / "report.md").read_text()


# ---- options


def test_the_default_is_a_range_of_sizes_and_the_calls_apart_too() -> None:
    found = options_of(Asked(norm=True), [])
    assert found.collectives == [NORM] and found.workloads == [] and found.norm == Grid()
    assert found.backends == ["unisono", "mpi", "gloo", "unisono:apart"]
    assert found.grid(2) == Grid().cases(2)
    assert "unisono:apart" not in options_of(Asked(), []).backends


def test_options_narrow_it_down() -> None:
    asked = Asked(named=[NORM, "all_reduce"], sizes="4K,1M", hidden="512", quants="fp8_128", dtypes="half")
    found = options_of(asked, [])
    assert found.norm == Grid(
        sizes=(4 * KIB, 1024 * KIB), hidden=(512,), dtypes=("f16",), quants=("fp8_128",)
    )
    assert {case.collective for case in found.grid(2)} == {NORM, "all_reduce"}
    for device, memories in (("cpu", ("symmetric",)), ("cuda", ("plain",))):
        found = options_of(Asked(norm=True, memories="symmetric", device=device), [])
        assert found.norm.memories == memories
    assert options_of(Asked(norm=True, backends="gloo"), []).backends == ["gloo"]
    both = options_of(Asked(norm=True, moe=True, hidden="256"), [])
    assert both.norm.hidden == both.moe.hidden == (256,)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"quants": "none"}, f"--quant is of fused norms, so add --norm, or name {NORM}"),
        ({"norm": True, "named": ["all_reduce"]}, f"--norm stands for {NORM}"),
        ({"norm": True, "quants": "mx"}, "choose from none, fp8_128"),
        ({"norm": True, "quants": "fp8_128", "hidden": "100"}, "blocks of 128: give multiples of 128"),
        ({"norm": True, "hidden": "0"}, "--hidden 0: write numbers from 1 on"),
        ({"norm": True, "dtypes": "f64"}, "have no f64: choose from f32, f16, bf16"),
        ({"norm": True, "fabric": True}, "no form for --fabric and --to-memory-limit"),
        ({"norm": True, "device": "cuda", "quants": "none"}, "by tools/norm-streams.py: leave --quant out"),
        ({"hidden": "8"}, "--hidden: of a mixture of experts"),
    ],
)
def test_impossible_options_are_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(CaseError, match=says):
        options_of(Asked(**asked), [])


# ---- the report


def test_a_row_for_each_case_with_both_ratios_and_curves_by_bytes(tmp_path: Path) -> None:
    found = []
    for size in (64 * KIB, 1024 * KIB):
        case, us = norm.case(2, size, 4096, "bf16"), size / KIB
        times = {"unisono": us, "unisono:apart": 1.5 * us, "gloo": 4 * us}
        found += [data.exact(backend, case, time) for backend, time in times.items()]
    data.write(tmp_path, data.run(), found, data.end())
    report.build(tmp_path)
    loaded = model.load(tmp_path)
    table = studies.norms(loaded)
    assert table.head == [
        *("Call", "Type", "Where", "Rows", "Size", "unisono", "unisono:apart", "gloo"),
        *("Over unisono:apart", "Speed-up"),
    ]
    assert [row[3:5] for row in table.rows] == [["8", "64 KiB"], ["128", "1 MiB"]]
    assert {tuple(row[8:]) for row in table.rows} == {("1.50× FASTER", "4.00× FASTER")}  # noqa: RUF001
    (curve,) = analysis.curves(loaded)
    assert [pair.own.key.case.bytes for pair in curve.winners] == [64 * KIB, 1024 * KIB]


def test_records_without_a_shape_are_left_out(tmp_path: Path) -> None:
    bare = msgspec.structs.replace(norm.case(2, 64 * KIB, 4096, "bf16"), norm=None)
    data.write(tmp_path, data.run(), [data.exact("unisono", bare, 1.0)], data.end())
    (problem,) = records.read(tmp_path).problems
    assert f"unisono on {NORM} has no fused norm" in problem
