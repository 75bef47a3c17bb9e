"""The contract across virtual nodes: the same body, data and reference as on one node (test_contract.py).

A layout names the node of each rank: two nodes of equal size, several, uneven ones, and ranks that go round
the nodes, so that the order of nodes is not that of ranks.
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache

import pytest

import fabric
import ranks
from cases import COLLECTIVES
from test_contract import TIMEOUT_S, WORKER, Report, _complaints, _read
from unisono.bench.mpis import find_mpiexec, mpiexec_command

MPI_LAYOUTS = ("ab", "aabb", "abab", "abb", "aabbcc", "aaabb")
GLOO_LAYOUTS = ("aabb",)
FABRIC_LAYOUTS = ("ab", "aabb", "abacb")
GROUPS = [
    *(pytest.param("mpi", layout, marks=pytest.mark.mpi) for layout in MPI_LAYOUTS),
    *(pytest.param("gloo", layout, marks=pytest.mark.torch) for layout in GLOO_LAYOUTS),
    *(pytest.param("fabric", layout, marks=pytest.mark.fabric) for layout in FABRIC_LAYOUTS),
]


@cache
def reports(transport: str, layout: str) -> tuple[list[Report | None], ranks.Ended]:
    """Returns every rank's report of the whole matrix."""
    n = len(layout)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, WORKER, f"unisono:{layout}", str(n), folder]
        if transport == "mpi":
            ended = ranks.run([*mpiexec_command(str(find_mpiexec()), n), *argv], None, TIMEOUT_S)
        else:
            ended = ranks.launch(n, argv, {"UNISONO_TRANSPORT": transport}, TIMEOUT_S)
        return _read(folder, n), ended


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("transport", "layout"), GROUPS)
def test_contract_across_nodes(transport: str, layout: str, collective: str) -> None:
    if transport == "fabric" and (reason := fabric.missing("tcp")):
        pytest.skip(reason)
    found, ended = reports(transport, layout)
    if complaints := _complaints(found, collective):
        pytest.fail("\n".join([*complaints, str(ended)]), pytrace=False)
    errors = [
        f"rank {rank}: {report['error']}" for rank, report in enumerate(found) if report and report["error"]
    ]
    assert not errors and ended.code == 0, f"{errors}\n{ended}"
    done = {report["done"].get(collective, 0) for report in found if report}
    assert len(done) == 1 and done != {0}, f"the ranks made these numbers of calls: {sorted(done)}"
