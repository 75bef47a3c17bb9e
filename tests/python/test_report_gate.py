"""The gate: what passes, what does not, and exactly where the line is."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import report_data as data
from unisono.cli.app import app
from unisono.cli.finish import USAGE
from unisono.records import Record, Result, Verification
from unisono.report import gate as gates


def _between(backend: str, low: float, high: float, size: int = 65536, **other: object) -> Result:
    """A result whose interval is exactly low to high: of six samples the interval is minimum to maximum."""
    middle = (low + high) / 2
    return data.result(backend, data.case(size=size), [low, middle, middle, middle, middle, high], **other)


def _gate(tmp_path: Path, *found: Record, **options: object) -> gates.GateResult:
    data.write(tmp_path, data.run(), list(found), data.end())
    return gates.gate(tmp_path, **options)  # type: ignore[arg-type]


def _text(result: gates.GateResult) -> str:
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(gates.render(result))
    console.file.close()
    return console.export_text()


@pytest.mark.parametrize(
    ("own", "peer", "ratio", "passes"),
    [
        ((10, 12), (13, 15), 1.0, True),  # faster
        ((10, 12), (8, 10), 1.0, True),  # slower, but 10 / 10 reaches the ratio: not confidently below
        ((10, 12), (8, 9.99), 1.0, False),  # 9.99 / 10 does not
        ((10, 12), (8, 9.99), 0.99, True),
        ((10, 10), (10, 10), 1.0, True),
        ((10, 10), (19, 19.9), 2.0, False),
        ((10, 10), (19, 20), 2.0, True),
    ],
)
def test_the_line_is_the_optimistic_end_of_the_ratio(
    tmp_path: Path, own: tuple[float, float], peer: tuple[float, float], ratio: float, passes: bool
) -> None:
    found = _gate(tmp_path, _between("unisono", *own), _between("mpi", *peer), min_ratio=ratio)
    assert found.passed is passes
    assert found.exit_code == (0 if passes else 1)
    assert len(found.below) == (0 if passes else 1)


def test_best_is_the_fastest_peer_of_each_case(tmp_path: Path) -> None:
    rows = [_between("unisono", 10, 11), _between("mpi", 12, 13), _between("gloo", 8, 9)]
    found = _gate(tmp_path, *rows)
    assert [pair.peer.backend for pair in found.below] == ["gloo"]
    assert gates.gate(tmp_path, against="mpi").passed
    said = _text(found)
    for words in ("Not passed", "1 of 1 case", "gloo", "10.5 µs", "8.50 µs", "all_reduce 64 KiB"):
        assert words in said
    assert "| 0.810× | 0.900× |" in gates.render_markdown(found)  # noqa: RUF001


@pytest.mark.parametrize("visits", [[1] * 6, [2, 2, 2]], ids=["wide", "unsure"])
def test_a_case_is_below_where_any_peer_says_so(tmp_path: Path, visits: list[int]) -> None:
    """Gloo's median is smaller, but nothing can be said of it."""
    rows = [_between("unisono", 10, 11), _between("mpi", 8, 9), _between("gloo", 5, 11, visits=visits)]
    found = _gate(tmp_path, *rows)
    assert [pair.peer.backend for pair in found.below] == ["mpi"]
    assert (len(found.checked), len(found.unsure), found.passed) == (1, 0, False)


def test_a_case_whose_best_peer_is_not_sure_is_not_judged_by_the_others(tmp_path: Path) -> None:
    rows = [_between("unisono", 10, 11), _between("mpi", 12, 13), _between("gloo", 5, 11, visits=[2, 2, 2])]
    found = _gate(tmp_path, *rows)
    assert (found.checked, len(found.unsure), found.passed) == ([], 1, False)


def test_a_case_that_is_below_by_little_does_not_read_as_equal(tmp_path: Path) -> None:
    found = _gate(tmp_path, _between("unisono", 10, 10), _between("mpi", 9.969, 9.971))
    assert not found.passed
    assert "0.997×" in _text(found)  # noqa: RUF001


def test_failures_do_not_pass(tmp_path: Path) -> None:
    good = [_between("unisono", 1, 2), _between("mpi", 3, 4)]
    found = _gate(tmp_path, *good, data.failure("unisono", data.case(size=8)))
    assert not found.below
    assert not found.passed
    assert "failed: unisono: all_reduce 8 B f32 sum" in _text(found)
    assert "element 3 is wrong" in gates.render_markdown(found)


def test_a_wrong_result_does_not_pass_however_fast(tmp_path: Path) -> None:
    wrong = Verification(before=True, after=False, bound="bit-exact")
    good = [_between("unisono", 1, 2, size=8), _between("mpi", 3, 4, size=8)]
    found = _gate(tmp_path, *good, _between("unisono", 1, 2, verification=wrong), _between("mpi", 3, 4))
    assert len(found.checked) == 1
    assert not found.passed


def test_cases_of_few_visits_are_counted_and_not_judged(tmp_path: Path) -> None:
    brief = _between("unisono", 9, 9, visits=[2, 2, 2])
    found = _gate(tmp_path, brief, _between("mpi", 1, 1, visits=[1] * 6))
    assert (len(found.unsure), found.checked, found.passed) == (1, [], False)
    assert "no case of unisono was measured often enough" in found.summary()
    assert "1 case had fewer than 6 visits and were not judged: give the bench a longer --budget" in _text(
        found
    )
    rows = [_between("unisono", 1, 2, size=8, visits=[1] * 6), _between("mpi", 3, 4, size=8)]
    found = _gate(tmp_path, brief, _between("mpi", 1, 1), *rows)
    assert (len(found.unsure), len(found.checked), found.passed) == (1, 1, True)


