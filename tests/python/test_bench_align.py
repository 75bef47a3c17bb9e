"""The common start: nobody leaves before all have come, and a rank that is far ahead sleeps."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from bench_threads import meetings
from unisono.bench import align
from unisono.bench.align import Aligner
from unisono.bench.control import Control


def on_threads(ranks: int, late_s: float, rounds: int = 3) -> list[list[tuple[float, float, float]]]:
    """(arrived, left, CPU seconds spent in between) for every rank and round; the last rank is late."""
    met, door = meetings(ranks), Barrier(ranks)

    def rank(number: int) -> list[tuple[float, float, float]]:
        aligner = Aligner(Control(met[number]), lambda: door.wait(30))
        seen = []
        for _ in range(rounds):
            if number == ranks - 1:
                time.sleep(late_s)
            cpu, arrived = time.thread_time(), time.monotonic()
            aligner()
            seen.append((arrived, time.monotonic(), time.thread_time() - cpu))
        return seen

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nobody_leaves_before_all_have_come(ranks: int) -> None:
    for number in zip(*on_threads(ranks, late_s=0.01), strict=True):
        assert min(left for _, left, _ in number) >= max(arrived for arrived, _, _ in number)


def test_a_rank_that_waits_leaves_its_core_to_others() -> None:
    for arrived, left, cpu in on_threads(2, late_s=0.3)[0]:
        assert left - arrived >= 0.25
        assert cpu < (left - arrived) / 2


def test_no_name_stays_in_shared_memory() -> None:
    on_threads(2, late_s=0.0)
    assert not list(Path("/dev/shm").glob("unisono-align-*"))


def test_without_a_common_directory_the_barrier_alone_aligns(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("another machine")

    monkeypatch.setattr(align.mmap, "mmap", refuse)
    for number in zip(*on_threads(2, late_s=0.01), strict=True):
        assert min(left for _, left, _ in number) >= max(arrived for arrived, _, _ in number)
