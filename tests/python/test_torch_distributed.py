"""torch.distributed.init_process_group("unisono"), beside gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ranks
import unisono

torch = pytest.importorskip("torch")
from unisono.torch.distributed.meeting import meet  # noqa: E402 - after the skip

pytestmark = pytest.mark.torch

# Parts of the names of torch's own tests that `make test` runs.
OWN = ("all_reduce_sum", "DistributedDataParallel", "gather", "scatter", "any_source")

PROGRAMS = Path(__file__).parents[1] / "support" / "torch_backend_programs.py"


def play(n: int, program: str, folder: Path, **options: Any) -> ranks.Outcome:
    """Runs a program of torch_backend_programs, or that of another file with its name."""
    where = program if ":" in program else f"torch_backend_programs:{program}"
    return ranks.play(n, where, str(folder / "store"), timeout_s=100, **options)


def python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own."""
    argv = [sys.executable, "-c", code]
    whole = {**os.environ, **env}
    return subprocess.run(argv, capture_output=True, text=True, env=whole, timeout=60, check=False)


@pytest.mark.parametrize(
    ("n", "programs"),
    [
        (1, []),
        (2, ["torch_backend_programs:sharded", "torch_training:quick"]),
        (
            3,
            [
                "torch_backend_programs:groups",
                "torch_backend_programs:ddp",
                "torch_work_programs:without_work",
            ],
        ),
    ],
    ids=["1", "2", "3"],
)
def test_calls_and_training(n: int, programs: list[str], tmp_path: Path) -> None:
    all_of_them = ["torch_call_programs:collectives", *programs]
    ranks.play(n, "torch_ranks:several", str(tmp_path / "store"), *all_of_them, timeout_s=200).results()


def test_split_groups(tmp_path: Path) -> None:
    outcome = play(3, "split", tmp_path, env={"UNISONO_LOG": "1"})
    outcome.results()
    made = sorted(re.findall(r"group (.*) of (\d) ranks: shared memory carries it", outcome.ended.output))
    halves = [(f"half {i}", size) for i in range(2) for size in "12"]
    assert made == [("0", "3"), ("ends", "2"), *halves, ("last", "1"), ("last", "1")]


@pytest.mark.parametrize("debug", ("OFF", "DETAIL"))
def test_split_groups_of_a_mesh(debug: str, tmp_path: Path) -> None:
    play(4, "split_by_mesh", tmp_path, env={"TORCH_DISTRIBUTED_DEBUG": debug}).results()


def test_split_groups_of_several_machines(tmp_path: Path) -> None:
    """Groups whose ranks share a machine have its memory, and gloo carries the others."""
    outcome = play(4, "split_by_mesh", tmp_path, env={"UNISONO_LOG": "1"}, nodes=2)
    outcome.results()
    said = outcome.ended.output
    assert "of 2 ranks: shared memory carries it." in said
    assert "of 2 ranks: gloo carries it, since its ranks are on several machines." in said


def test_losses_do_not_depend_on_the_way(tmp_path: Path) -> None:
    """Sums go by shared memory alone, in small chunks or as they come: all give the same bits."""
    losses = []
    for way in ({}, {"UNISONO_FAR": "0", "UNISONO_STREAM_CHUNKS": "0"}, {"UNISONO_CHUNK_BYTES": "4096"}):
        folder = tmp_path / str(len(losses))
        folder.mkdir()
        losses.append(play(3, "ddp", folder, env=way).results())
    assert losses[0] == losses[1] == losses[2]


def test_torchs_own_checks_name_calls_that_differ(tmp_path: Path) -> None:
    said = play(3, "torch_work_programs:detail", tmp_path, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for of_rank in said.results():
        assert all(text.startswith("Detected mismatch between collectives on ranks.") for text in of_rank)
        assert ["Tensor shapes" in text for text in of_rank] == [True, True, False], of_rank
        assert "Op type" in of_rank[2]


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch before 2.14 has no such hooks")
def test_hooks_around_calls(tmp_path: Path) -> None:
    play(2, "torch_work_programs:hooked", tmp_path).results()


def test_torchs_own_suite() -> None:
    """Part of it; `make torch-suite` runs the whole."""
    pytest.importorskip("expecttest")
    suite = [sys.executable, str(PROGRAMS.with_name("torch_suite.py"))]
    ended = ranks.run([*suite, *(f"-k={part}" for part in OWN)], {"OMP_NUM_THREADS": "1"}, timeout_s=200)
    assert ended.code == 0 and "\nOK (skipped=" in ended.output, ended


def test_timeout_of_a_group_can_be_set(tmp_path: Path) -> None:
    said, nothing = play(2, "late", tmp_path).results()
    assert "has waited 2 s for rank 1" in said and nothing == ""


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


def test_torchrun_starts_again() -> None:
    """The ranks meet in a store that has keys of those before them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    argv = [*torchrun, "--nproc-per-node", "4", str(PROGRAMS)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert "rank 1 (process" in ended.stderr and "has died" in ended.stderr
    assert ended.stdout.count("sum of unisono 4") == 4, ended


def test_ranks_meet_again_and_name_those_who_do_not_come() -> None:
    store, limit = torch.distributed.HashStore(), timedelta(seconds=60)
    names = set()
    for size in (1, 3, 3, 5, 2):
        with ThreadPoolExecutor(size) as pool:
            (name,) = set(pool.map(lambda rank, size=size: meet(store, rank, size, limit), range(size)))
        names.add(name)
    assert len(names) == 5
    for rank, late in ((0, "rank 0 has not met rank 1, 2"), (1, "rank 1 has not met rank 0")):
        with pytest.raises(unisono.TimeoutError, match=f"{late} within 0.1 s"):
            meet(store, rank, 3, timedelta(seconds=0.1))


def test_says_what_carries_a_group(tmp_path: Path) -> None:
    said = play(2, "torch_call_programs:coalesced_alone", tmp_path, env={"UNISONO_LOG": "1"}).ended.output
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


def test_a_torch_newer_than_any_known(tmp_path: Path) -> None:
    """The adapter is built for it, and where that fails the error names it. Gloo's name can be taken."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'Backend.hpp: error: no such member'\nexit 1\n")
    compiler.chmod(0o755)
    code = (
        "import torch; torch.__version__ = torch.torch_version.TorchVersion('99.1.0')\n"
        "import unisono_torch; unisono_torch.register()\n"
        "print('GLOO' in torch.distributed.Backend._plugins)\n"
        "from unisono.torch.distributed import build\n"
        "print(build.key().split('-')[0])\n"
        "build.load()\n"
    )
    env = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path), "UNISONO_TORCH_REPLACE": "gloo"}
    ended = python(code, {**env, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert ended.stdout.split() == ["True", "99.1.0"], ended
    assert "(Backend.hpp: error: no such member)" in ended.stderr
    assert ended.stderr.strip().endswith("or report it for torch 99.1.0.")


@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="torch up to 2.13 has no way to replace gloo")
def test_gloos_name_is_refused_where_torch_does_not_look_it_up() -> None:
    code = "import torch.distributed as dist; print(list(dist.Backend._plugins))"
    ended = python(code, {"UNISONO_TORCH_REPLACE": "gloo"})
    assert ended.stdout.strip() == "['UNISONO']", ended
    assert "needs torch 2.14 or newer, and this is 2." in ended.stderr


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
    ended = python(code, {"PYTHONPATH": str(tmp_path)})
    assert ended.stdout.strip() == "2.0", ended
