"""Across nodes on virtual ones: where ranks are, what is refused, ranks that die or differ, and sums."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import quantised
import ranks
import unisono.__main__
from reference import DTYPES, OPS, combine, difference, wild
from unisono.bench.start import find_mpiexec, mpiexec_command
from unisono.errors import UsageError
from unisono.nodes import HierarchicalCommunicator, sums, topology
from unisono.nodes.moves import Moves
from unisono.nodes.space import HostSpace, Quantised
from unisono.nodes.topology import Topology, identity
from unisono.records.vocabulary import COLLECTIVES


def test_a_topology() -> None:
    names = ["boot/1/a", "boot/1/a", "boot/2/a", "boot/2/a"]
    place = Topology.of(2, names)
    assert (place.nodes, place.node, place.local, place.local_rank) == (((0, 1), (2, 3)), 1, (2, 3), 0)
    assert (place.size, place.others, place.counterpart(0), place.crowded) == (4, (0,), 0, False)
    assert place.in_order and place.uniform and str(place) == "rank 2 (node 1)"
    round_robin = Topology.of(0, ["a", "b", "a", "b"])
    assert round_robin.nodes == ((0, 2), (1, 3)) and not round_robin.in_order
    assert round_robin.even and not round_robin.uniform
    uneven = Topology.of(2, ["a", "a", "a", "b"])
    assert uneven.in_order and not uneven.even and not uneven.uniform and uneven.counterpart(1) == 3


def test_a_crowded_machine() -> None:
    """Ranks of one boot against the cores of all of them, however each is bound."""
    names = ["boot/1/a", "boot/2/a", "boot/1/a", "other/1/a"]
    assert not Topology.of(0, names, [0b001, 0b010, 0b100, 0b1]).crowded
    assert Topology.of(0, names, [0b001, 0b010, 0b011, 0b1]).crowded
    assert not Topology.of(3, names, [0b1, 0b1, 0b1, 0b1]).crowded


def test_networks_of_two_machines_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each numbers its namespaces for itself, often alike."""
    here = topology.network()
    assert here == topology.network()
    monkeypatch.setattr(topology, "boot", lambda: "another")
    assert here != topology.network()


def test_the_identity_of_a_node() -> None:
    here = identity({})
    assert here == identity({}) and here != identity({"UNISONO_NODE": "a"})
    assert identity({"UNISONO_NODE": "a"}) != identity({"UNISONO_NODE": "b"})
    with pytest.raises(UsageError, match="too long"):
        identity({"UNISONO_NODE": "x" * 65})


def _spaces() -> list[object]:
    spaces: list[object] = [HostSpace()]
    if importlib.util.find_spec("torch") is not None:
        import torch

        from unisono.nodes.cuda_space import CudaSpace

        spaces.append(pytest.param(CudaSpace(torch.device("cpu")), marks=pytest.mark.torch))
    return spaces


def _in(space: object, array: np.ndarray) -> object:
    """The array's bytes, as that space has them."""
    flat = array.view(np.uint8).reshape(-1)
    return flat if isinstance(space, HostSpace) else __import__("torch").from_numpy(flat.copy())


