"""Tensors on symmetric memory of a torch process group, which FSDP2 takes for its buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def play(n: int, program: str, folder: Path, **options: Any) -> list[Any]:
    where = f"torch_memory_programs:{program}"
    return ranks.play(n, where, str(folder / "store"), timeout_s=100, **options).results()


@pytest.mark.parametrize(
    ("n", "programs"),
    [
        (1, ["collectives", "blocks"]),
        (2, ["collectives", "fsdp", "compiled"]),
        (3, ["collectives", "blocks", "fsdp"]),
    ],
    ids=["1", "2", "3"],
)
def test_programs(n: int, programs: list[str], tmp_path: Path) -> None:
    names = [f"torch_memory_programs:{one}" for one in programs]
    ranks.play(n, "torch_ranks:several", str(tmp_path / "store"), *names, timeout_s=200).results()


def test_collectives_where_ranks_reach_no_other_memory(tmp_path: Path) -> None:
    play(3, "collectives", tmp_path, env={"UNISONO_FAR": "0"})


def test_what_is_refused(tmp_path: Path) -> None:
    for differ, much in play(2, "refused", tmp_path):
        assert differ.startswith("unisono: rank 0 allocates 4000 bytes, but rank 1 4004: ")
        assert "no room for 134217728 MiB" in much


def test_several_machines(tmp_path: Path) -> None:
    play(2, "several_machines", tmp_path, nodes=2)
