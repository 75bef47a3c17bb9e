"""Matmuls with their collective in the bench: cases, the reference of the checks, whole runs, options."""

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
from unisono import records
from unisono.bench import cases, matmul, verify, verify_matmul, workloads
from unisono.bench.backends.base import Buffers, ResultCall
from unisono.bench.buffers import Pools
from unisono.bench.cases import CaseError, layout
from unisono.bench.matmul import GATHER, Grid
from unisono.cli.app import app
from unisono.cli.asked import Asked
from unisono.cli.resolve import options_of
from unisono.records import Case, Matmul
from unisono.records.vocabulary import DTYPES, MATMUL, MATMULS, alone, bus_factor_of, case_text

SMALL = Grid(rows=(1, 5, 24), shapes=("3x7",), dtypes=("f32", "bf16"))
NAMES = [*MATMULS]


@pytest.fixture(autouse=True)
def by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_launchers(monkeypatch)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for made in (WrongRow, WrongWhileTimed):
        monkeypatch.setitem(BACKENDS, made.name, made)
    return session_runs(tmp_path, monkeypatch)


# ---- cases


def test_bytes_are_those_of_the_collective_and_shares_are_those_of_torch_chunk() -> None:
    gather, scatter, both = (matmul.case(name, 3, 7, 4, 10, "bf16") for name in NAMES)
    assert [one.bytes for one in (gather, scatter, both)] == [7 * 4 * 2, 7 * 10 * 2, 7 * 10 * 2]
    assert [len(matmul.share(gather, rank)) for rank in range(3)] == [3, 3, 1]
    assert [layout(gather, rank).x for rank in range(3)] == [(12 + 40,), (12 + 40,), (4 + 40,)]
    assert [layout(scatter, rank).out for rank in range(3)] == [(30,), (30,), (10,)]
    assert layout(both, 2).x == (28 + 40,) and layout(both, 2).out == layout(gather, 2).out == (70,)
    assert [bus_factor_of(one) for one in (gather, scatter, both)] == [2 / 3, 2 / 3, 4 / 3]
    assert case_text(gather) == f"{GATHER}, k 4, n 10 56 B bf16, 3 ranks, latency, plain"


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_a_matmul_that_sends_nothing_and_a_case_of_the_collective(name: str) -> None:
    fused = matmul.case(name, 2, 6, 4, 10, "f32", mode="graph", device="cuda")
    product, collective = alone(fused)
    assert product == msgspec.structs.replace(fused, collective=MATMUL, bytes=6 * 10 * 4)
    assert bus_factor_of(product) == 0
    made = cases.make_case(MATMULS[name], fused.bytes, "f32", 2, mode="graph", device="cuda")
    assert collective == made


def test_a_collective_alone_has_whole_blocks() -> None:
    assert alone(matmul.case(GATHER, 3, 7, 4, 10, "bf16"))[1].bytes == 54
    assert alone(matmul.case(GATHER, 3, 1, 1, 10, "bf16"))[1].bytes == 6


