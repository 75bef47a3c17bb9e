"""The programs of test_nodes.py and test_nodes_hosts.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import unisono
from body import Report, UnisonoSubject, run
from fault_programs import attempt
from worker import _works

F32 = np.float32


def layout(nodes: str) -> None:
    """Puts each rank on the virtual node of its letter."""
    if nodes:
        os.environ["UNISONO_NODE"] = nodes[unisono.launch.from_env(os.environ).rank]


def sample(step: int, first: int = 0) -> dict[str, Any]:
    """Every `step`-th call of the contract's matrix: where the ranks are, and what was wrong."""
    unchecked = unisono.init(timeout_s=60, check=False)
    checked = unisono.init(timeout_s=60, check=True)
    report = Report()
    run(_works(unchecked)[first::step], UnisonoSubject(unchecked, checked), report)
    return {
        "nodes": checked.topology.nodes,
        "engine": checked._engine.name,
        "calls": sum(report.done.values()),
        "words": report.words,
    }


def until_it_fails(flag: str, timeout_s: float, count: int) -> dict[str, Any]:
    """All_reduces until one fails; rank 0 says in the file `flag` that they are under way. Every result is
    right, the failure comes in time, and the next call raises the same."""
    comm = unisono.init(timeout_s=timeout_s, check=False)
    x, right = np.full(count, comm.rank + 1, F32), sum(range(1, comm.size + 1))
    out = np.empty_like(x)
    for call in range(100_000):
        out.fill(0)
        began = time.monotonic()
        tried = attempt(lambda: comm.all_reduce(x, out=out))
        if "error" in tried:
            again = attempt(lambda: comm.all_reduce(x, out=out))
            return {"error": tried["error"], "again": again.get("error"), "waited": tried["at"] - began}
        if not (out == right).all():
            return {"wrong": call}
        if comm.rank == 0 and call == 3:
            Path(flag).write_text("under way")
    return {"wrong": "it has not failed"}
