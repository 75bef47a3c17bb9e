"""Matmuls with their collective in the report: the overlap, the chart, and a layer."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import report_data as data
from unisono import report
from unisono.bench import matmul, workloads
from unisono.records import Record, text
from unisono.records.stats import Interval
from unisono.records.vocabulary import MATMULS, alone
from unisono.report import analysis, figures, gate, matmuls, model, payload, tables, terminal

TIMES = {"unisono": 110.0, "unisono:apart": 140.0, "nccl": 165.0}  # us of a call
ALONE = 100.0, 40.0  # us of the matmul and of the collective


def measured(*shapes: tuple[int, int, int]) -> list[Record]:
    found: list[Record] = []
    for name in MATMULS:
        for shape in shapes:
            case = matmul.case(name, 2, *shape, "bf16", "graph", "cuda")
            found += [data.exact(backend, case, us) for backend, us in TIMES.items()]
            for part, us in zip(alone(case), ALONE, strict=True):
                found += [data.exact("unisono", part, us), data.exact("nccl", part, us)]
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("matmuls")
    data.write(directory, data.run(), measured((2048, 8192, 5120), (8192, 8192, 5120)), data.end())
    report.build(directory)
    return directory


def test_overlap_is_the_share_of_the_shorter_part_that_is_hidden() -> None:
    def exactly(us: float) -> Interval:
        return Interval(us, us, us)

    parts = matmuls.Parts(exactly(100.0), exactly(40.0))
    found = [parts.overlap(exactly(us)).median for us in (100.0, 110.0, 140.0, 150.0)]
    assert found == [1.0, 0.75, 0.0, -0.25]
    assert matmuls.Parts(exactly(40.0), exactly(100.0)).overlap(exactly(110.0)).median == 0.75
    loose = matmuls.Parts(Interval(100.0, 99.0, 102.0), Interval(40.0, 39.0, 44.0)).overlap(
        Interval(110.0, 108.0, 113.0)
    )
    assert (loose.low, loose.median, loose.high) == ((138 - 113) / 40, 0.75, (146 - 108) / 40)


def test_a_row_for_each_case_with_its_parts_its_overlap_and_both_ratios(built: Path) -> None:
    (table,) = matmuls.study(model.load(built))
    assert table.title == "2 ranks, cuda, graph, plain, bf16"
    assert table.head == [
        *("Call", "m × k × n", "Overlap", "Matmul", "Collective"),  # noqa: RUF001
        *("unisono", "unisono:apart", "nccl", "Over unisono:apart", "Speed-up"),
    ]
    assert len(table.rows) == 6
    row = table.rows[0]
    assert row[:2] == ["all_gather_matmul", "2,048 × 8,192 × 5,120"]  # noqa: RUF001
    assert row[2] == "75 %"
    assert row[3:6] == [text.time(us * (1 + 1e-4 * 9.5)) for us in (*ALONE, TIMES["unisono"])]
    assert row[8:] == ["1.27× FASTER", "1.50× FASTER"]  # noqa: RUF001


def test_page_twin_and_terminal_have_it(built: Path) -> None:
    written = (built / "report.md").read_text()
    assert "## Matmuls with their collective" in written and "![matmuls](matmuls.png)" in written
    assert "| 75 % |" in written
    assert 'id="matmul-bands"' in (built / "report.html").read_text()
    console = Console(width=250, file=io.StringIO(), record=True)
    for part in terminal.summary(model.load(built)):
        console.print(part)
    printed = console.export_text()
    assert "matmuls with their collective, 2 ranks, cuda" in printed and "75 %" in printed


def test_the_chart_has_a_panel_for_each_call_and_ends_of_the_band(built: Path) -> None:
    found = [one for one in figures.fixed(model.load(built)) if one.template == "overlap"]
    assert [one.title for one in found] == list(MATMULS)
    for one in found:
        assert len(one.rows) == 2 * len(TIMES)
        for row in one.rows:
            assert (row["best"], row["apart"]) == pytest.approx((1.0, 1.4))
            assert row["value"] == pytest.approx(TIMES[row["backend"]] / 100)


def test_what_scatters_has_no_overlap_and_without_parts_there_is_none(tmp_path: Path) -> None:
    case = matmul.case("all_gather_matmul", 2, 64, 32, 16, "f32")
    parts = [data.exact("unisono", part, us) for part, us in zip(alone(case), (100.0, 1.0), strict=True)]
    data.write(tmp_path / "few", data.run(), [data.timed("unisono", case, 101.0), *parts], data.end())
    data.write(tmp_path / "none", data.run(), [data.timed("unisono", case, 101.0)], data.end())
    for name, words in (("few", "unclear"), ("none", text.MISSING)):
        (table,) = matmuls.study(model.load(tmp_path / name))
        assert table.rows[0][table.head.index("Overlap")] == words
    report.build(tmp_path / "none")
    assert not (tmp_path / "none" / "matmuls.png").exists()


def test_a_matmul_alone_judges_no_library(built: Path) -> None:
    loaded = model.load(built)
    (group,) = analysis.groups(loaded)
    names = {line.title.partition(",")[0] for line in group.collectives}
    assert names == {*MATMULS, *MATMULS.values()}
    assert all(pair.own.key.case.collective != "matmul" for pair in gate.gate(built).checked)
    assert all(curve.key.case.collective != "matmul" for curve in analysis.curves(loaded))
    drawn = figures.panels(payload.results(loaded))
    assert {one.title.partition(",")[0] for one in drawn if one.place == figures.BANDWIDTH} == names
    assert any(one.title.startswith("matmul,") for one in drawn if one.place == figures.LATENCY)


def test_a_curve_goes_over_the_rows_of_a_shape(built: Path) -> None:
    curves = [one for one in analysis.curves(model.load(built)) if one.key.case.matmul]
    assert [len(curve.winners) for curve in curves] == [2, 2, 2]


def test_a_layer_has_its_time_fused_and_apart(tmp_path: Path) -> None:
    ((work, cases),) = workloads.select(["llama-3-70b-tp-layer-tokens-2048"], 2, "cuda")
    found = [
        msgspec.structs.replace(data.exact(backend, case, us), workload=work.name)
        for case in cases
        for backend, us in TIMES.items()
    ]
    data.write(tmp_path, data.run(), work, found, data.end())
    (cost,) = analysis.workload_costs(model.load(tmp_path))
    table = tables.workload(cost)
    assert [row[:2] for row in table.rows[:3]] == [
        ["unisono", "440 µs"],
        ["unisono:apart", "561 µs"],
        ["nccl", "661 µs"],
    ]
    assert "1 × all_gather_matmul 2,048 × 8,192 × 5,120: 110 µs" in str(table.rows[0][-1])  # noqa: RUF001
