"""The command line: what it refuses and how, the options that it makes, and reading records."""

from __future__ import annotations

import io
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import report_data as data
import unisono
from bench_cli import COMMAND, leave_launchers
from unisono import files, records
from unisono.bench import start, workloads
from unisono.bench.options import PRESETS, Options
from unisono.cli import finish
from unisono.cli.app import app
from unisono.cli.asked import Asked
from unisono.cli.resolve import options_of
from unisono.errors import ResourceError
from unisono.records.vocabulary import COLLECTIVES


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_launchers(monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--backend foo", "choose from unisono, mpi, gloo"),
        ("--backend unisono:fast", "choose from one_shot_packets"),
        ("--backend mpi:fast", "has no variants"),
        ("--collective allreduce", "choose from all_reduce"),
        ("all_reduce allreduce", "unknown collective 'allreduce': choose from all_reduce"),
        ("all_reduce --collective broadcast", "name them once"),
        ("--op mean", "choose from sum, prod"),
        ("--dtype f33", "choose from f32"),
        ("--mode fast", "choose from latency, throughput"),
        ("--memory gpu", "choose from plain, symmetric"),
        ("--placement here", "choose from out_of_place, in_place"),
        ("--offset 4096", "write bytes from the start of a page, 0 to 4095, like 0,16,64"),
        ("--offset -1", "0 to 4095"),
        ("--offset 1K", "0 to 4095"),
        ("--offset ,", "0 to 4095"),
        ("--offset 16 --device cuda", "the buffers of collectives in host memory: leave it out"),
        ("--offset 16 --fabric", "the buffers of collectives in host memory: leave it out"),
        ("--offset 16 --norm", "the buffers of collectives in host memory: leave it out"),
        ("--inputs new", "choose from kept, written"),
        ("--inputs written --mode throughput", "choose --mode latency"),
        ("--inputs written --device cuda", "collectives in host memory: leave it out"),
        ("--inputs kept,written --norm", "collectives in host memory: leave it out"),
        ("--preset slow", "choose from quick, standard, extensive"),
        ("--workload gpt", "llama-3-70b-tp-decode"),
        ("-b 8X", "not understood"),
        ("-b 64 -e 8", "no larger than the last"),
        ("-b 8 -e 64 -f 1", "at least 2"),
        ("-b 8 --sizes 8", "give one of them"),
        ("-i 8 --sizes 8", "give one of them"),
        ("-b 8 -e 64 -f 2 -i 8", "give one of them"),
        ("-b 8 -e 64 -i 0", "at least 1"),
        ("--sizes ,", "no sizes given"),
        ("--sizes 8,0K", "at least 1 byte"),
        ("--ranks 0", "at least one rank"),
        ("--backends mpich,impi", "two MPIs cannot be in one process, since they define the same functions"),
        ("--mpi mpi", "choose from mpich, impi, openmpi"),
        ("--mpi mpich --fabric", "leave one of them out"),
        ("--device cuda --to-memory-limit --launches 2", "leave --launches and --mpi out"),
        ("--ranks 4097 --backend mpi", "1024 are the most"),
        ("-n 0", "at least one iteration"),
        ("-w -1", "cannot be negative"),
        ("--budget 0", "seconds above 0"),
        ("--budget inf", "seconds above 0"),
        ("--width 2", "relative to the median"),
        ("--wire fp4", "unknown wire 'fp4': choose from fp8, int8"),
        ("-n 5 --budget 9", "whatever --budget and --width say"),
        ("-n 5 --width 0.1", "whatever --budget and --width say"),
        ("--fabric --preset standard", "leave --preset out"),
        ("--device cuda --to-memory-limit -e 4G", "leave -e out"),
        ("--device cuda --to-memory-limit -f 4 -i 8", "leave -f, -i out"),
        ("--device cuda --to-memory-limit --sizes 1G,2G", "leave all but one of --sizes out"),
        ("--device cuda --to-memory-limit --streams one --mode graph", "leave --streams, --mode out"),
        ("--device cuda --to-memory-limit --placement in_place", "leave --placement out"),
        ("--device cuda --to-memory-limit --workload all", "leave --workload out"),
        ("--device cuda --to-memory-limit -n 5 -w 1 -c 0", "leave -n, -w, -c 0 out"),
        ("--device cuda --to-memory-limit --budget 9 --width 0.1", "leave --budget, --width out"),
    ],
)
def test_a_wrong_command_lists_the_known_names_and_exits_with_2(arguments: str, says: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert result.exit_code == finish.USAGE
    assert says in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("verb", ["bench", "scaling"])
@pytest.mark.parametrize("name", ["records.jsonl", "2-ranks/records.jsonl", "records-large.jsonl"])
def test_a_directory_with_records_is_not_overwritten(
    verb: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a directory used whose records the report would merge with the new ones."""
    monkeypatch.setattr(start, "start", lambda *_: pytest.fail("it was measured"))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    result = CliRunner().invoke(app, [verb, "--output", str(tmp_path)])
    assert result.exit_code == finish.USAGE
    assert "records of another run" in result.stderr


@pytest.mark.parametrize("place", ["/proc/x", "/sys/x/y", "/proc", "FILE/x", "FILE"])
@pytest.mark.parametrize("verb", ["bench", "scaling", "tune"])
def test_a_place_that_cannot_be_written_is_refused_before_a_measurement(
    verb: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "start", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "FILE").write_text("kept")
    target = place.replace("FILE", str(tmp_path / "FILE")) + ("/plan" if verb == "tune" else "")
    result = CliRunner().invoke(app, [verb, "--output", target])
    assert result.exit_code == finish.USAGE, result.output
    assert "cannot be written" in result.stderr or "is not a directory" in result.stderr
    assert os.listdir(tmp_path) == ["FILE"]


def test_a_plan_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "start", lambda *_: pytest.fail("it was measured"))
    result = CliRunner().invoke(app, ["tune", "--output", str(tmp_path)])
    assert result.exit_code == finish.USAGE
    assert "is a directory: name a file" in result.stderr


def test_a_full_disk_raises_one_sentence_and_keeps_earlier_records(tmp_path: Path) -> None:
    writer = records.RecordsWriter(tmp_path)
    skip = records.Skip(backend="mpi", reason="because")
    writer.write(skip)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 9, hard))
    try:
        with pytest.raises(ResourceError, match=r"records\.jsonl cannot be written: File too large"):
            writer.write(skip)
        writer.write(skip)  # does nothing after the error
        with pytest.raises(ResourceError, match=r"new cannot be written"):
            files.write(tmp_path / "new", bytes(1000))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert records.read(tmp_path).skips == [skip]
    assert os.listdir(tmp_path) == [records.FILE_NAME]


def test_a_report_that_cannot_be_written_is_an_error_that_names_the_records(tmp_path: Path) -> None:
    data.write(tmp_path / "run", data.run(), data.timed("unisono", data.case()), data.end())
    (tmp_path / "run" / "report.html").mkdir()
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert result.exit_code == finish.FAILED
    assert "report.html cannot be written: Is a directory." in " ".join(result.stderr.split())
    screen = Console(file=io.StringIO(), width=200)
    assert finish.finish(tmp_path / "run", 0, screen) == finish.FAILED
    assert "records.jsonl; " in screen.file.getvalue()  # type: ignore[attr-defined]
    assert not list(tmp_path.rglob("*.part"))


def test_the_letters_of_nccl_tests() -> None:
    asked = Asked(
        begin="8", end="1K", factor=8, iterations=5, warmup=2, check=0, ops="max", dtypes="float,half"
    )
    found = options_of(asked, ["bench", "-b", "8", "-O", "/somewhere/else"])
    assert found.sizes == [8, 64, 512]
    assert options_of(Asked(begin="8", end="1K", step="512"), []).sizes == [8, 520]
    assert (found.limits.samples, found.limits.warmup, found.check) == (5, 2, False)
    assert (found.ops, found.dtypes) == (["max"], ["f32", "f16"])
    assert found.workloads == []  # narrowed down by the user
    assert found.command == ["unisono", "bench", "-b", "8", "-O", "else"]


def test_a_preset_alone_brings_its_workloads_and_a_directory_of_its_own() -> None:
    one, other = options_of(Asked(), []), options_of(Asked(), [])
    assert one.directory != other.directory
    assert one.workloads == list(PRESETS["quick"].workloads)
    assert one.collectives == list(COLLECTIVES)
    assert Options.unpack(one.pack()) == one
    on_gpus = options_of(Asked(workloads="all", device="cuda"), []).workloads
    assert on_gpus == list(workloads.entries()) != options_of(Asked(workloads="all"), []).workloads


def test_version() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"{unisono.__version__}\n")


def test_info_names_every_backend() -> None:
    done = subprocess.run([*COMMAND, "info"], capture_output=True, text=True, timeout=120, check=True)
    for word in ("processor", "cores", "memory", "unisono", "mpi", "gloo", "mpich", "impi", "openmpi"):
        assert word in done.stdout
    assert re.search(r"kernel's copies +(fast|slow|not allowed)", done.stdout)


@pytest.mark.parametrize("verb", [["report", "X"], ["compare", "X", "X"], ["gate", "X"]])
def test_commands_that_read_records_name_a_directory_without_any(verb: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [word.replace("X", str(tmp_path)) for word in verb])
    assert result.exit_code == finish.USAGE
    assert "unisono bench" in result.stderr


@pytest.mark.parametrize("verb", [["report", "X"], ["compare", "X", "X"], ["gate", "X"]])
def test_a_file_that_holds_no_record_is_refused(verb: list[str], tmp_path: Path) -> None:
    other = tmp_path / "README.md"
    other.write_text("# Not\n\nrecords\n")
    result = CliRunner().invoke(app, [word.replace("X", str(other)) for word in verb])
    assert result.exit_code == finish.USAGE
    assert "README.md holds no record of a bench" in result.stderr
    assert os.listdir(tmp_path) == ["README.md"]
