"""Tests ranks on GPUs that die, stay away or differ: the others soon report it, and nothing stays behind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

import ranks
from faults import NOTICED_S, assert_lost, assert_nothing_left, error_of
from gpus import devices_for

pytestmark = pytest.mark.gpu
HOST = {"UNISONO_PEER_ACCESS": "0"}
KEPT_BYTES = 64 << 20  # of free memory that may be gone: others use the machine too


@pytest.fixture
def marker() -> Iterator[dict[str, str]]:
    """Marks the processes of a test, and expects their GPU memory back afterwards."""
    import torch

    def free() -> int:
        return sum(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))

    devices_for(1)
    before = free()
    yield ranks.new_marker()
    deadline = time.monotonic() + NOTICED_S
    while before - free() > KEPT_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    assert before - free() <= KEPT_BYTES


def play(n: int, program: str, *args: object, **more: Any) -> ranks.Outcome:
    devices_for(n)
    return ranks.play(n, f"gpu_programs:{program}", *args, timeout_s=120, **more)


@pytest.mark.parametrize(
    ("n", "when", "algorithm", "victim", "way"),
    [
        (2, "before", None, 1, {}),
        (2, "inside", None, 0, {}),
        (3, "inside", "one_shot_packets", 1, {}),
        (3, "inside", "two_shot", 0, {}),
        (3, "before", "two_shot_direct", 1, {}),
        (2, "before", "copy_engine", 0, {}),
        (3, "inside", "two_shot", 1, HOST),
        (2, "before", "two_shot_packets", 0, HOST),
        (2, "inside", "two_shot", 0, {"UNISONO_CUDA_MEMORY": "ipc"}),
    ],
)
def test_kill(
    n: int, when: str, algorithm: str | None, victim: int, way: dict[str, str], marker: dict[str, str]
) -> None:
    outcome = play(n, "killed", when, algorithm, victim, env={**marker, **way})
    assert outcome.ranks[victim] is None
    assert_lost(outcome, victim)
    assert f"rank {victim} was killed by SIGKILL" in outcome.ended.output
    assert_nothing_left(outcome, marker["UNISONO_TEST"])


@pytest.mark.parametrize(
    ("n", "algorithm", "slot", "way"),
    [
        (2, "one_shot_packets", "packet", {}),
        (3, "two_shot_packets", "packet", {}),
        (3, "two_shot", "chunk", {}),
        (3, "two_shot_direct", "meet", {}),
        (2, "two_shot", "chunk", HOST),
        (3, "one_shot_packets", "packet", HOST),
    ],
)
def test_late_rank(n: int, algorithm: str, slot: str, way: dict[str, str], marker: dict[str, str]) -> None:
    outcome = play(n, "late", algorithm, [4.0] * n, env={**marker, **way})
    results = outcome.results()
    texts = set()
    for one in results:
        error = error_of(one["first"])
        assert error["type"] == "TimeoutError", error
        assert one["waited"] < 4 + NOTICED_S
        texts |= {error["text"], *(error_of(again)["text"] for again in one["again"])}
    (text,) = texts
    assert re.match(
        rf"all_reduce \(call \d+ of rank [0-{n - 2}]\) has waited 4 s on the GPU for rank {n - 1} "
        rf"\(slot {slot}, block \d+, epoch expected \d+, seen \d+\)",
        text,
    )
    assert_nothing_left(outcome, marker["UNISONO_TEST"])


@pytest.mark.parametrize("way", [{}, HOST])
def test_a_rank_whose_kernels_are_cut_short_hears_of_it(way: dict[str, str], marker: dict[str, str]) -> None:
    """Rank 0's deadline passes long before rank 1's. Rank 1's kernel ends too, and its call raises rank 0's
    text."""
    results = play(3, "late", None, [4.0, 60.0, 60.0], env={**marker, **way}).results()
    texts = {error_of(one["first"])["text"] for one in results}
    assert len(texts) == 1
    assert "of rank 0) has waited 4 s" in texts.pop()
    assert {error_of(one["first"])["type"] for one in results} == {"TimeoutError"}
    assert max(one["waited"] for one in results) < 4 + NOTICED_S


def test_replay_after_a_failure(marker: dict[str, str]) -> None:
    for one in play(2, "replayed", env=marker).results():
        assert one["sums"] == [8.0]
        text = error_of(one["first"])["text"]
        assert "on the GPU for rank 1" in text
        assert all(error_of(again)["text"] == text for again in one["again"])


@pytest.mark.parametrize("what", ["count", "dtype", "op", "collective", "place", "out", "norm"])
@pytest.mark.parametrize("n", [2, 3])
def test_mismatch(n: int, what: str, marker: dict[str, str]) -> None:
    errors = play(n, "differs", what, env=marker).errors()
    assert {error["type"] for error in errors} == {"MismatchError"}
    assert len({error["text"] for error in errors}) == 1
    assert "rank 0" in errors[0]["text"] and "rank 1" in errors[0]["text"]


def test_other_plans(marker: dict[str, str]) -> None:
    errors = play(2, "differs", "plan", env=marker).errors()
    assert {error["type"] for error in errors} == {"MismatchError"}
    assert all(f" by {name}" in errors[0]["text"] for name in ("direct", "push_ll128"))
