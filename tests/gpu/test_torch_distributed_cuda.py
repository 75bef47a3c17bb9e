"""torch.distributed.init_process_group("unisono") on GPUs: the programs of tests/python there, and more."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks
from gpus import devices_for

pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]


def play(n: int, program: str, folder: Path, **env: str) -> ranks.Outcome:
    _, max_sms = devices_for(n)
    env = {"UNISONO_TEST_TORCH_DEVICE": "cuda", "UNISONO_MAX_SMS": str(max_sms), **env}
    return ranks.play(n, program, str(folder / "store"), env=env, timeout_s=100)


@pytest.mark.parametrize("n", (1, 2, 3))
def test_collectives(n: int, tmp_path: Path) -> None:
    play(n, "torch_call_programs:collectives", tmp_path).results()


@pytest.mark.parametrize("program", ("streams", "captured", "messages", "set_timeout"))
def test_programs(program: str, tmp_path: Path) -> None:
    # Ranks that compare their calls wait for each other on the host.
    play(2, f"torch_gpu_programs:{program}", tmp_path, UNISONO_CHECK="0").results()


@pytest.mark.parametrize("program", ("ddp", "sharded"))
def test_training(program: str, tmp_path: Path) -> None:
    play(2, f"torch_backend_programs:{program}", tmp_path).results()


@pytest.mark.parametrize(("n", "program"), ((3, "split"), (4, "split_by_mesh")))
def test_split_groups(n: int, program: str, tmp_path: Path) -> None:
    play(n, f"torch_backend_programs:{program}", tmp_path).results()


def test_one_rank_beside_nccl(tmp_path: Path) -> None:
    outcome = play(1, "torch_gpu_programs:alone", tmp_path, UNISONO_LOG="1")
    outcome.results()
    assert "all_reduce goes to nccl: Float on cuda, an operation that Unisono lacks." in outcome.ended.output


def test_killed_rank_is_named(tmp_path: Path) -> None:
    outcome = play(3, "torch_backend_programs:killed", tmp_path)
    for rank in (0, 2):
        assert "rank 1" in outcome.ranks[rank]["result"], outcome
    assert outcome.ranks[1] is None