@pytest.mark.parametrize("space", _spaces(), ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_goes_on_elsewhere(dtype: str, op: str, space: object) -> None:
    """Two sources, then three after what they came to: the bits of five at once."""
    blocks = [wild(dtype, 5003, (seed, 5)) for seed in range(5)]
    given = partial(_in, space)
    sources = [given(block) for block in blocks]
    half = given(np.zeros(5003 * unisono._core.wide_bytes(dtype), np.uint8))
    out = given(np.zeros(blocks[0].nbytes, np.uint8))
    space.combine(half, None, sources[:2], dtype, op, 0)
    space.combine(out, half, sources[2:], dtype, op, 5)
    got = np.asarray(out).view(DTYPES[dtype])
    assert difference(got, combine(blocks, op)) is None


@pytest.mark.parametrize("space", _spaces(), ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", quantised.DTYPES)
@pytest.mark.parametrize("wire", quantised.WIRES)
def test_a_quantised_sum(wire: str, dtype: str, op: str, space: object) -> None:
    """The pieces that travel, wild bits among them, and what they come to."""
    what, count, n = Quantised(wire, dtype, op), 5003, 3
    xs = [wild(dtype, count, (seed, 7)) for seed in range(n)]
    for x in xs[1:]:
        x[:2000] = np.linspace(-3, 5, 2000) ** 5
    given = partial(_in, space)
    coded = [given(np.zeros(unisono._core.wire_bytes(count), np.uint8)) for _ in range(n + 1)]
    for piece, x in zip(coded, xs, strict=False):
        space.encode(piece, given(x), count, what)
    space.combine_encoded(coded[-1], coded[:-1], count, what)
    out = given(np.zeros(xs[0].nbytes, np.uint8))
    space.decode(out, coded[-1], count, what)
    got = np.asarray(out).view(DTYPES[dtype])
    wanted = quantised.all_reduce(xs, op, wire)
    assert np.isfinite(wanted[:2000].astype(np.float32)).sum() > 100
    assert difference(got, wanted) is None


def play_mpi(n: int, program: str, *args: object) -> ranks.Outcome:
    def start(argv: Sequence[str]) -> ranks.Ended:
        return ranks.run([*mpiexec_command(str(find_mpiexec()), n), *argv], None, 120)

    return ranks.play_by(start, n, program, *args)


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", ["ab", "abc", "aabb", "abb"])
def test_sums_of_several_blocks(nodes: str) -> None:
    outcome = play_mpi(len(nodes), "node_sum_programs:long_sums", nodes)
    assert outcome.results() == [[]] * len(nodes)


def test_the_way_of_sums() -> None:
    """By what the busiest node carries, in inputs' sizes."""

    def chosen(nodes: str, collective: str, size: int = 1 << 30, wide: int = 1, root: int = 0) -> str:
        places = [Topology.of(rank, list(nodes)) for rank in range(len(nodes))]
        ways = {
            sums.choose(collective, Moves(place, None, None, HostSpace()), size, wide, root)
            for place in places
        }
        assert len(ways) == 1  # every rank chooses alike
        return ways.pop()

    for nodes, collective, wide, root, way in [
        ("ab", "all_reduce", 1, 0, "one_shot"),
        ("abc", "all_reduce", 1, 0, "two_shot"),
        ("aabb", "all_reduce", 1, 0, "chain"),  # 1.5 against 1
        ("aabb", "all_reduce", 2, 0, "two_shot"),  # 1.5 against 2
        ("aabbcc", "all_reduce", 1, 0, "chain"),  # 2 against 2
        ("aaaabbbb", "all_reduce", 2, 0, "chain"),  # 2.5 against 2
        ("ab", "reduce", 1, 0, "one_shot"),
        ("abc", "reduce", 1, 0, "chain"),  # 1.33 against 1
        ("aabb", "reduce", 1, 0, "chain"),  # 1.5 against 1
        ("aabb", "reduce", 2, 0, "two_shot"),  # 1.5 against 2
        ("aaaabbbb", "reduce", 2, 7, "chain"),  # 2.5 against 2
        ("aabbcc", "reduce", 1, 2, "two_shot"),  # 2 against 2: the root's node is within the chain
        ("aabbcc", "reduce", 1, 5, "chain"),  # 2 against 1
        ("aabb", "reduce_scatter", 1, 0, "two_shot"),  # 1 against 1
        ("aaabbb", "reduce_scatter", 1, 0, "chain"),  # 1.5 against 1
        ("aabbcc", "reduce_scatter", 1, 0, "two_shot"),  # 1.33 against 1.33
        ("aaaabbbbcccc", "reduce_scatter", 2, 0, "chain"),  # 2.67 against 2.33
        ("ababab", "reduce", 1, 0, "two_shot"),
        ("aaaabbb", "reduce_scatter", 1, 0, "two_shot"),
    ]:
        assert chosen(nodes, collective, wide=wide, root=root) == way, (nodes, collective, wide, root)
    for collective in ("all_reduce", "reduce"):
        assert chosen("abc", collective, sums.ONE_SHOT_BYTES // 3) == "one_shot"
        assert chosen("abc", collective, sums.ONE_SHOT_BYTES // 3 + 1) == "two_shot"
    assert chosen("aaaabbbb", "reduce", sums.CHAIN_BYTES - 1) == "two_shot"
    assert chosen("aabb", "reduce", sums.CHAIN_BYTES) == "two_shot"  # 4 blocks take as long as 6


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", ["ab", "abc", "aabb", "aabbcc", "aaabbb"])
def test_sums_along_the_chain(nodes: str) -> None:
    assert play_mpi(len(nodes), "node_sum_programs:chained_sums", nodes).results() == [[]] * len(nodes)


@pytest.mark.torch
def test_sums_along_the_chain_over_gloo() -> None:
    assert ranks.play(6, "node_sum_programs:chained_sums", "aabbcc").results() == [[]] * 6


def broadcasts_are_right(outcome: ranks.Outcome, nodes: str) -> None:
    even = nodes != "ab" and len({nodes.count(node) for node in nodes}) == 1
    chained = 4 * 2 * len(nodes) if even else 0  # the four long enough, in and out of place
    assert outcome.results() == [{"wrong": [], "chained": chained}] * len(nodes)


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", ["ab", "abc", "abcd", "aabb", "abab", "abb", "aabbcc", "abcbca", "aabc"])
def test_broadcasts_of_several_blocks(nodes: str) -> None:
    broadcasts_are_right(play_mpi(len(nodes), "node_sum_programs:long_broadcasts", nodes), nodes)


@pytest.mark.torch
def test_broadcasts_of_several_blocks_over_gloo() -> None:
    broadcasts_are_right(ranks.play(6, "node_sum_programs:long_broadcasts", "aabbcc"), "aabbcc")


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", ["ab", "abc", "aabb", "abab", "abb"])
def test_quantised_sums(nodes: str) -> None:
    outcome = play_mpi(len(nodes), "node_sum_programs:quantised_sums", nodes)
    assert outcome.results() == [[]] * len(nodes)


@pytest.mark.mpi
def test_a_node_that_is_late_over_mpi(tmp_path: Path) -> None:
    """It is named, and no other."""
    *waited, _ = play_mpi(3, "node_programs:one_is_late", str(tmp_path / "flag"), "abc").results()
    for rank, said in enumerate(waited):
        assert said["error"]["type"] == "TimeoutError", said
        assert f"rank {rank} (node {rank}) has waited 2 s for rank 2 (node 2) over" in said["error"]["text"]


@pytest.mark.mpi
def test_lengths_that_differ_over_mpi(tmp_path: Path) -> None:
    outcome = play_mpi(3, "node_programs:other_lengths", str(tmp_path / "flag"), "abc")
    for rank, said in enumerate(outcome.results()):
        assert said["error"]["type"] == "UnisonoError", said
        text = said["error"]["text"]
        assert f"where rank {rank} (node {rank}) expects {40 * (1 + rank)} bytes: make the same" in text


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", ["ab", "abc", "aabb", "abab", "abb"])
def test_calls_that_are_made_again(nodes: str) -> None:
    """The core plays them; what is wrong is said as before."""
    for told in play_mpi(len(nodes), "node_replay_programs:repeated", nodes).results():
        assert told["wrong"] == [] and told["late"] == []
        said = told["said"]
        assert "out has shape (8,)" in said["shape"] and "out has dtype f64" in said["dtype"]
        assert "no op 'median'" in said["op"] and "no algorithm 'ring'" in said["algorithm"]
        differ = "rank 0 called all_reduce(sum) of 7 f32, but rank 1 called all_reduce(max) of 7 f32: make"
        assert said["checked"] == said["failed"] == f"{differ} the same call on every rank."
        assert "is closed" in said["closed"]


def test_it_has_what_a_communicator_has() -> None:
    inner = {"rank", "size", "fail"}  # attributes; and what only the own node is asked for
    public = {name for name in dir(unisono.Communicator) if not name.startswith("_")}
    assert {name for name in public if not hasattr(HierarchicalCommunicator, name)} == inner


@pytest.mark.torch
def test_a_bench(tmp_path: Path) -> None:
    """Every collective on nodes, without a failure."""
    words = "--sizes 64,64K --backend unisono --mode latency -n 2 --no-report --workload none --out"
    bench = [sys.executable, unisono.__main__.__file__, "bench", *words.split(), str(tmp_path)]
    ended = ranks.launch(4, bench, None, 120, nodes=2)
    assert ended.code == 0, str(ended)
    told = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert told[0]["nodes"] == [0, 0, 1, 1]
    assert {one["type"] for one in told} == {"run", "result", "end"}, str(ended)
    assert {one["case"]["collective"] for one in told if one["type"] == "result"} == set(COLLECTIVES)


@pytest.mark.torch
def test_what_is_refused() -> None:
    for said in ranks.play(3, "node_programs:refusals", nodes=2).results():
        assert said == {}


@pytest.mark.torch
def test_calls_that_differ() -> None:
    """The same error on every rank, also of the other node; the communicator stays failed."""
    outcome = ranks.play(4, "node_programs:differ", nodes=2)
    texts = {error["text"] for error in outcome.errors()}
    assert texts == {
        "rank 0 called all_reduce(sum) of 8 f32, but rank 3 called all_reduce(max) of 8 f32: make the same "
        "call on every rank."
    }


@pytest.mark.torch
@pytest.mark.parametrize("count", [8, 3_000_000])
def test_a_rank_that_dies(count: int) -> None:
    """Its node hears of the process, the other node of its peer, long before the deadline."""
    outcome = ranks.play(4, "node_programs:dies", 3, count, nodes=2, timeout_s=60)
    for rank, said in enumerate(outcome.ranks[:3]):
        assert said is not None and "error" in said, (rank, said, str(outcome.ended))
        assert said["error"]["type"] == "PeerLostError", said
        assert "rank" in said["error"]["text"]


@pytest.mark.mpi
def test_an_engine_that_is_not_there() -> None:
    code = "import os; os.environ['UNISONO_NODE'] = os.environ['PMI_RANK']; import unisono; unisono.init()"
    argv = [*mpiexec_command(str(find_mpiexec()), 2), sys.executable, "-c", code]
    ended = ranks.run(argv, {"UNISONO_ENGINE": "pigeon"})
    assert (
        ended.code != 0
        and "UNISONO_ENGINE=pigeon is no engine between nodes: use mpi, gloo or fabric" in ended.output
    )
