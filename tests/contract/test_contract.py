"""The contract of every collective, with every backend and number of ranks, compared with numpy.

A group of ranks runs its whole matrix (cases.py) in one run of worker.py, by one body (body.py). Each test
here is the part of one collective. Unisono must give the bits of the reference (reference.py). The sums of
floats of other libraries must lie within a stated bound.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ranks
from cases import COLLECTIVES
from unisono.bench.mpis import find_mpiexec, mpiexec_command

RANKS = (1, 2, 3, 4, 5, 8)
BACKENDS = (
    "unisono",
    "unisono-threads",
    pytest.param("mpi", marks=pytest.mark.mpi),
    pytest.param("gloo", marks=pytest.mark.torch),
)
WORKER = str(Path(__file__).with_name("worker.py"))
TIMEOUT_S = 280.0

# Settings that must not change a bit of a result. Each is tried somewhere.
SETTINGS = {
    ("unisono", 2): {"UNISONO_STREAM_CHUNKS": "1"},
    ("unisono", 3): {"UNISONO_FAR": "0", "UNISONO_STREAM_CHUNKS": "0"},
    ("unisono", 4): {"UNISONO_ISA": "baseline", "UNISONO_STREAM_BYTES": "100000"},
    ("unisono", 5): {"UNISONO_FAR": "0", "UNISONO_CHUNK_BYTES": "4096", "UNISONO_STREAM_CHUNKS": "1"},
    ("unisono-threads", 3): {"UNISONO_STREAM_BYTES": "5000", "UNISONO_SPINS": "0"},
    ("unisono-threads", 4): {"UNISONO_ISA": "baseline"},
    ("unisono-threads", 5): {"UNISONO_CHUNK_BYTES": "8192"},
}

# Cases that other libraries do not offer, in the bench's words. Unisono offers all.
REFUSALS: dict[str, set[str]] = {
    "unisono": set(),
    "unisono-threads": set(),
    "mpi": {
        "MPI has no average.",
        *(f"MPI has no reduction of {dtype}." for dtype in ("f16", "bf16", "f8e4m3", "f8e5m2")),
        "MPI's in-place reduce_scatter leaves the result in block 0, not in the rank's own.",
    },
    "gloo": {
        "gloo cannot send to itself.",
        "gloo has no average of integers.",
        *(f"gloo has no reduction of {dtype}." for dtype in ("f8e4m3", "f8e5m2")),
        *(f"gloo has no in-place {collective}." for collective in ("all_to_all", "reduce_scatter")),
    },
}
# Collectives of which no case is left: (backend, ranks, collective).
REFUSED_WHOLE = {("gloo", 1, "send_recv"): "gloo cannot send to itself."}

Report = dict[str, Any]


@cache
def reports(backend: str, n: int) -> tuple[list[Report | None], ranks.Ended]:
    """Runs the group (gloo's: for all numbers of ranks at once). Returns each rank's report, None if a rank
    left none."""
    if backend == "gloo":
        folder, ended = _gloo()
        return _read(folder, n), ended
    with tempfile.TemporaryDirectory() as made:
        argv = [sys.executable, WORKER, backend, str(n), made]
        env = SETTINGS.get((backend, n))
        if backend == "unisono":
            ended = ranks.launch(n, argv, env, TIMEOUT_S)
        else:
            if backend == "mpi":
                argv = mpiexec_command(str(find_mpiexec()), n) + argv
            ended = ranks.run(argv, env, TIMEOUT_S)
        return _read(made, n), ended


@cache
def _gloo() -> tuple[str, ranks.Ended]:
    """Runs one group of the most ranks for all numbers of ranks, since torch takes seconds to load."""
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    numbers = ",".join(map(str, RANKS))
    argv = [sys.executable, WORKER, "gloo", numbers, folder.name]
    return folder.name, ranks.launch(max(RANKS), argv, None, TIMEOUT_S)


_folders: list[tempfile.TemporaryDirectory[str]] = []


@pytest.fixture(scope="module", autouse=True)
def _clean() -> Any:
    yield
    for folder in _folders:
        folder.cleanup()


def _read(folder: str, n: int) -> list[Report | None]:
    paths = [Path(folder) / f"{n}-{rank}.json" for rank in range(n)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def _complaints(found: list[Report | None], collective: str) -> list[str]:
    lines = []
    for rank, report in enumerate(found):
        if report is None:
            lines.append(f"rank {rank} left no report")
            continue
        count = report["wrong"].get(collective, 0)
        lines += [f"{count} wrong on rank {rank}, such as"] if count else []
        lines += report["words"].get(collective, [])
    return lines


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_contract(backend: str, n: int, collective: str) -> None:
    found, ended = reports(backend, n)
    complaints = _complaints(found, collective)
    if complaints:
        pytest.fail("\n".join([*complaints, str(ended)]), pytrace=False)
    whole = [report for report in found if report is not None]
    if any(report["error"] for report in whole):
        errors = "\n".join(f"rank {rank}: {r['error']}" for rank, r in enumerate(whole) if r["error"])
        pytest.fail(f"the run ended early:\n{errors}\n{ended}", pytrace=False)
    done = {report["done"].get(collective, 0) for report in whole}
    assert len(done) == 1, f"the ranks made different numbers of calls: {sorted(done)}"
    if reason := REFUSED_WHOLE.get((backend, n, collective)):
        assert (done, set(whole[0]["refused"][collective])) == ({0}, {reason})
        pytest.skip(reason)
    assert done != {0}, f"no call was made: {whole[0]['refused'].get(collective)}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_else_ends_well(backend: str) -> None:
    """Every group of ranks has ended by itself, with exit code 0. All cases that it left out are known."""
    refused: set[str] = set()
    for n in RANKS:
        found, ended = reports(backend, n)
        assert ended.code == 0, str(ended)
        if found[0] is not None:
            for reasons in found[0]["refused"].values():
                refused.update(reasons)
    assert refused == REFUSALS[backend]
