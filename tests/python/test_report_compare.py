"""Two runs side by side."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import report_data as data
from unisono.cli.app import app
from unisono.records import Record, Result
from unisono.records.stats import Verdict
from unisono.report import compare as comparing


def _near(
    us: float, size: int = 65536, backend: str = "unisono", scatter: float = 1e-3, launches: int = 7
) -> Result:
    """Returns a result of 21 visits to as many launches, of a sample each."""
    times = [us * (1 + scatter * i) for i in range(-10, 11)]
    of_visit = [1 + i % launches for i in range(21)]
    return data.result(backend, data.case(size=size), times, visits=[1] * 21, launches=of_visit)


def _compare(tmp_path: Path, a: list[Record], b: list[Record], **options: object) -> comparing.Comparison:
    data.write(tmp_path / "a", data.run(), a, data.end())
    data.write(tmp_path / "b", data.run(), b, data.end())
    return comparing.compare(tmp_path / "a", tmp_path / "b", **options)  # type: ignore[arg-type]


def _text(found: comparing.Comparison, everything: bool = False) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(comparing.render(found, everything))
    return console.export_text()


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (_near(10), _near(5), Verdict.FASTER),
        (_near(5), _near(10), Verdict.SLOWER),
        (_near(10), _near(10.01), Verdict.SAME),
        (_near(10), _near(10.5, scatter=0.03), Verdict.UNCLEAR),
    ],
    ids=lambda value: str(value) if isinstance(value, Verdict) else "",
)
def test_verdicts_are_of_b(tmp_path: Path, a: Result, b: Result, verdict: Verdict) -> None:
    (change,) = _compare(tmp_path, [a], [b]).changes
    assert change.verdict is verdict
    assert change.ratio == pytest.approx(a.median_us / b.median_us)


def test_cases_of_other_offsets_are_not_compared(tmp_path: Path) -> None:
    def at(offset: int) -> Result:
        near = _near(10)
        return msgspec.structs.replace(near, case=data.case(offset=offset))

    found = _compare(tmp_path, [at(0), at(16)], [at(16), at(64)])
    assert [change.a.key.case.offset for change in found.changes] == [16]
    assert [row.key.case.offset for row in (*found.only_a, *found.only_b)] == [0, 64]
    assert "offset 64 B" in _text(found, everything=True)


def test_cases_of_other_inputs_are_not_compared(tmp_path: Path) -> None:
    def of(inputs: str) -> Result:
        return msgspec.structs.replace(_near(10), case=data.case(inputs=inputs))

    found = _compare(tmp_path, [of("kept"), of("written")], [of("written")])
    assert [change.a.key.case.inputs for change in found.changes] == ["written"]
    assert [row.key.case.inputs for row in found.only_a] == ["kept"]
    assert "inputs written" in _text(found, everything=True)


def test_the_tolerance_is_the_caller_s(tmp_path: Path) -> None:
    found = _compare(tmp_path, [_near(10)], [_near(9)], tolerance=0.2)
    assert found.counts == {Verdict.SAME: 1}


def test_few_launches_give_no_verdict_and_that_is_said(tmp_path: Path) -> None:
    found = _compare(tmp_path, [_near(10)], [_near(5, launches=5)])
    assert found.counts == {Verdict.UNCLEAR: 1}
    assert "1 case had fewer than 6 launches in a run, so that the verdict is UNCLEAR" in _text(found)


def test_records_of_schema_1_4_are_read_as_one_launch_and_that_is_said(tmp_path: Path) -> None:
    old = data.result("unisono", data.case(), [5.0] * 21, visits=[3] * 7)
    data.write(tmp_path / "a", data.run(schema="1.4"), old, data.end())
    data.write(tmp_path / "b", data.run(launch=1, launches=7), _near(10), data.end())
    found = comparing.compare(tmp_path / "a", tmp_path / "b")
    assert found.counts == {Verdict.UNCLEAR: 1}
    says = "A: 1 records file of a schema before 1.7 does not say the launches: each counts as one."
    assert says in found.notes


def test_launches_of_another_phase_of_the_machine_do_not_count(tmp_path: Path) -> None:
    """The host moved the cores apart in the last launch of A, and left them so."""

    def lines(barriers: list[list[float]], result: Result) -> list[Record]:
        heads = [data.run(launch=n, launches=7) for n in range(1, 8)]
        ends = [
            msgspec.structs.replace(data.end(), launch=n, barrier_us=us) for n, us in enumerate(barriers, 1)
        ]
        return [*heads, result, *ends]

    near, far = [0.15, 0.16], [0.38, 0.37]
    data.write(tmp_path / "a", lines([near] * 6 + [[0.15, 0.38]], _near(10)))
    for barriers, verdict in (([far] * 7, Verdict.UNCLEAR), ([near] * 6 + [far], Verdict.SLOWER)):
        data.write(tmp_path / "b", lines(barriers, _near(17)))
        found = comparing.compare(tmp_path / "a", tmp_path / "b")
        assert found.counts == {verdict: 1}
        said = "the bench's barrier took 150 to 380 ns in A and 370 to 380 ns in B" in _text(found)
        assert said == (verdict is Verdict.UNCLEAR)


@pytest.mark.parametrize("tolerance", [-1.0, float("nan")])
def test_a_tolerance_below_0_is_refused(tmp_path: Path, tolerance: float) -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        _compare(tmp_path, [_near(10)], [_near(9)], tolerance=tolerance)


def test_a_comparison_of_nothing_fails(tmp_path: Path) -> None:
    _compare(tmp_path, [_near(10)], [_near(9)])
    runs = [str(tmp_path / name) for name in ("a", "b")]
    for words, code in ((["--backend", "mpj"], 1), (["--backend", "mpj", "--markdown"], 1), ([], 0)):
        assert CliRunner().invoke(app, ["compare", *runs, *words]).exit_code == code


def test_what_only_one_side_has(tmp_path: Path) -> None:
    found = _compare(
        tmp_path, [_near(10), _near(1, size=8)], [_near(10), _near(1, size=64), _near(1, size=512)]
    )
    assert [row.key.case.bytes for row in found.only_a] == [8]
    assert [row.key.case.bytes for row in found.only_b] == [64, 512]
    said = _text(found)
    assert "1 result only in A" in said
    assert "2 results only in B: unisono all_reduce 64 B" in said
    assert "**2 results only in B**" in comparing.render_markdown(found)


def test_rendering_shows_both_sides(tmp_path: Path) -> None:
    a = [_near(10), _near(3, size=8), _near(7, size=64, backend="mpi")]
    b = [_near(5), _near(3, size=8), _near(14, size=64, backend="mpi")]
    found = _compare(tmp_path, a, b)
    assert "1 FASTER, 1 SLOWER, 1 SAME, 0 UNCLEAR; geometric mean of A / B 1.00×" in found.summary()  # noqa: RUF001
    said = _text(found)
    for words in ("10.0 µs", "5.00 µs", "2.00×", "0.50×", "FASTER", "SLOWER"):  # noqa: RUF001
        assert words in said
    assert "SAME" not in said.split("\n", 1)[1]
    assert "SAME" in _text(found, everything=True).split("\n", 1)[1]
    rows = [line for line in comparing.render_markdown(found).splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["SLOWER", "FASTER", "SAME"]


def test_one_backend_only(tmp_path: Path) -> None:
    a, b = [_near(10), _near(10, backend="mpi")], [_near(5), _near(5, backend="mpi")]
    assert len(_compare(tmp_path, a, b, backend="mpi").changes) == 1
    unknown = comparing.compare(tmp_path / "a", tmp_path / "b", backend="nccl")
    assert not unknown.changes
    assert "nothing was compared" in unknown.summary()
    assert "Neither run has a result of nccl: they have mpi and unisono." in unknown.notes


def test_what_makes_a_comparison_doubtful_is_said(tmp_path: Path) -> None:
    head = data.run()
    head.machine.cpu = "Other CPU"
    data.write(tmp_path / "a", data.run(), _near(10), data.end())
    data.write(tmp_path / "b", head, _near(10), data.failure())
    found = comparing.compare(tmp_path / "a", tmp_path / "b")
    said = " ".join(found.notes)
    assert "The machines differ" in said
    assert "cut short" in said
    assert "B has 1 failure" in said
