"""Communicators across virtual nodes: sums, plans, refusals, and ranks that are late, die or differ."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import fabric
import ranks
from unisono.bench.mpis import find_mpiexec, mpiexec_command
from unisono.records.vocabulary import COLLECTIVES


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", ["ab", "abc", "aabb", "abb"])
def test_sums_of_several_blocks(nodes: str) -> None:
    outcome = ranks.play_mpi(len(nodes), "node_sum_programs:long_sums", nodes)
    assert outcome.results() == [[]] * len(nodes)


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", ["ab", "abc", "aabb", "abab", "abb"])
def test_quantised_sums(nodes: str) -> None:
    outcome = ranks.play_mpi(len(nodes), "node_sum_programs:quantised_sums", nodes)
    assert outcome.results() == [[]] * len(nodes)


@pytest.mark.mpi
def test_a_node_that_is_late_over_mpi(tmp_path: Path) -> None:
    """One of the ranks that have waited names the late node, and no other."""
    *waited, _ = ranks.play_mpi(3, "node_programs:one_is_late", str(tmp_path / "flag"), "abc").results()
    for answer in waited:
        assert answer["error"]["type"] == "TimeoutError", answer
        pattern = r"rank (0 \(node 0|1 \(node 1)\) has waited 2 s for rank 2 \(node 2\) over MPI: see"
        assert re.match(pattern, answer["error"]["text"]), answer


@pytest.mark.mpi
def test_lengths_that_differ_over_mpi(tmp_path: Path) -> None:
    """Each rank names two ranks that differ: itself and another, or the first two that it was told of."""
    outcome = ranks.play_mpi(3, "node_programs:other_lengths", str(tmp_path / "flag"), "abc")
    expected = [
        f"where rank {rank} (node {rank}) expects {40 * (1 + rank)} bytes: make the same" for rank in range(3)
    ]
    for answer in outcome.results():
        assert answer["error"]["type"] == "MismatchError", answer
        assert any(one in answer["error"]["text"] for one in expected), answer


@pytest.mark.torch
def test_a_bench(tmp_path: Path) -> None:
    """Every collective runs on nodes without a failure."""
    words = "--sizes 64,64K --backend unisono --mode latency -n 2 --no-report --workload none --out"
    bench = [sys.executable, "-m", "unisono", "bench", *words.split(), str(tmp_path)]
    ended = ranks.launch(4, bench, None, 120, nodes=2)
    assert ended.code == 0, str(ended)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert lines[0]["nodes"] == [0, 0, 1, 1]
    assert {one["type"] for one in lines} == {"run", "result", "end"}, str(ended)
    assert {one["case"]["collective"] for one in lines if one["type"] == "result"} == set(COLLECTIVES)


def test_what_is_refused() -> None:
    for answer in ranks.play(3, "node_programs:refusals", nodes=2, env=fabric.between_nodes()).results():
        assert answer == {}


def test_calls_that_differ() -> None:
    """Every rank of both nodes gets the same error, and the communicator stays failed."""
    outcome = ranks.play(4, "node_programs:differ", nodes=2, env=fabric.between_nodes())
    texts = {error["text"] for error in outcome.errors()}
    assert texts == {
        "rank 0 called all_reduce(sum) of 8 f32 by one_shot, but rank 3 called all_reduce(max) of 8 f32 by "
        "one_shot: make the same call, by the same plan, on every rank."
    }


@pytest.mark.torch
def test_a_rank_that_dies() -> None:
    """The rank's node notices its process, the other node its peer, long before the deadline."""
    outcome = ranks.play(4, "node_programs:dies", 3, 3_000_000, nodes=2, timeout_s=60)
    for rank, answer in enumerate(outcome.ranks[:3]):
        assert answer is not None and "error" in answer, (rank, answer, str(outcome.ended))
        assert answer["error"]["type"] == "PeerLostError", answer
        assert "rank" in answer["error"]["text"]


@pytest.mark.mpi
def test_a_transport_that_is_not_there() -> None:
    code = "import os; os.environ['UNISONO_NODE'] = os.environ['PMI_RANK']; import unisono; unisono.init()"
    argv = [*mpiexec_command(str(find_mpiexec()), 2), sys.executable, "-c", code]
    ended = ranks.run(argv, {"UNISONO_TRANSPORT": "pigeon"})
    assert (
        ended.code != 0
        and "UNISONO_TRANSPORT=pigeon is no transport: use mpi, gloo or fabric" in ended.output
    )


@pytest.mark.mpi
@pytest.mark.slow
def test_a_plan_of_nodes(tmp_path: Path) -> None:
    """`unisono tune --nodes` writes rows for communicators on the same number of nodes."""
    table = tmp_path / "plan.json"
    where = "import os, sys; os.environ['UNISONO_NODE'] = os.environ['PMI_RANK']; "
    words = f"tune --nodes --collective reduce_scatter --budget 5 -O {table}".split()
    tune = where + f"sys.argv = ['unisono', *{words!r}]; from unisono.cli import main; main()"
    ended = ranks.run([*mpiexec_command(str(find_mpiexec()), 3), sys.executable, "-c", tune], None, 120)
    written = json.loads(table.read_text())
    assert (written["device"], written["nodes"], written["ranks"]) == ("nodes", 3, 3), str(ended)
    assert {row["algorithm"] for row in written["entries"]} <= {"two_shot", "chain"}
    written["entries"] = [
        {"collective": "all_reduce", "memory": "plain", "up_to_bytes": limit, "algorithm": name}
        for limit, name in ((64, "chain"), (None, "one_shot"))
    ]
    table.write_text(json.dumps(written))
    plan = "import unisono; comm = unisono.init(); print([comm.plan('all_reduce', n) for n in (64, 1 << 26)])"
    argv = [*mpiexec_command(str(find_mpiexec()), 3), sys.executable, "-c", where + plan]
    ended = ranks.run(argv, {"UNISONO_PLAN": str(table)}, 60)
    assert ended.code == 0 and ended.output.count("['chain', 'one_shot']") == 3, str(ended)
