"""The report's conclusions: headline, crossovers, workloads; and how it writes numbers."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

import report_data as data
from unisono.bench import cases
from unisono.records import Record, Workload, WorkloadStep, text
from unisono.records.stats import Verdict
from unisono.report import analysis, figures, model, payload, tables, theme


def _load(tmp_path: Path, *found: Record | list[Record]) -> model.Model:
    return model.load(data.write(tmp_path, data.run(), *found, data.end()))


def _exact(backend: str, size: int, us: float, **other: object) -> Record:
    """A result whose interval is a hair around `us`."""
    return data.result(backend, data.case(size=size), [us * (1 + 1e-4 * i) for i in range(20)], **other)


def test_headline_is_the_geometric_mean_with_verdicts(tmp_path: Path) -> None:
    times = {8: (10.0, 40.0), 64: (10.0, 10.0), 512: (20.0, 10.0)}
    results = [
        _exact(n, s, us) for s, pair in times.items() for n, us in zip(("unisono", "mpi"), pair, strict=True)
    ]
    (group,) = analysis.groups(
        _load(tmp_path, results, _exact("unisono", 4096, 5.0), _exact("mpi", 32768, 5.0))
    )
    total = group.total
    assert total.mean == pytest.approx((4 * 1 * 0.5) ** (1 / 3))
    assert total.verdicts == {Verdict.FASTER: 1, Verdict.SAME: 1, Verdict.SLOWER: 1}
    assert (total.alone, total.missing) == (1, 1)
    assert total.best.own.key.case.bytes == 8
    assert total.worst.own.key.case.bytes == 512


def test_a_verdict_is_against_all_peers(tmp_path: Path) -> None:
    """The peer of the smallest median varies so much that nothing can be said of it; where one of the larger
    medians does, FASTER than the best is not FASTER than all."""

    def of(size: int, times: dict[str, tuple[float, float]]) -> list[Record]:
        return [
            data.result(name, data.case(size=size), [low, *[(low + high) / 2] * 4, high])
            for name, (low, high) in times.items()
        ]

    found = _load(
        tmp_path,
        of(8, {"unisono": (10, 11), "mpi": (8, 9), "gloo": (4, 12)}),
        of(64, {"unisono": (10, 11), "mpi": (12, 13), "gloo": (10, 30)}),
        of(512, {"unisono": (10, 11), "mpi": (12, 13), "gloo": (20, 30)}),
    )
    (group,) = analysis.groups(found)
    assert [pair.verdict for pair in group.total.pairs] == [Verdict.SLOWER, Verdict.UNCLEAR, Verdict.FASTER]
    assert [pair.peer.backend for pair in group.total.pairs] == ["gloo", "mpi", "mpi"]
    (curve,) = analysis.curves(found)
    assert [winner.verdict is Verdict.FASTER for winner in curve.winners] == [False, False, True]


def test_cases_that_only_variants_of_the_subject_ran_are_not_a_peers(tmp_path: Path) -> None:
    names = ("unisono:two_shot", "mpi")
    found = _load(tmp_path, _exact("unisono", 8, 5.0), [_exact(n, 64 << i, 5.0) for i, n in enumerate(names)])
    (group,) = analysis.groups(found)
    assert (group.total.alone, group.total.missing) == (1, 1)


@pytest.mark.parametrize(
    ("sizes", "meet"), [((1024, 16384), "≈ 4.00 KiB"), ((1024, 4096, 16384), "1 KiB to 16 KiB")]
)
def test_crossover_lies_where_the_curves_meet(tmp_path: Path, sizes: tuple[int, ...], meet: str) -> None:
    """unisono: 1 and 16 us at 1 and 16 KiB, mpi: 4 us at both: they meet at 4 KiB. Where 4 KiB was measured
    and neither is faster there, only the range is known."""
    ours = [_exact("unisono", size, size / 1024) for size in sizes]
    theirs = [_exact("mpi", size, 4.0) for size in sizes]
    loaded = _load(tmp_path, ours, theirs)
    (curve,) = analysis.curves(loaded)
    (crossing,) = curve.crossovers
    assert crossing.left.own.backend == "unisono"
    assert crossing.left.own.key.case.bytes == 1024
    assert crossing.right.own.key.case.bytes == 16384
    assert crossing.estimate == (pytest.approx(4096, rel=1e-3) if len(sizes) == 2 else None)
    assert curve.only is None
    ((_, _, before, after, named),) = tables.crossovers(loaded).rows
    assert before == "unisono, 1 KiB (1.00 µs, mpi 4.00 µs)"
    assert after == "mpi, 16 KiB (4.00 µs, unisono 16.0 µs)"
    assert named.replace(" 4 KiB", " 4.00 KiB") == meet


def test_two_libraries_cross_below_a_third(tmp_path: Path) -> None:
    """Whoever is the fastest of all, each two are compared; variants of one library are not two."""
    times = {"unisono": (1, 1, 1), "unisono:two_shot": (9, 1, 2), "mpi": (2, 4, 16), "gloo": (8, 8, 8)}
    sizes = (64, 4096, 65536)
    found = [_exact(n, s, us) for n, own in times.items() for s, us in zip(sizes, own, strict=True)]
    (curve,) = analysis.curves(_load(tmp_path, found))
    pairs = [(c.left.own.backend, c.right.own.backend, c.estimate is None) for c in curve.crossovers]
    assert sorted(pairs) == [
        ("gloo", "unisono:two_shot", False),
        ("mpi", "gloo", False),
        ("mpi", "unisono:two_shot", False),
    ]


def test_no_crossover_without_confidence(tmp_path: Path) -> None:
    wide = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]
    results = [data.result("mpi", data.case(size=s), wide) for s in (8, 64)]
    results += [data.result("unisono", data.case(size=s), [x + 1 - s / 32 for x in wide]) for s in (8, 64)]
    (curve,) = analysis.curves(_load(tmp_path, results))
    assert not curve.crossovers


def _workload(*steps: WorkloadStep) -> Workload:
    return Workload(
        name="w", title="A model", unit="layer", units_per_step=10, source="a paper", steps=list(steps)
    )


def _step(size: int, calls: float) -> WorkloadStep:
    return WorkloadStep(collective="all_reduce", bytes=size, dtype="f32", op="sum", calls=calls)


def test_workload_costs_and_the_best_of_each(tmp_path: Path) -> None:
    found = _load(
        tmp_path,
        _workload(_step(64, 2), _step(4096, 1)),
        _exact("unisono", 64, 1.0, workload="w"),
        _exact("unisono", 4096, 30.0, workload="w"),
        _exact("mpi", 64, 5.0, workload="w"),
        _exact("mpi", 4096, 10.0, workload="w"),
        _exact("gloo", 64, 9.0, workload="w"),
        _exact("unisono", 64, 99.0),
    )
    (cost,) = analysis.workload_costs(found)
    totals = {c.backend: c.unit and round(c.unit.median, 1) for c in cost.costs}
    assert totals == {"unisono": 32.0, "mpi": 20.0, "gloo": None, "best of each": 12.0}
    assert cost.mix.unit is not None
    assert cost.mix.unit.median == pytest.approx(12.0, rel=1e-2)
    table = tables.workload(cost)
    assert table.head[1] == "Per layer"
    assert "10 layers" in table.head
    rows = {row[0]: row for row in table.rows}
    assert "not measured: all_reduce" in rows["gloo"][-1]
    assert "20.0 µs (62 %)" in rows["unisono"] or "20.0 µs (63 %)" in rows["unisono"]
    assert len(found.rows) == 1  # the sweep has one case; those of the workload are apart


def test_without_a_sweep_the_workload_is_the_report(tmp_path: Path) -> None:
    found = _load(tmp_path, _workload(_step(64, 1)), _exact("unisono", 64, 1.0, workload="w"))
    assert found.rows == found.workload_rows


def test_order_statistics_keep_the_ends(tmp_path: Path) -> None:
    samples = [float(i) for i in range(1, 1001)]
    (row,) = _load(tmp_path, data.result("unisono", data.case(), samples)).all_rows
    thin = payload.order_statistics(row, 101)
    assert (len(thin), thin[0], thin[-1]) == (101, 1.0, 1000.0)
    assert thin == sorted(thin)
    assert payload.order_statistics(row, 5000) == samples
    assert payload.points_per_result(10) == 101
    assert payload.points_per_result(100_000) == 21


def test_percentiles_only_where_the_count_carries_them(tmp_path: Path) -> None:
    shown = []
    for count in (71, 72, 367, 368):
        (r,) = payload.results(_load(tmp_path / str(count), data.timed("unisono", data.case(), count=count)))
        shown.append([name for name in ("t_p95", "t_p99") if r[name] != text.MISSING])
    assert shown == [[], ["t_p95"], ["t_p95"], ["t_p95", "t_p99"]]


def test_rounded_block_sizes_share_a_column(tmp_path: Path) -> None:
    blocks = [data.timed("unisono", data.case("all_gather", size, ranks=3)) for size in (8, 4096, 65536)]
    whole = [data.timed("unisono", data.case("all_reduce", size, ranks=3)) for size in (8, 4096, 65536)]
    columns = payload.shared_columns(_load(tmp_path, blocks, whole).all_rows)
    assert columns == {12: 12, 4092: 4096, 65532: 65536, 8: 8, 4096: 4096, 65536: 65536}


def test_a_collective_with_both_sizes_keeps_both_columns(tmp_path: Path) -> None:
    results = [data.timed("unisono", data.case(size=size)) for size in (4092, 4096)]
    assert payload.shared_columns(_load(tmp_path, results).all_rows) == {4092: 4092, 4096: 4096}


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (text.size, 8, "8 B"),
        (text.size, 65536, "64 KiB"),
        (text.size, 65532, "64.0 KiB"),
        (text.size, 26214400, "25 MiB"),
        (text.size, 0, "0 B"),
        (text.time, 0.8503, "850 ns"),
        (text.time, 12.345, "12.3 µs"),
        (text.time, 999.96, "1.00 ms"),
        (text.time, 1234567.0, "1.23 s"),
        (text.ratio, 2.314, "2.31×"),  # noqa: RUF001
        (text.ratio, 12.34, "12.3×"),  # noqa: RUF001
        (text.ratio, 0.0123, "0.0123×"),  # noqa: RUF001
        (text.percent, 0.00001, "< 0.1 %"),
        (text.percent, 0.0321, "3.2 %"),
        (text.percent, 1.21, "121 %"),
        (text.percent, None, "–"),  # noqa: RUF001
        (text.gbps, None, "–"),  # noqa: RUF001
        (text.digits, math.nan, "–"),  # noqa: RUF001
        (text.digits, 0.9996, "1.00"),
        (text.duration, 3725.0, "1 h 2 min"),
        (text.moment, "2026-01-02T03:04:05+00:00", "2026-01-02 03:04 UTC"),
        (text.moment, "yesterday", "yesterday"),
        (text.plain, "a\x1b[31mb\n", "a\ufffd[31mb"),
        (text.markdown, "a|b\n<c>`d`", "a\\|b \\<c\\>\\`d\\`"),
    ],
)
def test_numbers_and_names_in_words(function: object, value: object, expected: str) -> None:
    assert function(value) == expected  # type: ignore[operator]


def test_spans_share_a_unit() -> None:
    assert text.span(12.1, 12.6) == "12.1 to 12.6 µs"
    assert text.span(990, 1100) == "990 µs to 1.10 ms"


def test_every_backend_keeps_its_colour() -> None:
    few, many = theme.series(["unisono", "gloo"]), theme.series(["unisono", "nccl", "zeta", "gloo", "mpi"])
    assert all(many[name] == few[name] for name in few)
    assert len(set(many.values())) == len(many)
    gpus = ["unisono", "nccl", "nccl-windows", "torch-symm:one_shot", "torch-symm:two_shot"]
    assert [theme.series(["other", name])[name] for name in gpus] == [
        theme.series(gpus)[name] for name in gpus
    ]
    crowd = [f"b{i}" for i in range(20)]
    assert set(theme.series(crowd)) == set(crowd)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_is_readable(dark: bool) -> None:
    """WCAG 2: 4.5 for text, 3 for marks and for the bold text in coloured cells."""
    colours = theme.variables(dark)
    for ink in ("ink", "ink2", "ink3", "accent", "bad", "warn"):
        assert _contrast(colours[ink], colours["surface"]) >= 4.4, ink
    for i in range(8):
        assert _contrast(colours[f"s{i}"], colours["surface"]) >= 3, i
    for name, value in colours.items():
        if f"{name}t" in colours:
            assert _contrast(value, colours[f"{name}t"]) >= 4.4, name


def test_runs_of_one_process_and_of_many_are_costed_apart(tmp_path: Path) -> None:
    """The same workload, merged into one report."""
    results = []
    for us, one_process in ((10.0, False), (99.0, True)):
        made = _exact("unisono", 64, us, workload="w")
        made.case = msgspec.structs.replace(made.case, one_process=one_process)
        results.append(made)
    costs = analysis.workload_costs(_load(tmp_path, _workload(_step(64, 2)), results))
    assert sorted(round(cost.costs[0].unit.median) for cost in costs) == [20, 198]


def test_best_and_worst_say_what_they_are_of(tmp_path: Path) -> None:
    found = [data.exact(name, data.case(ranks=4), us) for name, us in (("unisono", 10.0), ("mpi", 20.0))]
    loaded = model.load(data.write(tmp_path, data.run(4), found, data.end()))
    ((*_, best, worst),) = tables.headlines([analysis.groups(loaded)[0].total]).rows
    assert isinstance(best, str)
    assert best == worst
    assert best.startswith("2.00× at all_reduce 64 KiB f32 sum, 4 ranks, latency, plain (10.0 µs, mpi")  # noqa: RUF001


def test_a_picture_says_what_its_rows_have_in_common(tmp_path: Path) -> None:
    loaded = model.load(data.write(tmp_path, data.run(4), data.pingpongs(4, (1, 3)), data.end()))
    rows = [row for row in payload.heat(loaded) if row["pair"] == "0-1"]
    assert payload.in_common(rows, loaded) == "4 ranks, plain, f32, pair 0-1"  # in both modes
    one = [row for row in payload.heat(loaded) if row["mode"] == "latency"]
    assert payload.in_common(one, loaded) == "4 ranks, latency, plain, f32"


def test_a_barrier_stands_last_in_every_panel(tmp_path: Path) -> None:
    grid = cases.grid(2, ["all_reduce", "barrier"], [8], modes=["latency"], memories=["plain", "symmetric"])
    found = [data.timed(name, what) for name in ("unisono", "mpi") for what in grid]
    loaded = model.load(data.write(tmp_path, data.run(), found, data.end()))
    for memory in ("plain", "symmetric"):
        panel = [cell["collective"] for cell in payload.heat(loaded) if cell["memory"] in (None, memory)]
        assert panel == ["all_reduce", "barrier"]


def test_what_rows_share_is_said_once() -> None:
    rows: list[payload.Json] = [
        {"id": i, "ranks": 2, "mode": ("latency", "throughput")[i % 2]} for i in range(20)
    ]
    found = payload.table(rows)
    assert found["same"] == {"ranks": 2}
    assert found["words"] == {"mode": ["latency", "throughput"]}
    assert (found["columns"], found["rows"][:2]) == (["id", "mode"], [[0, 0], [1, 1]])
    assert payload.table([]) == {"same": {}, "words": {}, "columns": [], "rows": []}


def test_every_result_stands_in_each_place_once_and_ticks_are_sizes_that_were_measured(
    tmp_path: Path,
) -> None:
    sizes = [8 << i for i in range(20)]
    found = [data.sweep(ranks=ranks, sizes=sizes) for ranks in (2, 4)]
    loaded = model.load(data.write(tmp_path, data.run(), *found, data.end()))
    rows = payload.results(loaded)
    panels = figures.panels(rows)
    for place in (figures.BANDWIDTH, figures.LATENCY):
        own = [panel for panel in panels if panel.place == place]
        assert sorted(row["id"] for panel in own for row in panel.rows) == [
            r["id"] for r in rows if r["bytes"]
        ]
        assert all(len(panel.sizes) == 7 and set(panel.sizes) <= set(sizes) for panel in own)
    spread = [panel for panel in panels if panel.place == figures.SPREAD]
    assert {len({row["bytes"] for row in panel.rows}) for panel in spread} == {10, 1}
    assert {panel.title for panel in spread} == {"all_reduce", "broadcast", "barrier"}


def test_a_panel_without_a_property_fits_every_choice_of_it() -> None:
    assert figures.fits({"ranks": 2, "op": None}, {"ranks": 2, "op": "sum"})
    assert figures.fits({"ranks": 2}, {"ranks": 2, "op": "sum"})
    assert not figures.fits({"ranks": 4}, {"ranks": 2, "op": "sum"})
    assert not figures.fits({"ranks": 2, "root": 1}, {"ranks": 2, "root": 0})


def test_the_most_frequent_mode_is_shown_first() -> None:
    rows = [{**dict.fromkeys(payload.DIMENSIONS), "mode": mode} for mode in ("graph", "events", "events")]
    for these, first in ((rows, "events"), (rows[:2], "graph")):
        (mode,) = payload.dimensions(these)
        assert (mode["first"], mode["values"]) == (first, ["events", "graph"])
