"""Tests virtual nodes with GPUs: the CUDA lane within a node, NCCL between nodes."""

from __future__ import annotations

import pytest

import ranks
from gpus import devices_for

pytestmark = pytest.mark.gpu


# elements; the longest fill several blocks
LONG = (1, 1000, 300_001, 5_000_000)
SHORT = (0, 1, 33, 100_003)


@pytest.mark.parametrize(
    ("nodes", "dtype", "counts"),
    [
        ("aabb", "float32", LONG),
        ("aabb", "bfloat16", LONG),
        ("aabb", "int32", LONG),
        ("ab", "float32", LONG),
        ("abc", "bfloat16", LONG),
        ("abab", "float16", SHORT),
        ("abb", "float64", SHORT),
        ("aabbcc", "float8_e4m3fn", SHORT),
        ("aabb", "float8_e5m2", SHORT),
        ("aab", "uint8", SHORT),
        ("abc", "int8", SHORT),
        ("aabb", "int64", SHORT),
    ],
)
def test_collectives(nodes: str, dtype: str, counts: tuple[int, ...]) -> None:
    """Every collective on GPU arrays gives the bits of the same call on host arrays, which the contract tests
    cover. nodes: a letter for each rank."""
    n = len(nodes)
    devices_for(n)
    outcome = ranks.play(n, "gpu_node_programs:like_the_host", nodes, dtype, counts, timeout_s=200)
    assert outcome.results() == [[]] * n


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("nodes", ["aabb", "abc"])
def test_graphs(nodes: str, by_torch: bool) -> None:
    n = len(nodes)
    devices_for(n)
    outcome = ranks.play(n, "gpu_node_programs:graphs", nodes, by_torch, 50_001, 3, timeout_s=200)
    assert outcome.results() == [[]] * n


def test_sums_on_several_streams() -> None:
    devices_for(4)
    assert ranks.play(4, "gpu_node_programs:streams", 60, nodes=2, timeout_s=200).results() == [0, 0, 0, 0]


def test_a_rank_that_stays_away() -> None:
    """Ranks that wait for their stream by CUDA alone come back too."""
    devices_for(4)
    *others, _ = ranks.play(4, "gpu_node_programs:one_is_late", 4.0, nodes=2, timeout_s=200).results()
    for result in others:
        assert result["waited"] < 12
        assert result["next"]["error"]["type"] in ("TimeoutError", "PeerLostError"), result


def test_close_waits_for_calls_under_way() -> None:
    devices_for(4)
    outcome = ranks.play(4, "gpu_node_programs:closes_at_once", nodes=2, timeout_s=200)
    assert outcome.results() == [True] * 4
