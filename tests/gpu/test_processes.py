"""Tests every collective between processes, by every way to share memory."""

from __future__ import annotations

import pytest

import ranks
from gpus import devices_for

pytestmark = pytest.mark.gpu
WAYS = {"vmm": {}, "ipc": {"UNISONO_CUDA_MEMORY": "ipc"}, "host": {"UNISONO_PEER_ACCESS": "0"}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("n", "dtype"), [(1, "f32"), (2, "bf16"), (2, "f32"), (3, "f16"), (4, "i8"), (8, "f32")]
)
def test_every_collective(n: int, dtype: str, way: str) -> None:
    devices_for(n)
    found = ranks.play(n, "gpu_programs:collectives", dtype, env=WAYS[way], timeout_s=240).results()
    assert [one["wrong"] for one in found] == [[]] * n
    assert {one["peer_access"] for one in found} == {way != "host"}
    assert min(one["made"] for one in found) > 50


@pytest.mark.parametrize("way", WAYS)
def test_threads_of_one_process(way: str) -> None:
    """Threads share memory by every way too. A process reads the variables once: each way needs its own."""
    devices_for(2)
    (made,) = ranks.play(1, "gpu_programs:threads", 2, env=WAYS[way], timeout_s=240).results()
    assert made > 20


def test_one_rank_decides_for_all() -> None:
    devices_for(3)
    found = ranks.play(3, "gpu_programs:one_forbids").results()
    assert found == [{"peer_access": False, "sum": 3000.0}] * 3
