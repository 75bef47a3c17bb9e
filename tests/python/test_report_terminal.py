"""What a run prints at its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer
from rich.console import Console

import report_data as data
from unisono.bench.progress import Display
from unisono.cli import common
from unisono.cli.finish import FAILED, OK, finish
from unisono.records import NOT_CHECKED, Record, Skip, Verification
from unisono.report import terminal

UNCHECKED = Verification(before=False, after=False, bound=NOT_CHECKED)


def printed(directory: Path, *found: Record | list[Record], code: int = OK) -> list[str]:
    """The lines that are not empty, each with single blanks."""
    data.write(directory, data.run(), *found, data.end())
    console = Console(file=io.StringIO(), width=160, markup=False)
    assert finish(directory, 0, console, with_report=False) == code
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [" ".join(line.split()) for line in lines if line.strip()]


def test_the_numbers_of_one_backend_are_printed(tmp_path: Path) -> None:
    sizes = [data.result("unisono", data.case(size=size), [us] * 6) for size, us in ((8, 1.0), (4096, 2.0))]
    said = printed(tmp_path, [*sizes])
    assert said[0] == "all_reduce, 2 ranks, latency, plain, out of place, f32, sum, unisono"
    assert said[1] == "size time µs 95 % algbw GB/s busbw GB/s check"
    assert said[3:5] == ["8 B 1.00 1.00 to 1.00 0.00800 0.00800 ok", "4 KiB 2.00 2.00 to 2.00 2.05 2.05 ok"]


def test_what_differs_has_a_column_and_what_failed_or_is_unchecked_says_so(tmp_path: Path) -> None:
    case = data.case(size=8)
    unchecked = data.result("mpi", case, [3.0] * 6, verification=UNCHECKED)
    failed = data.failure("gloo", data.case("broadcast", 4096))
    said = printed(tmp_path, [data.result("unisono", case, [1.0] * 6), unchecked, failed], code=FAILED)
    assert said[0] == "2 ranks, latency, plain, out of place, f32"
    assert said[1] == "collective size op root backend time µs 95 % algbw GB/s busbw GB/s check"
    rows = said[3:6]
    assert rows[0].startswith("all_reduce 8 B sum unisono 1.00") and rows[0].endswith("ok")
    assert rows[1].startswith("all_reduce 8 B sum mpi 3.00") and rows[1].endswith("not checked")
    assert rows[2].startswith("broadcast 4 KiB") and rows[2].endswith("FAILED")


def test_of_many_results_the_first_are_printed(tmp_path: Path) -> None:
    many = [
        data.result("unisono", data.case(size=8 * n), [1.0] * 6) for n in range(1, terminal.MOST_ROWS + 6)
    ]
    said = printed(tmp_path, [*many])
    assert sum(line.endswith("ok") for line in said) == terminal.MOST_ROWS
    assert "5 more rows: `unisono report` shows all of them." in said


def test_how_many_cases_are_judged_is_said_where_not_all_are(tmp_path: Path) -> None:
    """Six visits carry a verdict, five do not."""
    pairs = [
        data.result(name, data.case(size=size), [us] * 12, visits=[2] * 6 if size < 4096 else [3] * 4)
        for size in (8, 64, 4096)
        for name, us in (("unisono", 1.0), ("mpi", 2.0))
    ]
    said = printed(tmp_path / "some", pairs)
    assert "2 ranks: 2.00× over 3 cases, 2 of them judged." in said  # noqa: RUF001
    hint = "2 results of fewer than 6 visits: verdicts on them are UNCLEAR. Give the bench a longer --budget."
    assert hint in said
    said = printed(tmp_path / "all", pairs[:4])
    assert not any("of them judged" in line or "--budget" in line for line in said)


def test_why_cases_were_not_measured_on_any_backend_is_said_once(tmp_path: Path) -> None:
    ways = [data.case("all_to_all", size, streams="one") for size in (8, 4096)]
    other = data.case("all_gather")
    skips: list[Record] = [
        *(
            Skip(backend=name, reason="no [streams].", case=way)
            for name in ("unisono", "mpi")
            for way in ways
        ),
        Skip(backend="gloo", reason="gloo cannot.", case=other),
        Skip(backend="all", reason="they do not fit.", case=data.case(size=1 << 40)),
        Skip(backend="nccl", reason="it works on cuda only."),
    ]
    said = printed(tmp_path, data.result("unisono", other, [1.0] * 6), skips)
    what = "left out 2 cases of all_to_all: no [streams]."
    assert [line for line in said if "left out" in line] == [f"unisono {what}", f"mpi {what}"]


def test_brackets_and_colons_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, run = "mpi[red]:smile:", tmp_path / "[bold]run[/bold]"
    rows = [data.timed(backend, data.case()) for backend in ("unisono", name)]
    skip = Skip(backend=name, case=data.case(size=16), reason="it has no [streams].")
    data.write(run, data.run(), rows, skip, data.end())
    assert finish(run, 0, common.console(), with_report=False) == OK
    said = capsys.readouterr().out
    assert name in said and "it has no [streams]." in said
    assert "[bold]run[/bold]/records.jsonl" in said
    with pytest.raises(typer.Exit):
        common.refuse(ValueError("no [bench] :smile:"))
    assert "no [bench] :smile:" in capsys.readouterr().err


def test_the_bar_shows_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(columns=120) as display:
        display.say("a [red] line :smile:")
        display._bar.update(0, description="unisono [bold] now", left="?")
        display._bar.refresh()
    said = capsys.readouterr().out
    assert "a [red] line :smile:" in said and "unisono [bold] now" in said
