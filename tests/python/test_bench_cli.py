"""The command line: what it refuses and how, and whole runs with real ranks."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console
from typer.testing import CliRunner

import ranks
import report_data as data
import unisono
from unisono import files, records
from unisono.bench import session, start, workloads
from unisono.bench.cases import CaseError
from unisono.bench.options import PRESETS, Options
from unisono.cli import finish
from unisono.cli.app import app
from unisono.cli.asked import Asked
from unisono.cli.resolve import options_of
from unisono.errors import ResourceError
from unisono.launch.run import outside_launchers
from unisono.records.vocabulary import COLLECTIVES

COMMAND = [sys.executable, "-m", "unisono"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher around the tests."""
    for name in os.environ:
        if name.startswith(("PMI", "OMPI_", "SLURM_", "MPI_LOCAL")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
        ):
            monkeypatch.delenv(name)


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
def test_a_wrong_command_says_what_is_known_and_exits_with_2(arguments: str, says: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert result.exit_code == finish.USAGE
    assert says in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("environment", "arguments", "says"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "--ranks 4", "mpich started 2"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "--ranks 3", "openmpi started 2"),
        ({"MPI_LOCALNRANKS": "4"}, "", "separate copies"),
        ({"PMI_SIZE": "4"}, "", "PMI_RANK is not"),
    ],
)
def test_it_refuses_to_run_as_separate_copies(
    environment: dict[str, str], arguments: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert result.exit_code == finish.USAGE
    assert says in result.stderr


@pytest.mark.parametrize("verb", ["bench", "scaling"])
@pytest.mark.parametrize("name", ["records.jsonl", "2-ranks/records.jsonl", "records-large.jsonl"])
def test_a_directory_with_records_is_not_overwritten(
    verb: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor run in where the report would merge them with the new ones."""
    monkeypatch.setattr(start, "start", lambda *_: pytest.fail("it was measured"))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    result = CliRunner().invoke(app, [verb, "--output", str(tmp_path)])
    assert result.exit_code == finish.USAGE
    assert "records of another run" in result.stderr


@pytest.mark.parametrize("place", ["/proc/x", "/sys/x/y", "/proc", "FILE/x", "FILE"])
@pytest.mark.parametrize("verb", ["bench", "scaling", "tune"])
def test_where_nothing_can_be_written_is_said_before_anything_is_measured(
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


def test_a_full_disk_is_said_in_a_sentence_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    writer = records.RecordsWriter(tmp_path)
    skip = records.Skip(backend="mpi", reason="because")
    writer.write(skip)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 9, hard))
    try:
        with pytest.raises(ResourceError, match=r"records\.jsonl cannot be written: File too large"):
            writer.write(skip)
        writer.write(skip)  # the sentence was said
        with pytest.raises(ResourceError, match=r"new cannot be written"):
            files.write(tmp_path / "new", bytes(1000))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert records.read(tmp_path).skips == [skip]
    assert os.listdir(tmp_path) == [records.FILE_NAME]


def test_a_report_that_cannot_be_written_is_said_and_the_records_named(tmp_path: Path) -> None:
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
    assert options_of(Asked(workloads="all"), []).workloads == list(workloads.entries())


def test_the_world_that_is_joined() -> None:
    assert start.joined_world({}, 4) is None
    assert start.joined_world({"PMI_RANK": "0", "PMI_SIZE": "1"}, 4) is None
    world = start.joined_world({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, None)
    assert world is not None
    assert (world.rank, world.size, world.launcher) == (1, 2, "torchrun")
    with pytest.raises(CaseError, match="separate copies"):
        start.joined_world({"PALS_SIZE": "4"}, None)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("mpiexec (OpenRTE) 4.1.4", {"--oversubscribe", "plm", "isolated"}),
        ("prterun (PRRTE) 3.0", {"--oversubscribe"}),
        ("HYDRA build details", {"-launcher", "fork"}),
    ],
)
def test_each_mpiexec_is_asked_in_its_own_words(said: str, words: set[str], tmp_path: Path) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\necho '{said}'\n")
    mpiexec.chmod(0o755)
    known = {"--oversubscribe", "plm", "isolated", "-launcher", "fork"}
    assert known & set(start.mpiexec_command(str(mpiexec), 2)) == words


def test_mpiexec_gets_the_users_settings_and_nothing_of_a_launcher_around_it() -> None:
    settings = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_pml": "ob1", "HYDRA_BINDING": "core", "PATH": "/bin"}
    launchers = (
        "OMPI_COMM_WORLD_SIZE OMPI_UNIVERSE_SIZE OMPI_FILE_LOCATION OMPI_MCA_ess OMPI_MCA_ess_base_vpid "
        "OMPI_MCA_orte_hnp_uri OMPI_MCA_pmix PMI_RANK PMIX_RANK PRTE_LAUNCHED HYDI_CONTROL_FD "
        "HYDRA_HOST_FILE HYDRA_RMK MPI_LOCALNRANKS RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE "
        "UNISONO_RANK UNISONO_SIZE UNISONO_BOOTSTRAP_FD"
    )
    around = settings | dict.fromkeys(launchers.split(), "1")
    job = {"SLURM_JOB_ID": "1"}
    assert outside_launchers(around | job) == settings | job
    assert outside_launchers(around | job, batch_system=False) == settings


@contextmanager
def mpiexec_of_a_bench() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """What starts an mpiexec, that one as its only child, and its rank: (the first, the pids of the others).
    SIGINT to mpiexec is told on standard output, whose end is the proof that it has ended."""
    mpiexec = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('SIGINT', flush=True), sys.exit(7)))\n"
        "pipe = subprocess.PIPE\n"
        "rank = subprocess.Popen(['cat'], stdin=pipe, stdout=subprocess.DEVNULL, start_new_session=True)\n"
        "print(os.getpid(), rank.pid, 'WORLD_SIZE' in os.environ, flush=True)\n"
        "signal.pause()"
    )
    starting = (
        "import signal, sys; from unisono.bench import start\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a run in the background ignores them
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "sys.exit(start.run_mpiexec([sys.executable, '-c', sys.argv[1]]))"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", starting, mpiexec]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        try:
            assert child.stdout is not None
            *pids, in_a_world = child.stdout.readline().split()
            assert in_a_world == "False"
            yield child, [int(pid) for pid in pids]
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_mpiexec_is_interrupted_by_what_is_to_end_the_bench(
    number: signal.Signals, ranks_find_unisono: None
) -> None:
    with mpiexec_of_a_bench() as (child, _):
        child.send_signal(number)
        assert child.communicate() == ("SIGINT\n", None)
    assert child.returncode == 7


def test_a_stopped_bench_stops_mpiexec_and_its_ranks(ranks_find_unisono: None) -> None:
    with mpiexec_of_a_bench() as (child, pids):
        child.send_signal(signal.SIGTSTP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        for pid in pids:
            ranks.wait_for_state(pid, "T")
        child.send_signal(signal.SIGCONT)
        for pid in pids:
            ranks.wait_for_state(pid, "S")


def test_mpiexec_ends_with_a_bench_that_is_killed(ranks_find_unisono: None) -> None:
    with mpiexec_of_a_bench() as (child, _):
        child.kill()
        assert child.communicate() == ("", None)


@pytest.mark.parametrize(("rank", "code"), [(0, finish.INTERRUPTED), (1, finish.OK)])
def test_of_ranks_that_joined_the_first_alone_gives_the_code(
    rank: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launcher ends all when one fails, and rank 0 has the report to write."""
    monkeypatch.setattr(session, "run", lambda options: session.Outcome(1, True, []))
    monkeypatch.setattr(finish, "finish", lambda *_: finish.INTERRUPTED)
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    found = CliRunner().invoke(app, ["bench", "-O", str(tmp_path / "run")])
    assert (found.exit_code, found.stderr) == (code, "")


def test_version() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"{unisono.__version__}\n")


def test_info_names_every_backend() -> None:
    done = subprocess.run([*COMMAND, "info"], capture_output=True, text=True, timeout=120, check=True)
    for word in ("processor", "cores", "memory", "unisono", "mpi", "gloo"):
        assert word in done.stdout


def test_the_schema_describes_what_is_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["schema"])
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    done = bench(tmp_path / "run", "--ranks", "1", "--backend", "unisono", "--collective", "all_reduce")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / records.FILE_NAME).read_text().splitlines()
    assert {json.loads(line)["type"] for line in lines} >= {"run", "ceiling", "result", "end"}
    for line in lines:
        jsonschema.validate(json.loads(line), schema)