@pytest.mark.parametrize(("share", "passes"), [(0.0, True), (0.25, True), (0.26, False), (1.0, False)])
def test_a_share_of_the_cases_must_be_judged(tmp_path: Path, share: float, passes: bool) -> None:
    """Of four cases one is judged; one was visited too rarely, and each side has one alone."""
    rows = [_between("unisono", 1, 2), _between("mpi", 3, 4)]
    rows += [_between(name, 1, 2, size=8, visits=[2, 2, 2]) for name in ("unisono", "mpi")]
    found = _gate(
        tmp_path, *rows, _between("unisono", 1, 2, size=64), _between("mpi", 1, 2, size=72), min_judged=share
    )
    assert (found.passed, found.exit_code) == (passes, 0 if passes else 1)
    said = f"Only 1 of 4 cases were judged: --min-judged {share:g} asks for more."
    assert (said in found.summary()) is not passes


def test_a_share_of_seven_in_a_hundred_is_met_by_seven(tmp_path: Path) -> None:
    rows = [_between(name, 1, 2, size=8 * n) for name in ("unisono", "mpi") for n in range(1, 8)]
    rows += [_between("unisono", 1, 2, size=8 * n) for n in range(8, 101)]
    assert _gate(tmp_path, *rows, min_judged=0.07).passed


@pytest.mark.parametrize("share", ["-0.1", "1.1", "nan"])
def test_a_share_is_from_0_to_1(tmp_path: Path, share: str) -> None:
    data.write(tmp_path, data.run(), _between("unisono", 1, 2), data.end())
    found = CliRunner().invoke(app, ["gate", str(tmp_path), "--min-judged", share])
    assert found.exit_code == USAGE
    assert "must be from 0 to 1" in " ".join(found.stderr.split())


def test_failures_of_a_peer_do_not_decide(tmp_path: Path) -> None:
    found = _gate(tmp_path, _between("unisono", 1, 2), _between("mpi", 3, 4), data.failure("gloo"))
    assert found.passed
    assert any("other backends" in note for note in found.notes)


def test_cases_without_a_peer_are_counted(tmp_path: Path) -> None:
    rows = [_between("unisono", 1, 2), _between("mpi", 3, 4), _between("unisono", 9, 9, size=8)]
    found = _gate(tmp_path, *rows, _between("mpi", 1, 1, size=64), _between("gloo", 1, 1, size=64))
    assert found.passed
    assert (len(found.checked), len(found.alone), len(found.missing)) == (1, 1, 1)
    assert "1 case had no peer" in found.summary()
    assert "1 case ran on peers only" in found.summary()


@pytest.mark.parametrize("backends", [["unisono"], ["mpi"], ["unisono", "unisono:two_shot"]], ids="+".join)
def test_an_empty_comparison_does_not_pass(tmp_path: Path, backends: list[str]) -> None:
    found = _gate(tmp_path, *(_between(name, 1, 2) for name in backends))
    assert not found.passed
    assert found.exit_code == 1
    assert "no case of unisono has a result of the best peer" in _text(found)


def test_an_unknown_name_is_said_and_does_not_pass(tmp_path: Path) -> None:
    found = _gate(tmp_path, _between("unisono", 1, 2), _between("mpi", 3, 4), against="mpj")
    assert not found.passed
    assert "The records hold no result of mpj: they hold unisono and mpi." in found.notes


def test_a_run_that_was_cut_short_does_not_pass(tmp_path: Path) -> None:
    """A crash leaves neither an end nor a failure, and the case that crashed is absent."""
    good = [_between("unisono", 1, 2), _between("mpi", 3, 4)]
    data.write(tmp_path / "whole", data.run(), good, data.end())
    assert gates.gate(tmp_path).passed
    data.write(
        tmp_path / "cut", data.run(), [_between("unisono", 1, 2, size=8), _between("mpi", 3, 4, size=8)]
    )
    found = gates.gate(tmp_path)
    assert not found.below
    assert not found.passed
    assert "1 run without an end" in found.summary()
    assert "cut/records.jsonl is cut short: only what it holds was judged." in found.notes


def test_a_run_that_was_interrupted_is_said_and_passes(tmp_path: Path) -> None:
    good = [_between("unisono", 1, 2), _between("mpi", 3, 4)]
    data.write(tmp_path, data.run(), good, data.end(interrupted=True))
    found = gates.gate(tmp_path)
    assert found.passed
    assert found.notes == ["records.jsonl is interrupted: only what it holds was judged."]


def test_workload_cases_count(tmp_path: Path) -> None:
    rows = [_between("unisono", 9, 9, workload="w"), _between("mpi", 1, 1, workload="w")]
    assert len(_gate(tmp_path, *rows).below) == 1


def test_a_ratio_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        _gate(tmp_path, _between("unisono", 1, 2), min_ratio=0.0)


def test_names_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    found = _gate(tmp_path, _between("unisono", 9, 9), _between("\x1b[2J[red]mpi", 1, 1))
    said = _text(found)
    assert "\x1b" not in said
    assert "[red]mpi" in said
