"""What the contracts of norms and of mixtures of experts share: a group of ranks, and how it is judged.

A group runs its whole matrix in one run of worker.py. Each test is the part of one name in that matrix.
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache

import pytest

import fabric
import ranks
from test_contract import RANKS, TIMEOUT_S, WORKER, Report, _complaints, _read
from unisono.bench.mpis import find_mpiexec, mpiexec_command

FABRIC = [pytest.param("fabric", n, marks=pytest.mark.fabric) for n in (1, 3)]
# Nodes by the fabric. A layout names the node of each rank, as in test_nodes.py.
NODES = [pytest.param("nodes by fabric", layout, marks=pytest.mark.fabric) for layout in ("ab", "abacb")]
MODES = [*(("threads", n) for n in RANKS), *(("processes", n) for n in RANKS), *FABRIC, *NODES]

# Settings that must not change a bit.
SETTINGS = {
    ("threads", 3): {"UNISONO_ISA": "baseline"},
    ("threads", 5): {"UNISONO_SPINS": "0", "UNISONO_CHUNK_BYTES": "8192"},
    ("processes", 3): {"UNISONO_STREAM_CHUNKS": "1", "UNISONO_STREAM_BYTES": "5000"},
    ("processes", 4): {"UNISONO_ISA": "baseline"},
}


@cache
def reports(matrix: str, lane: str, which: int | str) -> tuple[list[Report | None], ranks.Ended]:
    """Runs a group. Returns every rank's report, None if a rank left none.

    Args:
        matrix: what worker.py runs, "moe" or "norm".
        lane: "threads", "processes", "fabric", or "nodes by" a transport.
        which: the number of ranks, or the node of each.
    """
    n = which if isinstance(which, int) else len(which)
    env = SETTINGS.get((lane, n), {})
    with tempfile.TemporaryDirectory() as folder:
        _, over_nodes, transport = lane.partition("nodes by ")
        backend = f"unisono:{which}" if over_nodes else {"threads": "unisono-threads"}.get(lane, "unisono")
        argv = [sys.executable, WORKER, backend, str(n), folder, matrix]
        if lane == "threads":
            ended = ranks.run(argv, env, TIMEOUT_S)
        elif transport == "mpi":
            ended = ranks.run([*mpiexec_command(str(find_mpiexec()), n), *argv], env, TIMEOUT_S)
        else:
            more = {"UNISONO_TRANSPORT": transport} if over_nodes else {}
            if lane == "fabric":
                more = fabric.over("tcp")
            ended = ranks.launch(n, argv, {**env, **more}, TIMEOUT_S)
        return _read(folder, n), ended


def judge(matrix: str, lane: str, which: int | str, name: str) -> None:
    """Fails unless every rank ran the part `name` of the matrix, without a complaint."""
    if "fabric" in lane and (reason := fabric.missing("tcp")):
        pytest.skip(reason)
    found, ended = reports(matrix, lane, which)
    if complaints := _complaints(found, name):
        pytest.fail("\n".join([*complaints, str(ended)]), pytrace=False)
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(found) if one and one["error"]]
    assert not errors and ended.code == 0, "\n".join([*errors, str(ended)])
    done = {one["done"].get(name, 0) for one in found if one}
    assert len(done) == 1 and done != {0}, f"the ranks made these numbers of calls: {sorted(done)}"
