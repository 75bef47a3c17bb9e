"""Ranks that are started several times, and under several MPIs: records, their end, and the report."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

import mpi_programs
import ranks
import report_data as data
from bench_cli import bench, leave_launchers
from bench_threads import options
from unisono import records
from unisono.bench import launches
from unisono.bench.schedule import Limits
from unisono.records import FILE_NAME, RecordsWriter, derived
from unisono.records.stats import Verdict
from unisono.report import gate, model, pairing, sections


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_launchers(monkeypatch)


@pytest.mark.mpi
def test_an_mpi_that_does_not_start_is_named_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpiexec = tmp_path / "bin" / "mpiexec"
    mpiexec.parent.mkdir()
    mpiexec.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'Intel(R) MPI Library, Version 9.8' && exit\nexit 7\n"
    )
    mpiexec.chmod(0o755)
    monkeypatch.setenv("I_MPI_ROOT", str(tmp_path))
    how = ["--mpi", "impi,mpich", "--ranks", "2", "--backends", "unisono", "--mode", "latency"]
    done = bench(tmp_path / "run", "barrier", *how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("impi is left out: its ranks did not start, mpiexec ended with code 7.") == 1
    found = records.read(tmp_path / "run")
    assert [skip.reason for skip in found.skips if skip.backend == "impi"] == [
        "its ranks did not start, mpiexec ended with code 7."
    ]
    assert [(run.launch, run.launches, run.launcher) for run in found.runs] == [
        (2, 4, "mpich"),
        (4, 4, "mpich"),
    ]
    rows = model.load(tmp_path / "run").all_rows
    assert {(row.backend, row.launches) for row in rows} == {("unisono", 2), ("mpich", 2)}
    assert all(len(row.samples) == 2 for row in rows)  # -n 4, over 4 launches


@pytest.mark.mpi
def test_two_mpis_in_one_process_are_refused() -> None:
    other = mpi_programs.openmpi().env["MPI4PY_LIBMPI"]
    program = (
        f"import ctypes, mpi4py; ctypes.CDLL({other!r}); mpi4py.rc.initialize = False\n"
        "from unisono.bench.backends.base import load\n"
        "print(load('mpi').available(1)); print(load('openmpi').available(1))"
    )
    ended = ranks.run([sys.executable, "-c", program])
    both, named = ended.output.splitlines()
    assert "libmpi.so.40" in both
    assert both.endswith("in one process define the same functions: load one MPI only.")
    assert named.endswith("`unisono bench --mpi openmpi` starts others.")


def _kill_a_rank(directory: Path) -> None:
    """Kills one child of this process once the first launch has measured something."""
    path, me = directory / FILE_NAME, threading.main_thread().native_id
    while not (path.exists() and b'"ceiling"' in path.read_bytes()):
        time.sleep(0.05)
    time.sleep(0.5)  # of 1.5 s: some rounds
    children = Path(f"/proc/{os.getpid()}/task/{me}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.mark.usefixtures("ranks_find_unisono")
def test_a_launch_that_dies_is_named_and_loses_nothing(tmp_path: Path) -> None:
    limits = Limits(budget_s=3.0, width=1e-9, max_samples=10**6)
    chosen = options(tmp_path / "run", ["unisono"], limits=limits, launches=2, memories=["plain"])
    threading.Thread(target=_kill_a_rank, args=[tmp_path / "run"], daemon=True).start()
    said: list[str] = []
    code = launches.run(chosen, 2, said.append)
    assert code != 0
    assert said == [
        "launch 1 of 2",
        f"launch 1 of 2 ended early, with code {code}: what it has measured is kept.",
        "launch 2 of 2",
    ]
    found = model.load(tmp_path / "run")
    of_both = [row for row in found.all_rows if row.launches == 2]
    assert of_both and all(row.unchecked == (row in of_both) for row in found.all_rows)
    assert found.sources[0].endless == [1]
    warned = [item for block in sections.notices(found) for item in block.items]
    assert f"{FILE_NAME}: launch 1 of 2 has no end; what was measured counts." in warned
    assert not gate.gate(tmp_path / "run").passed


def test_a_launch_after_a_cut_line_begins_a_new_one(tmp_path: Path) -> None:
    data.write(tmp_path, data.run(launch=1, launches=2))
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(b'{"type":"result","case"')
    writer = RecordsWriter(tmp_path, more=True)
    writer.write(data.run(launch=2, launches=2))
    writer.close()
    found = records.read(tmp_path)
    assert [run.launch for run in found.runs] == [1, 2] and found.left_out == 1


def _launch(number: int, us: float, backend: str = "unisono") -> records.Result:
    times = us * np.random.default_rng(number).lognormal(0, 0.001, 60)
    return data.result(backend, data.case(), times, visits=[20] * 3, launches=[number] * 3)


def _lines(number: int, launches: int, *results: records.Result) -> list[records.Record]:
    known = {"backend unisono": "1", "backend mpi": "2"}
    head = data.run(launch=number, launches=launches, libraries=known)
    return [head, *results, msgspec.structs.replace(data.end(), launch=number)]


def test_the_interval_covers_the_launches_medians(tmp_path: Path) -> None:
    """Each launch by itself is sure of another time."""
    means = [10.0, 14.0, 11.0, 13.0, 12.0, 15.0, 9.0]
    lines = [line for n, us in enumerate(means, 1) for line in _lines(n, len(means), _launch(n, us))]
    data.write(tmp_path, lines)
    (row,) = model.load(tmp_path).all_rows
    assert (row.launches, len(row.samples)) == (7, 420)
    assert row.interval.median == pytest.approx(12, rel=1e-3) and row.interval.sure
    assert (row.interval.low, row.interval.high) == (pytest.approx(9, rel=1e-3), pytest.approx(15, rel=1e-3))
    again = derived.from_samples(row.result)
    assert again == (row.result, None)  # a joined result is a record like others
    assert row.apart == pytest.approx(0.5, rel=1e-2)
    assert sections.launched(model.load(tmp_path)) == "The intervals cover 7 launches of the ranks."


def test_peers_are_compared_over_the_launches_that_both_ran_in(tmp_path: Path) -> None:
    """Under the second MPI everything takes three times as long."""
    first = [_launch(1, 10), _launch(1, 12, "mpich")]
    second = [_launch(2, 30), _launch(2, 27, "impi")]
    data.write(tmp_path, _lines(1, 2, *first), _lines(2, 2, *second))
    ((pair,), _, _) = pairing.pairs(model.load(tmp_path).all_rows, "unisono")
    assert (pair.peer.backend, pair.others[0].peer.backend) == ("impi", "mpich")
    assert pair.ratio == pytest.approx(0.9, rel=1e-2)
    assert pair.others[0].ratio == pytest.approx(1.2, rel=1e-2)


def test_from_six_launches_on_the_ratios_of_launches_are_judged(tmp_path: Path) -> None:
    """Launches differ by half for both, the libraries by 5 %."""
    times = [10.0, 14.0, 11.0, 13.0, 12.0, 15.0, 9.0]
    both = [_lines(n, 7, _launch(n, us), _launch(n, 1.05 * us, "mpi")) for n, us in enumerate(times, 1)]
    for count, verdict in ((7, Verdict.FASTER), (5, Verdict.UNCLEAR)):
        data.write(tmp_path, *both[:count])
        ((pair,), _, _) = pairing.pairs(model.load(tmp_path).all_rows, "unisono")
        assert pair.verdict is verdict
        assert pair.ratio == pytest.approx(1.05, rel=1e-2)
        assert (pair.interval.low > 1.04) == (count == 7)


def test_launches_of_other_cases_are_named(tmp_path: Path) -> None:
    first = _lines(1, 2, _launch(1, 10), _launch(1, 20, "mpi"))
    data.write(tmp_path, first, _lines(2, 2, _launch(2, 10)))
    assert model.uneven(model.load(tmp_path)) == [
        "records.jsonl: 1 result of fewer launches than its backend had."
    ]
