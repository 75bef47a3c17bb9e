"""A long stream of mixed collectives of random sizes, every result checked.

UNISONO_SOAK is the number of calls: 1000000 is the full soak; the default keeps `make test` short.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import ranks
import threads
from repeating import Repeating
from soak import Soak

CALLS = int(os.environ.get("UNISONO_SOAK", "30000"))
TIMEOUT_S = 120 + CALLS / 300


def assert_right(results: list[dict[str, Any]], calls: int) -> None:
    for rank, answer in enumerate(results):
        assert answer["wrong"] == [], f"rank {rank}"
        assert answer["made"] == results[0]["made"]
        assert sum(answer["made"].values()) == calls


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_two_processes() -> None:
    outcome = ranks.play(2, "basic_programs:soak", CALLS, 1, timeout_s=TIMEOUT_S)
    assert_right(outcome.results(), CALLS)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_four_threads() -> None:
    calls = CALLS // 4
    assert_right(threads.with_threads(4, lambda c: Soak(c, 2).run(calls), timeout_s=60, check=False), calls)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_five_processes_that_stage() -> None:
    """More ranks than cores, without copies between processes, in small chunks."""
    calls = CALLS // 8
    env = {"UNISONO_FAR": "0", "UNISONO_CHUNK_BYTES": "4096"}
    outcome = ranks.play(5, "basic_programs:soak", calls, 3, env=env, timeout_s=TIMEOUT_S)
    assert_right(outcome.results(), calls)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("size", "share", "env"), [(2, 2, {}), (2, 4, {"UNISONO_FAR": "0"}), (5, 16, {})])
def test_processes_that_repeat_their_calls(size: int, share: int, env: dict[str, str]) -> None:
    calls = CALLS // share
    outcome = ranks.play(size, "basic_programs:repeating", calls, size, env=env, timeout_s=TIMEOUT_S)
    assert_right(outcome.results(), calls)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_threads_that_repeat_their_calls() -> None:
    calls = CALLS // 16
    assert_right(threads.with_threads(3, lambda c: Repeating(c, 4).run(calls), timeout_s=60), calls)
