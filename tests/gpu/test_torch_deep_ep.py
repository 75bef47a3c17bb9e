"""The names of DeepEP and FlashInfer on GPUs: the programs of tests/python, with tensors there."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks
from gpus import devices_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "program",
    [
        "torch_group_programs:deep_ep_expanded",
        "torch_rows_programs:deep_ep_quantised",
        "torch_rows_programs:flashinfer_quantised",
        "deep_ep_v1_programs:normal",
        "deep_ep_low_latency_programs:low_latency",
    ],
)
def test_programs(n: int, program: str, tmp_path: Path) -> None:
    _, max_sms = devices_for(n)
    env = {"UNISONO_TEST_TORCH_DEVICE": "cuda", "UNISONO_MAX_SMS": str(max_sms)}
    outcome = ranks.play(n, program, str(tmp_path / "store"), env=env, timeout_s=100)
    assert outcome.results() == [None] * n
