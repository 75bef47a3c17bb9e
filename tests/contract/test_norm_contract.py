"""The contract of the fused norms, with every lane and number of ranks, compared with numpy bit by bit.

As in test_moe_contract.py, by one body with its matrix (norm_body.py) and one reference (norm_reference.py).
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache

import pytest

import fabric
import ranks
from norm_body import GROUPS
from test_contract import RANKS, TIMEOUT_S, WORKER, Report, _complaints, _read

FABRIC = [pytest.param("fabric", n, marks=pytest.mark.fabric) for n in (1, 3)]
NODES = [pytest.param("nodes", layout, marks=pytest.mark.fabric) for layout in ("ab", "abacb")]
MODES = [*(("threads", n) for n in RANKS), *(("processes", n) for n in RANKS), *FABRIC, *NODES]

# Settings that must not change a bit.
SETTINGS = {
    ("threads", 3): {"UNISONO_ISA": "baseline"},
    ("threads", 5): {"UNISONO_SPINS": "0", "UNISONO_CHUNK_BYTES": "8192"},
    ("processes", 3): {"UNISONO_STREAM_CHUNKS": "1", "UNISONO_STREAM_BYTES": "5000"},
    ("processes", 4): {"UNISONO_ISA": "baseline"},
}


@cache
def reports(lane: str, which: int | str) -> tuple[list[Report | None], ranks.Ended]:
    """Returns every rank's report of the whole matrix. which: the number of ranks, or the node of each."""
    n = which if isinstance(which, int) else len(which)
    env = SETTINGS.get((lane, n), {})
    with tempfile.TemporaryDirectory() as folder:
        backend = {"threads": "unisono-threads", "nodes": f"unisono:{which}"}.get(lane, "unisono")
        argv = [sys.executable, WORKER, backend, str(n), folder, "norm"]
        if lane == "threads":
            ended = ranks.run(argv, env, TIMEOUT_S)
        else:
            more = {"fabric": fabric.over("tcp"), "nodes": {"UNISONO_TRANSPORT": "fabric"}}.get(lane, {})
            ended = ranks.launch(n, argv, {**env, **more}, TIMEOUT_S)
        return _read(folder, n), ended


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("lane", "which"), MODES)
def test_norm_contract(lane: str, which: int | str, group: str) -> None:
    if lane in ("fabric", "nodes") and (reason := fabric.missing("tcp")):
        pytest.skip(reason)
    found, ended = reports(lane, which)
    if complaints := _complaints(found, group):
        pytest.fail("\n".join([*complaints, str(ended)]), pytrace=False)
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(found) if one and one["error"]]
    assert not errors and ended.code == 0, "\n".join([*errors, str(ended)])
    done = {one["done"].get(group, 0) for one in found if one}
    assert len(done) == 1 and done != {0}, f"the ranks made these numbers of calls: {sorted(done)}"
