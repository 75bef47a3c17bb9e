"""`unisono scaling`: the bytes on each number of ranks, refusals, and a whole run."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench_threads import options
from unisono import records
from unisono.bench import cases, scaling
from unisono.cli import finish
from unisono.cli.app import app
from unisono.records import vocabulary

COMMAND = [sys.executable, "-m", "unisono", "scaling"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK", "PMI_SIZE")


@pytest.mark.parametrize("name", list(vocabulary.COLLECTIVES))
def test_the_bytes_that_stay_the_same(name: str) -> None:
    """Weak: the bytes of a rank stay the same. Strong: those of all ranks together."""
    for ranks in (1, 2, 4, 8):
        for kind, brought in (("weak", 1 << 20), ("strong", (1 << 20) // ranks)):
            case = cases.make_case(name, scaling.case_bytes(kind, name, 1 << 20, ranks), "f32", ranks)
            shape = cases.layout(case, 0).x
            if name == "barrier":
                assert case.bytes == 0
            elif name == "all_to_all_v":  # the larger buffer is the output of the busiest rank
                assert case.bytes == brought
            else:
                assert shape is not None
                assert math.prod(shape) * 4 == brought


def test_the_cases_of_a_number_of_ranks(tmp_path: Path) -> None:
    asked = options(tmp_path, ["unisono"], collectives=["all_gather"], sizes=[4096], modes=["latency"])
    assert scaling.grid(asked, 4) == []
    asked = msgspec.structs.replace(asked, scaling=scaling.KINDS, memories=["plain"])
    weak, strong = scaling.grid(asked, 4)
    assert (weak.bytes, weak.scaling) == (16384, records.Scaling(kind="weak", bytes=4096))
    assert (strong.bytes, strong.scaling) == (4096, records.Scaling(kind="strong", bytes=4096))
    assert scaling.room_bytes(asked, [1, 2, 8]) == 8 * 4096
    mine = scaling.of_count(asked, [1, 2, 8], 2)
    assert (mine.directory, mine.limits.budget_s) == (str(tmp_path / "2-ranks"), 10)


def test_numbers_of_ranks() -> None:
    assert scaling.default_counts(8) == [1, 2, 4, 8]
    assert scaling.default_counts(6) == [1, 2, 4]
    assert scaling.parse_counts("4, 1,2,4") == [1, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--weak --ranks 1,5000", "1024 are the most"),
        ("", "choose --weak, --strong, or both"),
        ("--weak --ranks 1,x", "write the numbers of ranks"),
        ("--weak --ranks 0", "write the numbers of ranks"),
        ("--weak --ranks ,", "write the numbers of ranks"),
        ("--weak --buffers small", "choose from used, largest"),
        ("pingpong --weak", "leave pingpong and mixture of experts out"),
        ("moe_round --weak", "leave pingpong and mixture of experts out"),
        ("gossip --weak", "unknown collective 'gossip'"),
        ("--weak --backend foo", "choose from unisono"),
        ("--weak --budget 0", "seconds above 0"),
    ],
)
def test_impossible_options_are_refused(arguments: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["scaling", *arguments.split()])
    assert result.exit_code == finish.USAGE
    assert says in " ".join(result.stderr.split())


def test_a_launcher_with_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["scaling", "--weak", "--ranks", "1,2"])
    assert result.exit_code == finish.USAGE
    assert "3 ranks were started, and --ranks 1,2 has no 3" in result.stderr


def test_a_run_on_several_numbers_of_ranks(tmp_path: Path) -> None:
    words = (
        "all_gather broadcast --weak --strong --ranks 1,3 --buffers largest --backend unisono --sizes 9000"
    )
    done = subprocess.run(
        [*COMMAND, *words.split(), "--budget", "3", "-O", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = records.read(tmp_path / "run")
    assert not found.failures
    assert [run.ranks for run in found.runs] == [1, 3]
    points = {(r.case.collective, r.case.scaling.kind, r.case.ranks) for r in found.results if r.case.scaling}
    assert len(points) == 2 * 2 * 2
    assert finish.exit_code(found) == finish.OK
    found.ends.pop()
    assert finish.exit_code(found) == finish.FAILED  # the run of one number of ranks did not end
    page = (tmp_path / "run" / "report.md").read_text()
    assert "Scaling" in page


def test_without_room_for_the_largest_count_everything_is_skipped_in_words(tmp_path: Path) -> None:
    words = "all_gather --weak --ranks 1 --buffers largest --backend unisono --sizes 512G --no-report"
    done = subprocess.run(
        [*COMMAND, *words.split(), "-O", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == finish.FAILED
    assert {"do not fit" in skip.reason for skip in records.read(tmp_path / "run").skips} == {True}
