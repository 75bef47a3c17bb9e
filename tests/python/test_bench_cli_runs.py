"""Whole runs of the command line, with ranks as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from bench_cli import COMMAND, bench, leave_launchers
from unisono import records
from unisono.bench import ceilings
from unisono.cli import finish
from unisono.cli.app import app
from unisono.records.vocabulary import COLLECTIVES, PINGPONG


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_launchers(monkeypatch)


def test_the_schema_describes_the_written_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceilings are those of every run outside the tests."""
    monkeypatch.delenv("UNISONO_CEILING_BYTES")
    result = CliRunner().invoke(app, ["schema"])
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    done = bench(tmp_path / "run", "--ranks", "1", "--backend", "unisono", "--collective", "all_reduce")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / records.FILE_NAME).read_text().splitlines()
    assert {json.loads(line)["type"] for line in lines} >= {"run", "ceiling", "result", "end"}
    for line in lines:
        jsonschema.validate(json.loads(line), schema)
    copied = {one.bytes for one in records.read(tmp_path / "run").ceilings}
    assert copied == {ceilings.usual_bytes(1)}


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


def test_quantised_rows_are_checked_and_count_the_bits_on_the_wire(tmp_path: Path) -> None:
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
        error = row.verification.error
        assert error is None if backend == "unisono" else error is not None and 0 < error < 1
        if backend != "unisono":
            assert row.algorithm == "two_shot"
    quantised = rows["unisono:fp8", "bf16"]
    assert quantised.ceiling_gbps is not None and quantised.sol is not None
    assert quantised.sol == pytest.approx(quantised.busbw_gbps * 8.25 / 16 / quantised.ceiling_gbps)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    report = (tmp_path / "run" / "report.md").read_text()
    assert ", 8.25 of 16 bits" in report and "% of that seen" in report


@pytest.mark.mpi
@pytest.mark.torch
def test_buffers_anywhere_in_a_page_are_right_and_told_apart(tmp_path: Path) -> None:
    what = ["--offset", "0,16,4092", "--sizes", "5K", "--placement", "all", "--memory", "all", "-d", "f32"]
    done = bench(tmp_path / "run", "--ranks", "2", *what, "--mode", "latency", "-n", "1")
    found = records.read(tmp_path / "run")
    assert [f.message for f in found.failures] == []
    assert done.returncode == 0, done.stderr
    for backend in ("unisono", "mpi", "gloo"):
        own = [r.case for r in found.results if r.backend == backend and r.case.collective != "barrier"]
        assert {case.offset for case in own} == {0, 16, 4092}
        assert {case.collective for case in own} == {*COLLECTIVES} - {"barrier"}
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    assert "offset 4092 B" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.mpi
@pytest.mark.torch
def test_inputs_that_are_written_anew_are_right_and_told_apart(tmp_path: Path) -> None:
    what = ["--inputs", "kept,written", "--sizes", "5K", "--placement", "out_of_place", "-d", "f32"]
    what += ["--memory", "plain"]
    done = bench(tmp_path / "run", "--ranks", "2", *what, "-n", "1")
    found = records.read(tmp_path / "run")
    assert [f.message for f in found.failures] == []
    assert done.returncode == 0, done.stderr
    for backend in ("unisono", "mpi", "gloo"):
        own = [r.case for r in found.results if r.backend == backend and r.case.inputs == "written"]
        assert {case.collective for case in own} == {*COLLECTIVES} - {"barrier"}
        assert {case.mode for case in own} == {"latency"}
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    assert "inputs written" in (tmp_path / "run" / "report.md").read_text()


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


@pytest.mark.torch
def test_torch_distributed_is_right_in_every_case(tmp_path: Path) -> None:
    cases = [*COLLECTIVES, PINGPONG, "--placement", "all", "--sizes", "5K", "-d", "f32,f8e4m3"]
    how = ["--ranks", "2", "--backends", "torch-unisono,torch-gloo", "--memory", "plain", "--mode", "latency"]
    done = bench(tmp_path / "run", *cases, *how, "-n", "1")
    found = records.read(tmp_path / "run")
    assert [f.message for f in found.failures] == []
    assert done.returncode == 0, done.stderr
    for backend, reductions in (("torch-unisono", 2), ("torch-gloo", 1)):
        made = [r.case.collective for r in found.results if r.backend == backend]
        assert set(made) == {*COLLECTIVES, PINGPONG}
        assert all(made.count(name) == reductions for name in ("all_reduce", "reduce", "reduce_scatter"))
    assert all(r.verification.before and r.verification.after for r in found.results)


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
    """Waits until a run begins to measure, right after it has recorded the ceiling."""
    deadline = time.monotonic() + 150
    file = directory / records.FILE_NAME
    while not file.exists() or b"ceiling" not in file.read_bytes():
        assert time.monotonic() < deadline, "the run has not begun to measure"
        time.sleep(0.1)


@pytest.mark.parametrize("backend", ["unisono", pytest.param("unisono,mpi", marks=pytest.mark.mpi)])
def test_ctrl_c_keeps_the_samples(tmp_path: Path, backend: str) -> None:
    directory = tmp_path / "run"
    what = ["--backend", backend, "--collective", "barrier,all_reduce", "--sizes", "8,1K", "-n", "1000000"]
    what += ["--no-report"] if "mpi" in backend else []
    child = subprocess.Popen(
        [*COMMAND, "bench", "--ranks", "2", *what, "-O", str(directory)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    try:
        wait_for_measurements(directory)
        time.sleep(2)  # for some samples, which are recorded only at the end
        os.killpg(child.pid, signal.SIGINT)  # as the terminal does
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
        time.sleep(10)  # long enough for a visit on a busy machine
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
