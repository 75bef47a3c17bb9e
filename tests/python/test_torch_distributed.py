"""torch.distributed.init_process_group("unisono"), beside gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROGRAMS = Path(__file__).parents[1] / "support" / "torch_backend_programs.py"


def play(n: int, program: str, folder: Path, **options: Any) -> ranks.Outcome:
    return ranks.play(n, f"torch_backend_programs:{program}", str(folder / "store"), timeout_s=100, **options)


@pytest.mark.parametrize("n", (1, 2, 3, 4))
def test_collectives(n: int, tmp_path: Path) -> None:
    play(n, "collectives", tmp_path).results()


def test_groups(tmp_path: Path) -> None:
    play(3, "groups", tmp_path).results()


def test_ddp(tmp_path: Path) -> None:
    play(3, "ddp", tmp_path).results()


def test_sharded(tmp_path: Path) -> None:
    play(2, "sharded", tmp_path).results()


def test_killed_rank_is_named(tmp_path: Path) -> None:
    outcome = play(3, "killed", tmp_path)
    for rank in (0, 2):
        assert "rank 1" in outcome.ranks[rank]["result"], outcome
    assert outcome.ranks[1] is None


def test_forked_and_left_open(tmp_path: Path) -> None:
    outcome = play(2, "left_open", tmp_path)
    outcome.results()
    assert outcome.ended.code == 0, outcome.ended


def test_wrong_calls(tmp_path: Path) -> None:
    for said in play(2, "misuse", tmp_path).results():
        assert said == [
            "unisono: all_gather: a tensor has 7 elements and must have 6.",
            "unisono: reduce_scatter: a tensor has 7 elements and must have 6.",
            "Number of tensor splits not equal to group size",
        ]


def test_torchrun() -> None:
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PROGRAMS),
    ]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.count("sum of unisono 2") == 2, ended


def test_says_what_carries_a_group(tmp_path: Path) -> None:
    said = play(2, "coalesced_alone", tmp_path, env={"UNISONO_LOG": "1"}).ended.output
    assert said.count("of 2 ranks: shared memory carries it.") == 1
    assert said.count("all_reduce goes to gloo: sparse Float on cpu.") == 1


def test_several_machines(tmp_path: Path) -> None:
    """Gloo carries all of a group whose ranks do not share memory."""
    outcome = play(2, "ddp", tmp_path, env={"UNISONO_LOG": "1"}, nodes=2)
    outcome.results()
    assert "gloo carries it, since its ranks are on several machines." in outcome.ended.output


def test_without_a_compiler(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}
    for error in play(2, "misuse", tmp_path, env=env).errors():
        assert error["type"] == "ResourceError"
        assert error["text"].endswith("there is no C++ compiler: install g++, or name one in CXX.")


def test_broken_entry_point_leaves_torch_alone(tmp_path: Path) -> None:
    """`import torch` runs the entry point, also where `import unisono` fails or torch refuses the name."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['unisono'] = None\n")
    code = (
        "import torch, torch.distributed as dist, unisono_torch\n"
        "assert 'UNISONO' in dist.Backend._plugins\n"
        "del dist.Backend._plugins\n"
        "unisono_torch.register()\n"
        "print(torch.ones(2).sum().item())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert ended.stdout.strip() == "2.0", ended
