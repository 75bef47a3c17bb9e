"""The timed loops, on calls that count themselves."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest

from unisono.bench import timing
from unisono.bench.backends.unisono import UnisonoBackend
from unisono.bench.cases import make_case
from unisono.bench.control import Control
from unisono.bench.device import HostDevice, HostRunner, one_clock
from unisono.bench.timing import Timed


class Counter:
    """Counts its calls. Raises in call number `fail_at`."""

    def __init__(self, fail_at: int = -1) -> None:
        self.count, self.fail_at = 0, fail_at

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise RuntimeError("broken")


@pytest.mark.parametrize(("samples", "calls", "warmup"), [(5, 1, 3), (4, 7, 1), (0, 1, 0), (1, 1, 0)])
def test_calls_and_alignments_are_as_many_as_asked(samples: int, calls: int, warmup: int) -> None:
    call, align = Counter(), Counter()
    found = timing.timed(call, align, samples, calls, warmup)
    assert (call.count, align.count) == (samples * calls + warmup, samples)
    assert found.error is None
    assert len(found.durations) == len(found.starts) == samples
    assert np.all(found.durations >= 0)
    assert np.all(np.diff(found.starts) >= 0)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("fail_at", [1, 2, 4, 6])
def test_after_an_error_the_alignments_are_still_made(fail_at: int, calls: int) -> None:
    call, align = Counter(fail_at), Counter()
    found = timing.timed(call, align, 6, calls, 2)
    assert found.error == "RuntimeError: broken"
    assert align.count == 6
    assert len(found.durations) == max(0, (fail_at - 3) // calls)


def test_an_error_of_the_alignment_follows_the_calls_error() -> None:
    def call() -> None:
        raise OSError("the network is gone")

    with pytest.raises(RuntimeError, match="OSError: the network is gone; then broken"):
        timing.timed(call, Counter(fail_at=3), 6, 1, 1)


def test_an_error_of_the_alignment_alone_ends_the_batch() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        timing.timed(Counter(), Counter(fail_at=3), 6, 1, 1)


def test_no_garbage_is_collected_while_timing() -> None:
    seen = []
    timing.timed(lambda: seen.append(gc.isenabled()), lambda: None, 3, 1, 0)
    assert seen == [False] * 3
    assert gc.isenabled()


def test_a_sample_is_from_the_first_start_to_the_last_end() -> None:
    ranks = [
        Timed(np.array([1000, 5000, 9000]), np.array([100, 900, 100])),
        Timed(np.array([1300, 5000]), np.array([400, 200])),
    ]
    samples, skews = timing.combine(ranks, calls=2)
    assert samples == [0.35, 0.45]
    assert skews == [0.3, 0.0]


@pytest.mark.parametrize("one", [True, False])
def test_there_is_no_skew_between_clocks_that_differ(one: bool) -> None:
    found = HostRunner(Counter(), Counter(), one).timed(4, 1, 1)
    samples, skews = timing.combine([found, found], calls=1)
    assert len(samples) == 4
    assert skews == ([0.0] * 4 if one else [])


def test_every_sample_tells_the_watch_that_the_rank_moves() -> None:
    host = HostDevice(Counter())
    beats = Counter()
    host.watch.beat = beats  # type: ignore[assignment, method-assign]
    host.runner(make_case("barrier", 0, "u8", 2), Counter(), UnisonoBackend()).timed(4, 1, 1)
    assert beats.count == 4


def test_what_comes_before_a_sample_comes_before_its_alignment() -> None:
    made: list[str] = []
    host = HostDevice(lambda: made.append("align"))
    case, backend = make_case("all_reduce", 8, "f32", 2), UnisonoBackend()
    host.runner(case, lambda: made.append("call"), backend, lambda: made.append("before")).timed(2, 1, 1)
    assert made == ["call", *["before", "align", "call"] * 2]


def test_the_clock_is_one_on_one_machine_only() -> None:
    class Pair:
        """Rank 0 of two. The other rank is on the same machine, or on another."""

        rank, size = 0, 2

        def all_gather(self, data: bytes) -> list[bytes]:
            return [data, other or data]

    other = b""
    assert one_clock(Control(Pair()))
    other = msgspec.msgpack.encode("another machine")
    assert not one_clock(Control(Pair()))