@pytest.mark.parametrize("verb", [["report", "X"], ["compare", "X", "X"], ["gate", "X"]])
def test_verbs_that_read_records_say_where_there_are_none(verb: list[str], tmp_path: Path) -> None:
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


def bench(directory: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    small = ["--sizes", "8,5000", "-n", "4", "-O", str(directory), "--no-report"]
    return subprocess.run(
        [*COMMAND, "bench", *small, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        **options,
    )  # type: ignore[call-overload, no-any-return]


def test_a_records_file_cut_in_the_middle_is_read_up_to_there(tmp_path: Path) -> None:
    done = bench(tmp_path / "run", "all_reduce", "broadcast", "--ranks", "1", "--backend", "unisono")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "run" / records.FILE_NAME
    whole = records.read(path)
    data = path.read_bytes()
    last_result = data.rindex(b'{"type":"result"')
    path.write_bytes(data[: last_result + 40])
    cut = records.read(path)
    assert len(cut.results) == len(whole.results) - 1
    assert "the file ends in the middle" in cut.problems[0]
    assert finish.exit_code(whole) == finish.OK
    assert finish.exit_code(cut) == finish.FAILED  # no end: the run is not complete


def test_quantised_rows_are_checked_and_say_what_travels(tmp_path: Path) -> None:
    what = ["--backend", "unisono", "--wire", "all", "--collective", "all_reduce", "--sizes", "100K"]
    how = ["-d", "bf16,i32", "--mode", "latency", "-n", "1"]
    done = bench(tmp_path / "run", "--ranks", "2", *what, *how)
    found = records.read(tmp_path / "run")
    assert [f.message for f in found.failures] == []
    assert done.returncode == 0, done.stderr
    rows = {(r.backend, r.case.dtype): r for r in found.results}
    wires = {("unisono:fp8", "bf16"), ("unisono:int8", "bf16")}
    assert set(rows) == {("unisono", "bf16"), ("unisono", "i32"), *wires}
    for (backend, _), row in rows.items():
        assert row.verification.before and row.verification.after
        assert row.wire_bits == (None if backend == "unisono" else 8.25)
        if backend != "unisono":
            assert row.algorithm == "two_shot"
    quantised = rows["unisono:fp8", "bf16"]
    assert quantised.ceiling_gbps is not None and quantised.sol is not None
    assert quantised.sol == pytest.approx(quantised.busbw_gbps * 8.25 / 16 / quantised.ceiling_gbps)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    assert ", 8.25 of 16 bits" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize(
    ("ranks", "dtypes", "placement"), [(2, "f32,bf16,i64,f8e4m3", "all"), (3, "f32,bf16", "out_of_place")]
)
def test_all_backends_in_one_run_are_right(tmp_path: Path, ranks: int, dtypes: str, placement: str) -> None:
    what = ["--placement", placement, "--memory", "symmetric", "--mode", "latency", "-d", dtypes, "-n", "1"]
    done = bench(tmp_path / "run", "--ranks", str(ranks), *what)
    found = records.read(tmp_path / "run")
    assert [f.message for f in found.failures] == []
    assert done.returncode == 0, done.stderr
    assert {r.backend for r in found.results} == {"unisono", "mpi", "gloo"}
    for backend in ("unisono", "mpi", "gloo"):
        assert {r.case.collective for r in found.results if r.backend == backend} == set(COLLECTIVES)
    reasons = {(s.backend, s.reason) for s in found.skips}
    assert ("mpi", "MPI has no reduction of bf16.") in reasons
    assert found.runs[0].launcher == "mpich"


@pytest.mark.mpi
def test_it_joins_the_ranks_of_mpiexec(tmp_path: Path) -> None:
    mpiexec = start.mpiexec_command(str(start.find_mpiexec()), 2)
    what = ["barrier", "all_reduce", "--sizes", "8", "-n", "6", "--backend", "unisono,mpi"]
    arguments = ["bench", *what, "-O", str(tmp_path / "run")]
    done = subprocess.run(
        [*mpiexec, *COMMAND, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.html") == 1
    path = str(tmp_path / "run")
    assert CliRunner().invoke(app, ["compare", path, path]).exit_code == 0
    assert CliRunner().invoke(app, ["gate", path, "--backend", "mpi", "--min-ratio", "1e-9"]).exit_code == 0
    assert CliRunner().invoke(app, ["gate", path, "--backend", "mpi", "--min-ratio", "1e9"]).exit_code == 1
    again = CliRunner().invoke(app, ["report", path, "--output", str(tmp_path / "again")])
    assert "report.html" in again.stdout
    assert (tmp_path / "again" / "report.md").read_bytes() == (tmp_path / "run" / "report.md").read_bytes()
    assert {r.backend for r in records.read(tmp_path / "run").results} == {"unisono", "mpi"}


@pytest.mark.mpi
def test_ranks_of_a_foreign_launcher_are_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    done = bench(tmp_path / "run", "--backend", "unisono", env=environment)
    assert done.returncode == finish.USAGE
    assert "separate copies" in done.stderr


def test_a_run_that_cannot_measure_says_why_and_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    what = ["all_to_all", "--streams", "per-peer", "--backend", "unisono", "--ranks", "2", "--sizes", "8"]
    for name in (None, "mine"):
        place = ["-O", name] if name else []
        done = subprocess.run(
            [*COMMAND, "bench", *what, *place, "--no-report"],
            capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == finish.FAILED
        assert done.stdout.count("calls of unisono here are the host's and have no streams") == 1
        assert os.listdir(tmp_path) == ([name] if name else [])


def wait_for_measurements(directory: Path) -> None:
    """Until a run has begun to measure: what it does last before that is the ceiling."""
    deadline = time.monotonic() + 150
    file = directory / records.FILE_NAME
    while not file.exists() or b"ceiling" not in file.read_bytes():
        assert time.monotonic() < deadline, "the run has not begun to measure"
        time.sleep(0.1)


@pytest.mark.parametrize("backend", ["unisono", pytest.param("unisono,mpi", marks=pytest.mark.mpi)])
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, backend: str) -> None:
    directory = tmp_path / "run"
    what = ["--backend", backend, "--collective", "barrier,all_reduce", "--sizes", "8,1K", "-n", "1000000"]
    what += ["--no-report"] if "mpi" in backend else []
    child = subprocess.Popen(
        [*COMMAND, "bench", "--ranks", "2", *what, "-O", str(directory)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    try:
        wait_for_measurements(directory)
        time.sleep(2)  # nothing tells that there are samples: they are on record at the end
        os.killpg(child.pid, signal.SIGINT)  # as the terminal does it
        _, errors = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == finish.INTERRUPTED, errors
    found = records.read(directory)
    assert found.ends[0].interrupted
    assert found.results
    assert not found.failures
    assert (directory / "report.html").is_file() == ("mpi" not in backend)


def test_a_killed_rank_ends_the_run_and_the_records_stay(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    what = ["--collective", "barrier,all_reduce", "--sizes", "8,1K", "-n", "1000000"]
    long = [*what, "-O", str(directory), "--no-report"]
    child = subprocess.Popen(
        [*COMMAND, "bench", "--ranks", "3", "--backend", "unisono", *long],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for_measurements(directory)
        time.sleep(5)  # long enough for a visit on a busy machine
        ranks = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        output, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == finish.FAILED
    assert "rank 1" in errors
    assert "did not end in good order" in " ".join(output.split())
    found = records.read(directory)
    assert found.results
    for result in found.results:
        assert result.verification.before and not result.verification.after
        assert "rank 1" in str(result.verification.detail)


def test_two_benches_at_once_both_finish(tmp_path: Path) -> None:
    arguments = "--ranks 2 --backend unisono --collective all_reduce --sizes 8 -n 5 --no-report".split()
    children = [
        subprocess.Popen(
            [*COMMAND, "bench", *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for child in children:
        _, errors = child.communicate(timeout=200)
        assert child.returncode == 0, errors.decode()
    assert len(list(tmp_path.glob("unisono-bench-*/records.jsonl"))) == 2
