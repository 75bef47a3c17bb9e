"""The common start: no rank leaves before all have come, and a rank that is far ahead sleeps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from bench_threads import meetings
from unisono.bench import align
from unisono.bench.align import Aligner
from unisono.bench.control import Control


def on_threads(ranks: int, late_s: float, rounds: int = 3) -> list[list[tuple[float, float, float]]]:
    """Returns (arrived, left, CPU seconds in between) for every rank and round.

    The last rank comes `late_s` later than the first."""
    met, door, first = meetings(ranks), Barrier(ranks), [Event() for _ in range(rounds)]

    def rank(number: int) -> list[tuple[float, float, float]]:
        aligner = Aligner(Control(met[number]), lambda: door.wait(30))
        seen = []
        for arrival in first:
            if number == ranks - 1 > 0:
                arrival.wait(30)
                time.sleep(late_s)
            cpu, arrived = time.thread_time(), time.monotonic()
            if number == 0:
                arrival.set()
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
        assert left - arrived >= 0.3
        assert cpu < (left - arrived) / 2


class Flags(list[int]):
    """Flags that count how often they are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("cores", "looks"), [({0, 1}, align.LOOKS), ({1}, 0)])
def test_ranks_that_share_a_core_sleep_without_a_look(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], looks: int
) -> None:
    slept: list[int] = []
    met, flags = meetings(2), [Flags([0] * 2 * align._LINE) for _ in range(2)]
    words = iter(flags)

    def start(number: int) -> None:
        Aligner(Control(met[number]), lambda: None)()

    def sleep(seconds: float) -> None:
        slept.append(max(seen.reads for seen in flags))
        for seen in flags:
            seen[:] = [1] * len(seen)  # the other rank has come

    monkeypatch.setattr(align.os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(align, "shared_words", lambda *_: next(words))
    monkeypatch.setattr(align, "sleep", sleep)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, range(2)))
    assert slept[0] == looks + 1


@pytest.mark.parametrize(("cores", "looks"), [({0, 1}, align.LOOKS), ({1}, 0)])
def test_a_pair_of_many_ranks_looks_if_it_has_two_cores(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], looks: int
) -> None:
    met, found = meetings(3), []

    def gathering(flags: object, mine: int, others: list[int], looks: int) -> Callable[[], None]:
        found.append((len(others), looks))
        return lambda: None

    monkeypatch.setattr(align.os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(align, "_Gathering", gathering)

    def make(number: int) -> None:
        aligner = Aligner(Control(met[number]), lambda: None, lambda peer: lambda: None)
        aligner.with_peer((number + 1) % 3)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(make, range(3)))
    assert sorted(found) == sorted([(2, 0), (1, looks)] * 3)


def test_no_name_stays_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    mkstemp = tempfile.mkstemp

    def noted(**how: str) -> tuple[int, str]:
        handle, path = mkstemp(**how)
        made.append(path)
        return handle, path

    monkeypatch.setattr(align.tempfile, "mkstemp", noted)
    on_threads(2, late_s=0.0)
    assert [Path(path).exists() for path in made] == [False]


def test_without_a_common_directory_the_barrier_alone_aligns(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("another machine")

    monkeypatch.setattr(align.mmap, "mmap", refuse)
    for number in zip(*on_threads(2, late_s=0.01), strict=True):
        assert min(left for _, left, _ in number) >= max(arrived for arrived, _, _ in number)
