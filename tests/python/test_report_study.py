"""What the report shows of ping-pongs by pair, all_to_all built of sends, and scaling."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import report_data as data
from unisono import report
from unisono.bench import scaling
from unisono.records import Scaling, text, vocabulary
from unisono.report import analysis, compare, gate, html, model, payload, studies, tables
from unisono.report.blocks import Cell


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("study")
    ways = [
        data.exact("unisono", data.case("all_to_all", 4096, 4, streams=way), 5.0) for way in (None, "one")
    ]
    both = [data.scaled(kind, {1: 10.0, 2: 20.0, 4: 25.0}) for kind in scaling.KINDS]
    data.write(directory, data.run(4), data.pingpongs(4, (1, 3)), ways, *both, data.end())
    report.build(directory)
    return directory


def test_the_slow_pair_stands_out(built: Path) -> None:
    found = {table.title: table for table in studies.pair_matrices(model.load(built))}
    assert list(found) == [
        "half round trip: unisono, 8 B, µs (4 ranks, latency, plain)",
        "half round trip: mpi, 8 B, µs (4 ranks, latency, plain)",
        "one way: unisono, 1 MiB, GB/s (4 ranks, throughput, plain)",
        "one way: mpi, 1 MiB, GB/s (4 ranks, throughput, plain)",
        "both ways, each: unisono, 1 MiB, GB/s (4 ranks, throughput, plain)",
        "both ways, each: mpi, 1 MiB, GB/s (4 ranks, throughput, plain)",
    ]
    times = found["half round trip: unisono, 8 B, µs (4 ranks, latency, plain)"]
    assert times.head[1:] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert times.rows[1] == ["rank 1", Cell("1.00", "v0"), "", Cell("1.00", "v0"), Cell("2.00", "v7")]
    assert times.rows[3][2] == Cell("2.00", "v7")  # both send: the reverse is the same measurement
    bandwidth = found["one way: unisono, 1 MiB, GB/s (4 ranks, throughput, plain)"]
    assert bandwidth.rows[0][2:] == [Cell("10.5", "v0")] * 3
    assert bandwidth.rows[1][4] == Cell("5.24", "v6")
    assert bandwidth.rows[3][1:] == [""] * 4  # nobody measured it in that direction


def test_one_pair_is_no_matrix(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(), data.pingpongs(2, (0, 1)), data.end())
    assert studies.pair_matrices(model.load(tmp_path)) == []


def test_the_efficiency_of_either_kind(built: Path) -> None:
    """10, 20, 25 us: weak 10/20 and 10/25, strong 10/(2 x 20) and 10/(4 x 25)."""
    weak, strong = analysis.efficiencies(model.load(built))
    assert (weak.kind, strong.kind) == scaling.KINDS
    assert [point.efficiency.median for point in weak.points] == pytest.approx([1, 0.5, 0.4])
    assert [point.efficiency.median for point in strong.points] == pytest.approx([1, 0.25, 0.1])
    for point in weak.points[1:]:
        assert point.efficiency.low < point.efficiency.median < point.efficiency.high
    head = studies.scaling(model.load(built), "weak").head
    assert head[4:] == ["1 rank", "2 ranks", "4 ranks"]


def test_the_curves_of_a_collective_stand_together_by_size(tmp_path: Path) -> None:
    found = []
    for name, size in (
        ("broadcast", 1 << 20),
        ("all_reduce", 4096),
        ("all_reduce", 1 << 20),
        ("broadcast", 64),
    ):
        for ranks in (1, 2):
            case = data.case(name, size, ranks, scaling=Scaling(kind="weak", bytes=size))
            found.append(data.exact("unisono", case, 1.0))
    data.write(tmp_path, data.run(), found, data.end())
    panels = payload.efficiency_panels(analysis.efficiencies(model.load(tmp_path)))
    assert [panel["title"] for panel in panels] == [
        "all_reduce, 4 KiB",
        "all_reduce, 1 MiB",
        "broadcast, 64 B",
        "broadcast, 1 MiB",
    ]


def test_efficiency_is_against_the_fewest_ranks_measured(tmp_path: Path) -> None:
    found = [*data.scaled("strong", {2: 10.0, 8: 5.0}), *data.scaled("weak", {4: 1.0}, "mpi")]
    data.write(tmp_path, data.run(8, nodes=[0] * 4 + [1] * 4), found, data.end())
    loaded = model.load(tmp_path)
    (one,) = analysis.efficiencies(loaded)  # of one number of ranks alone nothing can be said
    assert [point.efficiency.median for point in one.points] == pytest.approx([1, 0.5])
    assert studies.scaling(loaded, "strong").head[4:] == ["2 ranks", "8 ranks on 2 nodes"]


def test_the_points_of_a_scaling_stay_apart_from_the_sweep(tmp_path: Path) -> None:
    """The same collective, size and ranks, measured as three things, is three rows in three selections."""
    plain = data.exact("unisono", data.case("all_gather", 131072, 2), 1.0)
    found = [plain, *data.scaled("weak", {2: 2.0}), data.exact("mpi", plain.case, 4.0)]
    point = Scaling(kind="strong", bytes=131072)
    found.append(data.exact("unisono", msgspec.structs.replace(plain.case, scaling=point), 3.0))
    data.write(tmp_path, data.run(), found, data.end())
    page = html.page(model.load(tmp_path))
    index = page["results"]["columns"].index("scaling")
    assert sorted(row[index] for row in page["results"]["rows"]) == ["none", "none", "strong", "weak"]
    (headline,) = analysis.groups(model.load(tmp_path))
    assert (len(headline.total.pairs), headline.total.alone) == (1, 2)


def test_page_and_twin_show_it_all(built: Path) -> None:
    page, twin = (built / "report.html").read_text(), (built / "report.md").read_text()
    for section in ("pairs", "scaling"):
        assert f'<section id="{section}">' in page
        assert f"## {section.capitalize()}" in twin
    assert '<td class="v7">2.00</td>' in page
    assert 'id="efficiency-weak"' in page
    plain = twin.replace("\\", "")
    for words in (
        "pingpong, half round trip 8 B f32",
        "all_to_all, sends on one stream",
        "Weak scaling: efficiency",
        "| 100 % (10.0 µs) | 50 % (20.0 µs) | 40 % (25.0 µs) |",
        "pingpong and 2 collectives",
    ):
        assert words in plain
    for image in ("pairs", "efficiency_weak", "efficiency_strong"):
        assert f"]({image}.png)" in twin
        assert (built / f"{image}.png").stat().st_size > 1000
    factors = {name: formula for name, formula, _ in tables.factors(model.load(built)).rows}
    assert factors["pingpong"] == "1, of one direction"


def test_gate_and_compare_work_on_them(built: Path) -> None:
    found = gate.gate(built)
    assert found.passed
    assert len(found.checked) == 6 * 3 * 2 * 2
    assert gate.gate(built, min_ratio=4.0).exit_code == 1
    both = compare.compare(built, built)
    assert len(both.changes) == len(model.load(built).all_rows)
    assert not both.only_a


def test_a_case_in_words() -> None:
    case = data.case(vocabulary.PINGPONG, 8, 4, pattern="one_way", pair=(0, 3))
    assert vocabulary.case_text(case) == "pingpong, one way 8 B f32, 4 ranks, latency, plain, pair 0-3"
    assert vocabulary.pair_name(msgspec.structs.replace(case, pair=None)) == "halves"
    point = data.case(size=8, scaling=Scaling(kind="weak", bytes=8))
    assert vocabulary.case_text(point).endswith(f"scaling weak, {text.size(8)}")
    assert vocabulary.title(data.case("all_to_all", 8, streams="per-peer")).endswith("a stream per peer")
