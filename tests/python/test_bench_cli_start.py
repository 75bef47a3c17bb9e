"""How `unisono bench` joins the ranks of a launcher, or starts ranks by mpiexec."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ranks
from bench_cli import COMMAND, bench, leave_launchers
from unisono import records
from unisono.bench import mpis, session, start
from unisono.bench.cases import CaseError
from unisono.cli import finish
from unisono.cli.app import app
from unisono.launch.run import outside_launchers


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_launchers(monkeypatch)


@pytest.mark.parametrize(
    ("environment", "arguments", "says"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "--ranks 4", "mpich started 2"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "--ranks 3", "openmpi started 2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "--launches 2", "start the bench alone"),
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


def test_the_world_that_is_joined() -> None:
    assert start.joined_world({}, 4) is None
    assert start.joined_world({"PMI_RANK": "0", "PMI_SIZE": "1"}, 4) is None
    world = start.joined_world({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, None)
    assert world is not None
    assert (world.rank, world.size, world.launcher) == (1, 2, "torchrun")
    with pytest.raises(CaseError, match="separate copies"):
        start.joined_world({"PALS_SIZE": "4"}, None)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("mpiexec (OpenRTE) 4.1.4", {"--oversubscribe", "plm", "isolated"}),
        ("prterun (PRRTE) 3.0", {"--oversubscribe"}),
        ("HYDRA build details", {"-launcher", "fork"}),
    ],
)
def test_each_mpiexec_gets_its_own_options(version: str, words: set[str], tmp_path: Path) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpiexec.chmod(0o755)
    known = {"--oversubscribe", "plm", "isolated", "-launcher", "fork"}
    assert known & set(mpis.mpiexec_command(str(mpiexec), 2)) == words


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
    """Starts a bench with a stand-in for mpiexec as its only child, and a rank. Yields (bench, pids of both).

    The stand-in prints SIGINT to standard output, whose end proves that the stand-in has ended."""
    mpiexec = (
        "import os, signal, subprocess, sys\n"
        # os.write, since the signal may come within a print
        "signal.signal(signal.SIGINT, lambda *_: (os.write(1, b'SIGINT\\n'), sys.exit(7)))\n"
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
def test_signals_that_end_the_bench_interrupt_mpiexec(
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
def test_only_rank_0_of_a_launcher_returns_an_error_code(
    rank: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launcher ends all ranks when one fails, but rank 0 has to write the report."""
    monkeypatch.setattr(session, "run", lambda options: session.Outcome(1, True, []))
    monkeypatch.setattr(finish, "finish", lambda *_: finish.INTERRUPTED)
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    found = CliRunner().invoke(app, ["bench", "-O", str(tmp_path / "run")])
    assert (found.exit_code, found.stderr) == (code, "")


@pytest.mark.mpi
def test_it_joins_the_ranks_of_mpiexec(tmp_path: Path) -> None:
    mpiexec = mpis.mpiexec_command(str(mpis.find_mpiexec()), 2)
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
