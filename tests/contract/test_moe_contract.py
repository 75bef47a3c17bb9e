"""The contract of mixture of experts, with every lane and number of ranks, compared with numpy bit by bit.

As in test_contract.py: a group of ranks runs its whole matrix (moe_cases.py) in one run of worker.py, by one
body (moe_body.py), against one reference (moe_reference.py). Each test here is the part of one group.
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache

import pytest

import fabric
import ranks
from moe_cases import GROUPS
from test_contract import RANKS, TIMEOUT_S, WORKER, Report, _complaints, _read
from unisono.bench.mpis import find_mpiexec, mpiexec_command

FABRIC = [pytest.param("fabric", n, marks=pytest.mark.fabric) for n in (1, 3)]
# Nodes over each transport. A layout names the node of each rank, as in test_nodes.py.
NODES = [
    *(pytest.param("nodes by fabric", layout, marks=pytest.mark.fabric) for layout in ("ab", "abacb")),
    *(pytest.param("nodes by mpi", layout, marks=pytest.mark.mpi) for layout in ("aabb", "aab", "aabbcc")),
    *(pytest.param("nodes by gloo", layout, marks=pytest.mark.torch) for layout in ("aabb", "abb")),
]
MODES = [*(("threads", n) for n in RANKS), *(("processes", n) for n in RANKS), *FABRIC, *NODES]

# Settings that must not change a bit.
SETTINGS = {
    ("threads", 3): {"UNISONO_ISA": "baseline"},
    ("threads", 5): {"UNISONO_SPINS": "0"},
    ("processes", 4): {"UNISONO_ISA": "baseline"},
}


@cache
def reports(lane: str, which: int | str) -> tuple[list[Report | None], ranks.Ended]:
    """Returns every rank's report of the whole matrix. which: the number of ranks, or the node of each."""
    n = which if isinstance(which, int) else len(which)
    env = SETTINGS.get((lane, n), {})
    with tempfile.TemporaryDirectory() as folder:
        _, over_nodes, transport = lane.partition("nodes by ")
        backend = f"unisono:{which}" if over_nodes else {"threads": "unisono-threads"}.get(lane, "unisono")
        argv = [sys.executable, WORKER, backend, str(n), folder, "moe"]
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


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("lane", "which"), MODES)
def test_moe_contract(lane: str, which: int | str, group: str) -> None:
    if "fabric" in lane and (reason := fabric.missing("tcp")):
        pytest.skip(reason)
    found, ended = reports(lane, which)
    if complaints := _complaints(found, group):
        pytest.fail("\n".join([*complaints, str(ended)]), pytrace=False)
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(found) if one and one["error"]]
    assert not errors and ended.code == 0, "\n".join([*errors, str(ended)])
    done = {one["done"].get(group, 0) for one in found if one}
    assert len(done) == 1 and done != {0}, f"the ranks made these numbers of calls: {sorted(done)}"
