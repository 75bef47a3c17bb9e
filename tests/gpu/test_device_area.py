"""Device areas: kernels of the user's own, compiled by nvcc against the installed package as a user would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ranks
from gpus import compiled, devices_for

pytestmark = pytest.mark.gpu
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(HERE / "device_area.cu", tmp_path_factory.mktemp("area"))


@pytest.mark.parametrize(
    ("case", "n"),
    [
        ("puts", 1),
        ("puts", 2),
        ("puts", 3),
        ("signals", 2),
        ("signals", 4),
        ("barriers", 1),
        ("barriers", 2),
        ("barriers", 5),
        ("late", 2),
        ("late", 3),
        ("beside", 2),
        ("beside", 3),
        ("differs", 2),
        ("differs", 3),
        ("refused", 2),
    ],
)
def test_area(cases: Path, case: str, n: int) -> None:
    devices_for(n)
    ended = ranks.run([str(cases), case, str(n)], timeout_s=60)
    assert ended.code == 0, str(ended)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = HERE.parents[1] / "examples" / "08_device_handle.cu"
    return compiled(source, tmp_path_factory.mktemp("example"))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_example(example: Path, n: int) -> None:
    devices_for(n)
    shared = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} if os.environ.get("UNISONO_SHARE_DEVICE") == "1" else {}
    ended = ranks.run([str(example), str(n)], env=shared, timeout_s=90)
    assert ended.code == 0, str(ended)
    assert f"{n} of {n} ranks" in ended.output
