"""Mixture of experts in the report, compare and gate."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import report_data as data
from unisono import records, report
from unisono.bench import moe
from unisono.records import Case, Record, Workload, WorkloadStep
from unisono.records.vocabulary import MOES, bus_factor_of
from unisono.report import analysis, compare, figures, gate, model, payload, plots, studies, tables


def a_case(name: str, tokens: int, hidden: int = 32, ranks: int = 2, **other: str) -> Case:
    return moe.case(name, ranks, tokens, hidden, 8, 2, "bf16", **other)


def measured(factor: float = 1.0) -> list[Record]:
    """Times of 10 us a token on unisono; three times as much on mpi, half as much with one token."""
    found: list[Record] = []
    cases = [a_case(name, tokens) for name in ("moe_dispatch", "moe_round") for tokens in (1, 16, 64)]
    for case in [*cases, a_case("moe_round", 16, 64), a_case("moe_round", 16, layout="flat")]:
        assert case.moe is not None
        us = 10.0 * case.moe.tokens * factor
        slow = 3.0 if case.moe.tokens >= 16 else 0.5
        found += [data.exact("unisono", case, us), data.exact("mpi", case, slow * us)]
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    data.write(directory, data.run(), measured(), data.sweep(), data.end())
    report.build(directory)
    return directory


def test_a_row_for_each_case_with_both_bandwidths_and_the_speed_up(built: Path) -> None:
    table = studies.experts(model.load(built))
    assert table.head[:5] == ["Call", "Shape", "Type", "Where", "Tokens"]
    assert table.head[5:] == ["unisono", "mpi", "GB/s", "Between ranks", "Of the ceiling", "Speed-up"]
    assert len(table.rows) == 8
    row = next(row for row in table.rows if row[0] == "moe_round" and row[4] == "64")
    case = a_case("moe_round", 64)
    assert case.moe is not None
    assert row[1:4] == ["top-2 of 8, hidden 32", "bf16", "2 ranks, latency"]
    assert row[5:7] == ["641 µs", "1.92 ms"]
    us = 640 * (1 + 1e-4 * 9.5)
    assert row[7:9] == [records.text.gbps(size / us / 1e3) for size in (case.bytes, case.moe.remote_bytes)]
    assert row[10] == "3.00× FASTER"  # noqa: RUF001
    assert {row[0] for row in table.rows} == {"moe_dispatch", "moe_round", "moe_round, flat rows"}


def test_one_gpu_is_measured_by_a_copy_and_names_its_sms(tmp_path: Path) -> None:
    cases = [a_case(name, 16, ranks=1, mode="graph", device="cuda") for name in MOES]
    found: list[Record] = [
        msgspec.structs.replace(data.exact("unisono", case, 2.0), sms=number)
        for number, case in enumerate(cases)
    ]
    assert all(case.bytes % (16 * 32 * 2) == 0 and bus_factor_of(case) == 0 for case in cases)
    data.write(tmp_path, data.run(1), found, data.end())
    assert not records.read(tmp_path).problems
    table = studies.experts(model.load(tmp_path))
    assert table.head[-3:] == ["Of the ceiling", "SMs", "Speed-up"]
    assert [row[3] for row in table.rows] == ["1 rank, graph, cuda"] * 3
    # 16 rows are read and 32 written, or the reverse, each of 64 B: a copy of as much traffic copies 24
    copied = [24 * 64, 24 * 64, 48 * 64]
    us = data.exact("unisono", cases[0], 2.0).median_us
    shares = [records.text.percent(size / us / 1e3 / 12.0) for size in copied]
    assert [row[-3:-1] for row in table.rows] == [[share, str(n)] for n, share in enumerate(shares)]


def test_curves_by_tokens_where_there_are_several(built: Path) -> None:
    loaded = model.load(built)
    found = figures.experts(loaded)
    assert {(one.place, one.title) for one in found} == {
        (place, name) for place in figures.EXPERTS.values() for name in ("moe_dispatch", "moe_round")
    }
    for one in found:
        assert one.template in ("bandwidth_by_tokens", "latency_by_tokens")
        assert {row["column"] for row in one.rows} == {1, 16, 64}
        assert {row["shape"] for row in one.rows} == {"top-2 of 8, hidden 32"}
    names = {path.name for path in built.iterdir()}
    assert {"experts_time.png", "experts_bandwidth.png"} <= names
    written = (built / "report.md").read_text()
    assert "![experts time](experts_time.png)" in written
    assert 'id="experts-time"' in (built / "report.html").read_text()


def test_curves_of_one_rank_are_of_time_and_name_the_mode_if_there_are_several(tmp_path: Path) -> None:
    modes = ("graph", "events")
    cases = [
        a_case("moe_round", tokens, ranks=1, mode=mode, device="cuda") for tokens in (1, 16) for mode in modes
    ]
    data.write(tmp_path, data.run(1), [data.exact("unisono", case, 2.0) for case in cases], data.end())
    loaded = model.load(tmp_path)
    assert [one.place for one in figures.experts(loaded)] == [figures.EXPERTS[figures.LATENCY]] * 2
    chart = plots._experts(loaded, figures.LATENCY, "Times")
    subtitles = {text.partition(", bf16")[2] for text in json.dumps(chart).split('"') if ", bf16, " in text}
    assert {", graph", ", events"} <= subtitles


def test_without_one_there_is_no_section(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.sweep(), data.end())
    report.build(tmp_path)
    assert "## Mixture of experts" not in (tmp_path / "report.md").read_text()
    assert not list(tmp_path.glob("experts_*"))


def test_sizes_are_tokens_and_shapes_are_chosen_apart(built: Path) -> None:
    rows = [row for row in payload.results(model.load(built)) if row["shape"]]
    assert {(row["size"], row["column"], row["t_column"]) for row in rows} == {
        (words, tokens, words) for tokens, words in ((1, "1 token"), (16, "16 tokens"), (64, "64 tokens"))
    }
    (shape,) = [one for one in payload.dimensions(rows) if one["name"] == "shape"]
    assert shape["values"] == ["top-2 of 8, hidden 32", "top-2 of 8, hidden 64"]


def test_crossovers_are_between_tokens(built: Path) -> None:
    loaded = model.load(built)
    curves = [curve for curve in analysis.curves(loaded) if curve.key.case.collective == "moe_dispatch"]
    (curve,) = curves
    assert len(curve.winners) == 3
    (row,) = [row for row in tables.crossovers(loaded).rows if str(row[0]).startswith("moe_dispatch")]
    assert "mpi, 1 token" in str(row[2]) and "unisono, 16 tokens" in str(row[3])
    assert row[4] == "≈ 3 tokens"


def test_two_runs_are_compared_and_the_gate_judges(tmp_path: Path) -> None:
    data.write(tmp_path / "a", data.run(), measured(), data.end())
    data.write(tmp_path / "b", data.run(), measured(0.5), data.end())
    found = compare.compare(tmp_path / "a", tmp_path / "b")
    assert len(found.changes) == 16 and not found.only_a and not found.only_b
    assert all(change.ratio == pytest.approx(2) for change in found.changes)
    judged = gate.gate(tmp_path / "a")
    assert len(judged.checked) == 8
    assert {pair.own.key.case.moe.tokens for pair in judged.below if pair.own.key.case.moe} == {1}


def test_a_workload_has_the_time_of_a_layer_and_of_a_token(tmp_path: Path) -> None:
    cases = [a_case(name, 16) for name in ("moe_dispatch", "moe_combine")]
    steps = [
        WorkloadStep(collective=c.collective, bytes=c.bytes, dtype=c.dtype, op=None, calls=1, moe=c.moe)
        for c in cases
    ]
    work = Workload(name="w", title="A model", unit="layer", units_per_step=10, source="none", steps=steps)
    found = [
        msgspec.structs.replace(data.exact("unisono", case, us), workload="w")
        for case, us in zip(cases, (60.0, 100.0), strict=True)
    ]
    data.write(tmp_path, data.run(), work, found, data.end())
    (cost,) = analysis.workload_costs(model.load(tmp_path))
    table = tables.workload(cost)
    at = table.head.index("Per layer and token of a rank")
    assert table.head[1] == "Per layer" and table.rows[0][1] == "160 µs"
    assert table.rows[0][at] == "10.0 µs"
    assert "1 × moe_dispatch 16 tokens: 60.1 µs" in str(table.rows[0][-1])  # noqa: RUF001


def test_a_line_without_the_experts_of_its_call_is_left_out(tmp_path: Path) -> None:
    bare = msgspec.structs.replace(a_case("moe_round", 16), moe=None)
    data.write(
        tmp_path, data.run(), [data.exact("unisono", bare, 5.0), data.exact("unisono", data.case(), 5.0)]
    )
    found = records.read(tmp_path)
    assert len(found.results) == 1
    assert "has no mixture of experts" in found.problems[0]
