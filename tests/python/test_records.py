"""Records from anywhere: bytes that are no text, lines that are no record, escape sequences of terminals,
numbers that differ from the samples."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import report_data as data
from unisono import records
from unisono.cli.app import app
from unisono.report import gate, model

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
BAD_LINES = {
    "a byte that is not UTF-8": b'{"type":"skip","backend":"\xff","reason":"none"}\n',
    "half a surrogate": b'{"type":"skip","backend":"\\ud800","reason":"none"}\n',
    "no JSON": b"Segmentation fault\n",
    "another type": b'{"type":"skip","backend":7,"reason":"none"}\n',
    "a number out of range": b'{"type":"end","finished_at":"","elapsed_s":1e999,"interrupted":false}\n',
    "depth": b"[" * 100_000 + b"\n",
}


def test_written_records_are_read_and_the_schema_describes_them(tmp_path: Path) -> None:
    rows = data.sweep()
    data.write(tmp_path, data.run(), rows, data.end())
    found = records.read(tmp_path)
    assert found.results == rows
    assert (len(found.runs), len(found.ends), found.left_out, found.problems) == (1, 1, 0, [])
    assert set(msgspec.json.decode((tmp_path / records.FILE_NAME).read_bytes().split(b"\n")[1])) <= set(
        records.json_schema()["$defs"]["Result"]["properties"]
    )


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_is_no_record_is_named_and_the_others_stay(bad: bytes, tmp_path: Path) -> None:
    file = data.write(tmp_path / "run", data.run(), data.sweep(), data.end()) / records.FILE_NAME
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], bad, *lines[1:]]))
    found = records.read(tmp_path)
    assert found.left_out == 1
    assert len(found.results) == len(data.sweep())
    (problem,) = found.problems
    assert problem.startswith("run/records.jsonl line 2 was left out: ")
    judged = gate.gate(tmp_path)
    assert not judged.passed  # the line may have been a failure of the backend
    assert "1 line could not be read" in judged.summary()
    file.write_bytes(b"".join(lines))
    assert gate.gate(tmp_path).left_out == 0


def test_no_escape_sequence_of_a_record_reaches_terminal_or_page(tmp_path: Path) -> None:
    name = f"evil{ESCAPE}\u202e[bold]"
    rows = [data.timed("unisono", data.case()), data.timed(name, data.case())]
    failure = data.failure(name, data.case(size=8), f"line one\n{ESCAPE}")
    data.write(tmp_path, data.run(command=["unisono", ESCAPE]), rows, failure, data.end())
    found = records.read(tmp_path)
    assert found.left_out == 0
    assert len(found.problems) == 3
    assert all("control characters" in problem for problem in found.problems)
    assert found.failures[0].message.startswith("line one\n")
    for words in (
        ["report", str(tmp_path)],
        ["gate", str(tmp_path)],
        ["compare", str(tmp_path), str(tmp_path), "--all"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
    for page in ("report.html", "report.md"):
        text = (tmp_path / page).read_text()
        shown = text if page.endswith("md") else text[text.index("<body>") :].split("<script")[0]
        assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert "[bold]" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("backend", ["unisono", "fabric:single"])
def test_an_unknown_dtype_is_reported(backend: str, tmp_path: Path) -> None:
    odd = msgspec.structs.replace(data.case(), dtype="f7")
    bad = msgspec.structs.replace(data.timed(backend, data.case()), case=odd)
    data.write(tmp_path, data.run(), bad, data.timed("mpi", data.case()), data.end())
    found = model.load(tmp_path)
    assert "line 2" in found.problems[0] and "dtype 'f7', which is none of f32" in found.problems[0]
    assert [row.backend for row in found.all_rows] == ["mpi"]
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"median_us": 0.001, "ci_low_us": 0.001, "ci_high_us": 0.001}, "median_us, ci_low_us, ci_high_us"),
        ({"ci_high_us": 0.001}, "ci_high_us"),
        ({"busbw_gbps": 1e6}, "busbw_gbps"),
        ({"sol": None}, "sol"),
    ],
)
def test_values_written_beside_the_samples_do_not_count(
    change: dict[str, float], named: str, tmp_path: Path
) -> None:
    honest = data.timed("unisono", data.case(), 100.0)
    forged = msgspec.structs.replace(honest, **change)
    data.write(tmp_path, data.run(), forged, data.timed("mpi", data.case(), 10.0), data.end())
    found = records.read(tmp_path)
    assert found.results[0] == honest
    assert found.problems[0].startswith(f"records.jsonl line 2: {named} differ from the samples (")
    judged = gate.gate(tmp_path)
    assert not judged.passed
    assert judged.below[0].ratio == pytest.approx(0.1, rel=0.2)
    assert any("differ from the samples" in note for note in judged.notes)
