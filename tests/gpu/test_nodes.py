"""Virtual nodes of two GPUs each: within a node by the CUDA lane, between nodes by NCCL; on 4 GPUs."""

from __future__ import annotations

import pytest

import ranks
import unisono

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        unisono.device_count() < 4, reason=f"needs 4 GPUs: this machine has {unisono.device_count()}"
    ),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_collectives_of_two_nodes(dtype: str) -> None:
    """Every collective on GPU arrays gives the bits of the same call on host arrays, which have the
    contract's tests."""
    outcome = ranks.play(4, "node_programs:gpu_and_host", dtype, nodes=2, timeout_s=200)
    for said in outcome.results():
        assert said == {"nodes": [[0, 1], [2, 3]], "wrong": []}
