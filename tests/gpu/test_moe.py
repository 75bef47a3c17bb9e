"""Mixture of experts on GPUs: the engine there gives the bytes of the host's engine (moe.cu)."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks
from gpus import compiled, devices_for

pytestmark = pytest.mark.gpu
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(HERE / "moe.cu", tmp_path_factory.mktemp("moe"))


CASES = (
    "layouts",
    "routes",
    "scaled",
    "payloads",
    "rows",
    "dropped",
    "widths",
    "handles",
    "out",
    "pressure",
    "graphs",
    "steps",
    "two",
)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_host(program: Path, case: str, n: int) -> None:
    run(program, case, n, UNISONO_MOE_LOW_LATENCY="0")


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("case", [*CASES, "few", "late", "index", "overflow", "differs"])
def test_few_tokens_by_the_low_latency_kernels(program: Path, case: str, n: int) -> None:
    run(program, case, n)


@pytest.mark.parametrize("sms", [1, 2])
@pytest.mark.parametrize("case", ["layouts", "scaled", "dropped"])
def test_ranks_of_one_or_two_blocks(program: Path, case: str, sms: int) -> None:
    run(program, case, 3, sms)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_many_tokens_by_copy_engines(program: Path, n: int) -> None:
    run(program, "copies", n)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("case", ["index", "overflow"])
def test_wrong_calls_fail_every_rank(program: Path, case: str, n: int) -> None:
    run(program, case, n, UNISONO_MOE_LOW_LATENCY="0")


@pytest.mark.parametrize("n", [2, 3])
def test_dispatches_that_differ_are_told(program: Path, n: int) -> None:
    run(program, "differs", n, UNISONO_MOE_LOW_LATENCY="0")


def run(program: Path, case: str, n: int, sms: int = 0, **env: str) -> None:
    devices_for(n)
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    limit = [str(sms)] if sms > 0 else []
    ended = ranks.run([str(program), case, str(n), *limit], env=env, timeout_s=120)
    assert ended.code == 0, str(ended)