def test_names_stand_for_shapes_that_are_divided_among_the_ranks() -> None:
    grid = Grid(rows=(16,), shapes=("gate_up", "down", "square", "8x6"))
    found = [case for case in grid.cases(4, NAMES) if case.collective in MATMULS]
    shapes = {(case.collective, *msgspec.structs.astuple(matmul.shape(case))) for case in found}
    gathers = {(GATHER, 16, k, n) for k, n in ((8192, 57344 // 4), (8192, 2048), (8, 6))}
    sums = {(name, 16, k, n) for name in NAMES[1:] for k, n in ((28672 // 4, 8192), (2048, 8192), (8, 6))}
    assert shapes == gathers | sums


def test_each_case_comes_once_and_parts_with_it() -> None:
    found = Grid().cases(2, NAMES)
    assert len(found) == len(set(found)) == 9 + 9 + 6
    assert {case.collective for case in found} == {*MATMULS, *MATMULS.values(), MATMUL}
    assert {case.collective for case in Grid().cases(2, [GATHER])} == {GATHER, "all_gather", MATMUL}
    assert {case.collective for case in Grid().cases(2, [MATMUL])} == {MATMUL}


def test_a_graph_of_long_matmuls_has_few_calls() -> None:
    long = matmul.case(GATHER, 2, 16384, 8192, 28672, "bf16", "graph", "cuda")
    short = matmul.case(GATHER, 2, 64, 64, 64, "bf16", "graph", "cuda")
    assert cases.calls_per_sample(long) == cases.FEWEST_CALLS < cases.calls_per_sample(short)


# ---- the reference


@pytest.mark.parametrize("name", [*NAMES, MATMUL])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("ranks", "m", "k", "n"), [(1, 3, 2, 5), (3, 1100, 1000, 300), (2, 70, 30000, 9)])
def test_the_reference_is_a_plain_product(name: str, dtype: str, ranks: int, m: int, k: int, n: int) -> None:
    """Rows and columns repeat, so that the larger cases have some of them twice."""
    case = matmul.case(name, ranks, m, k, n, dtype)
    arrays, placed, expected = [], [], []
    for rank in range(ranks):
        placed.append(Pools([case], rank).place(case))
        expected.append(verify_matmul.expectation(case, rank, 5, True, verify.NUMPY))
        verify.arrange(placed[-1], expected[-1])
        arrays.append(matmul.arrays(case, rank, placed[-1].buffers.x, placed[-1].buffers.out))
    exact = [one.a.astype(np.float64) @ one.b.astype(np.float64) for one in arrays]
    products = [one.astype(DTYPES[dtype]) for one in exact]
    assert all(
        (one.astype(np.float64) == wide).mean() > 0.99 for one, wide in zip(products, exact, strict=True)
    )
    whole = np.concatenate([one.a for one in arrays]).astype(np.float64)
    for rank, (one, where) in enumerate(zip(arrays, placed, strict=True)):
        if name == GATHER:
            one.out[:] = (whole @ one.b.astype(np.float64)).astype(DTYPES[dtype])
        elif name == MATMUL:
            one.out[:] = products[rank]
        else:
            rows = matmul.share(case, rank) if name == NAMES[1] else range(m)
            one.out[:] = verify.combine(products, "sum", dtype)[rows.start : rows.stop]
        assert verify.inspect(case, where, expected[rank]) is None
        if one.out.size:
            one.out[-1, -1] += one.out.dtype.type(1)
            assert "1 wrong element" in str(verify.inspect(case, where, expected[rank]))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_sum_is_rounded_and_another_order_is_within_the_bound_but_a_lost_rank_is_not(dtype: str) -> None:
    case = matmul.case("matmul_all_reduce", 3, 50, 400, 60, dtype)
    each = [
        verify_matmul.product(case, verify_matmul.make_a(case, r, 5), verify_matmul.make_b(case, r, 5))
        for r in range(3)
    ]
    exact: Any = sum(one.astype(np.float64) for one in each)
    assert (verify.combine(each, "sum", dtype).astype(np.float64) != exact).mean() > 0.2
    bounded = list(verify_matmul.expectation(case, 0, 5, False, verify.NUMPY).out)

    def wrong(blocks: list[Any]) -> int:
        total = blocks[0]
        for one in blocks[1:]:
            total = (total + one).astype(DTYPES[dtype])
        return verify.differences(total.reshape(-1), bounded)[0]

    assert wrong(each[::-1]) == 0
    assert wrong(each[:2]) > exact.size // 2 < wrong(each[1:])
    assert wrong([each[0], each[2]]) > exact.size // 4


# ---- runs


class WrongRow(Wrapped):
    """Changes the last element of rank 1's result."""

    name = "wrong_row"
    good = 0  # calls of each case

    def meddle(self, call: Callable[[], object], case: Case, buffers: Buffers) -> Callable[[], object]:
        if not isinstance(call, ResultCall):
            return call
        calls = 0

        def counted() -> None:
            nonlocal calls
            call()
            calls += 1

        def result() -> None:
            call.result()
            if self.rank == 1 and calls > self.good:
                buffers.out[-1:] += 1

        return ResultCall(counted, result)


class WrongWhileTimed(WrongRow):
    name = "wrong_while_timed"
    good = 3


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_unisono_is_right_to_the_bit(run: Run, ranks: int) -> None:
    found, _ = run(["unisono", "unisono:apart"], ranks, collectives=NAMES, matmul=SMALL)
    assert [failure.message for failure in found.failures] == []
    fused = [case for case in SMALL.cases(ranks, NAMES) if case.collective in MATMULS]
    for backend in ("unisono", "unisono:apart"):
        own = [result for result in found.results if result.backend == backend]
        assert {result.case for result in own} >= set(fused)
        assert all(result.verification.before and result.verification.after for result in own)
        assert {result.verification.bound for result in own} == {"bit-exact"}
    reasons = {skip.case.collective: skip.reason for skip in found.skips if skip.case}
    one_form = "apart is a form of fused calls."
    assert reasons == {MATMUL: "a matmul alone has one form.", **dict.fromkeys(MATMULS.values(), one_form)}


@pytest.mark.torch
def test_a_wrong_product_is_a_failure_at_once_or_while_timed(run: Run, tmp_path: Path) -> None:
    grid = msgspec.structs.replace(SMALL, rows=(5, 24), dtypes=("f32",))
    fused = [case for case in grid.cases(2, NAMES) if case.collective in MATMULS]
    found, _ = run(["wrong_row", "wrong_while_timed"], 2, collectives=NAMES, matmul=grid)
    at_once = {failure.case for failure in found.failures if failure.backend == "wrong_row"}
    assert at_once == set(fused)
    later = [failure for failure in found.failures if failure.backend == "wrong_while_timed"]
    assert {failure.case for failure in later} == set(fused)
    assert all("after the timed part: 1 wrong element" in failure.message for failure in later)


@pytest.mark.torch
def test_who_has_none_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapped, "matmul", False, raising=False)
    grid = msgspec.structs.replace(SMALL, rows=(5,), dtypes=("f32",))
    found, _ = run(["unisono:direct", "unisono:fp8", "notes"], 2, collectives=NAMES[:1], matmul=grid)
    reasons = {
        skip.backend: skip.reason for skip in found.skips if skip.case and skip.case.collective == GATHER
    }
    assert reasons == {
        "unisono:direct": f"{GATHER} has no direct: it has apart.",
        "unisono:fp8": f"{GATHER} has no fp8: it has apart.",
        "notes": "notes has no matmuls with their collective.",
    }


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_backends_in_one_run_are_right_and_a_report(tmp_path: Path, ranks: int) -> None:
    shape = ["--rows", "5,24", "--shape", "40x16", "-d", "f32,bf16", "-n", "2"]
    who = "unisono,unisono:apart,gloo,torch-unisono"
    done = bench(tmp_path / "run", "--matmul", "--ranks", str(ranks), *shape, "--backends", who)
    found = records.read(tmp_path / "run")
    assert [failure.message for failure in found.failures] == [] == found.problems
    assert done.returncode == 0, done.stderr
    fused = [result for result in found.results if result.case.collective in MATMULS]
    assert all(result.verification.before and result.verification.after for result in fused)
    counts = {name: sum(result.backend == name for result in fused) for name in who.split(",")}
    # an all_reduce needs no equal shares, which 5 rows do not have
    assert counts == {"unisono": 12, "unisono:apart": 12, "gloo": 8, "torch-unisono": 8}
    assert {r.verification.bound for r in fused if r.backend == "unisono"} == {"bit-exact"}
    reasons = {skip.reason for skip in found.skips if skip.backend == "gloo"}
    assert f"its all_gather has equal shares, and 5 rows have none of {ranks} ranks." in reasons
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    assert "## Matmuls with their collective" in (tmp_path / "run" / "report.md").read_text()


# ---- options


def test_the_default_is_what_suits_the_device_and_the_calls_apart_too() -> None:
    found = options_of(Asked(matmul=True), [])
    assert found.collectives == NAMES and found.workloads == [] and found.matmul == Grid()
    assert found.backends == ["unisono", "gloo", "unisono:apart"]
    assert found.grid(2) == Grid().cases(2, NAMES)
    assert "unisono:apart" not in options_of(Asked(), []).backends


def test_options_narrow_it_down() -> None:
    asked = Asked(named=[GATHER, "all_gather"], rows="64,8", shapes="qkv,100x20", dtypes="half", sizes="1K")
    found = options_of(asked, [])
    assert found.matmul == Grid(rows=(8, 64), shapes=("qkv", "100x20"), dtypes=("f16",))
    grid = found.grid(2)
    assert len(grid) == len(set(grid)) and {case.collective for case in grid} == {
        GATHER,
        "all_gather",
        MATMUL,
    }
    assert options_of(Asked(matmul=True, backends="gloo"), []).backends == ["gloo"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"rows": "8"}, "--rows: of matmuls, so add --matmul"),
        ({"shapes": "qkv"}, "--shape: of matmuls, so add --matmul"),
        ({"matmul": True, "named": ["all_reduce"]}, "--matmul stands for its three cases"),
        ({"matmul": True, "shapes": "ffn"}, "--shape ffn: choose from small, square, qkv, .*like 8192x2048"),
        ({"matmul": True, "shapes": "8x0"}, "--shape 8x0: choose from"),
        ({"matmul": True, "shapes": ","}, "--shape ,: choose from"),
        ({"matmul": True, "rows": "0"}, "--rows 0: write numbers from 1 on"),
        ({"matmul": True, "dtypes": "f64"}, "matmuls have no f64: choose from f32, f16, bf16"),
        ({"matmul": True, "fabric": True}, "no form for --fabric, --to-memory-limit and --one-process"),
        ({"matmul": True, "one_process": True, "device": "cuda"}, "no form for --fabric"),
        ({"matmul": True, "backends": "unisono,unisono@/tmp"}, "is measured by collectives on CPUs only"),
    ],
)
def test_impossible_options_are_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(CaseError, match=says):
        options_of(Asked(**asked), [])


# ---- workloads


def test_a_layer_has_its_four_matmuls_divided_among_the_ranks() -> None:
    hidden, ffn, heads, kv_heads, head, ranks = 8192, 28672, 64, 8, 128, 4
    ((workload, needed),) = workloads.select(["llama-3-70b-tp-layer-tokens-2048"], ranks, "cuda")
    shapes = [
        (step.collective, msgspec.structs.astuple(step.matmul)) for step in workload.steps if step.matmul
    ]
    assert shapes == [
        (NAMES[0], (2048, hidden, (heads + 2 * kv_heads) * head // ranks)),
        (NAMES[1], (2048, heads * head // ranks, hidden)),
        (NAMES[0], (2048, hidden, 2 * ffn // ranks)),
        (NAMES[1], (2048, ffn // ranks, hidden)),
    ]
    assert {(case.dtype, case.mode, case.device) for case in needed} == {("bf16", "graph", "cuda")}
    assert workload.units_per_step == 80


def test_a_layer_is_measured_on_cpus_if_it_is_named_also_apart() -> None:
    name = "llama-3-70b-tp-layer"
    assert name not in workloads.split_workloads("all") and name in workloads.split_workloads("all", "cuda")
    asked = options_of(Asked(workloads=f"{name}-tokens-16", named=[GATHER]), [])
    assert asked.workloads == [f"{name}-tokens-16"]
    on_gpus = options_of(Asked(workloads=name, named=["all_reduce"], device="cuda"), [])
    assert {"unisono", "unisono:apart", "nccl", "torch-async-tp"} <= set(on_gpus.backends)


# ---- records


def test_records_keep_the_shape_and_older_ones_are_read(tmp_path: Path) -> None:
    case = matmul.case(GATHER, 2, 7, 4, 10, "bf16")
    old = data.exact("unisono", cases.make_case("all_reduce", 64, "f32", 2), 1.0)
    data.write(tmp_path, data.run(schema="1.7"), [data.exact("unisono", case, 1.0), old], data.end())
    found = records.read(tmp_path)
    assert found.problems == [] and [result.case for result in found.results] == [case, old.case]
    assert found.results[0].case.matmul == Matmul(m=7, k=4, n=10)


@pytest.mark.parametrize("name", [GATHER, MATMUL])
def test_records_without_a_shape_are_left_out(tmp_path: Path, name: str) -> None:
    bare = msgspec.structs.replace(matmul.case(name, 2, 7, 4, 10, "bf16"), matmul=None)
    data.write(tmp_path, data.run(), [data.exact("unisono", bare, 1.0)], data.end())
    (problem,) = records.read(tmp_path).problems
    assert f"unisono on {name} has no matmul" in problem
