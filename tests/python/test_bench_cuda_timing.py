"""The timed loops on GPUs, on a stand-in device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unisono.bench.cuda import timing
from unisono.bench.device import HangError


class Line:
    """A start line that counts its uses."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def arm(self) -> None:
        self.log.append("arm")

    def release(self) -> None:
        self.log.append("release")

    def pass_by(self) -> None:
        self.log.append("pass")


class Event:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("record")


class StandIn:
    """The part of a device that the loops use. `wait_fails_at`: the number of the wait that hangs."""

    stream = 0

    def __init__(self, wait_fails_at: int = -1) -> None:
        self.log: list[str] = []
        self.line: Any = Line(self.log)
        self.runtime: Any = None
        self._waits, self._fails_at = 0, wait_fails_at

    def align(self) -> None:
        self.log.append("align")

    def agree(self, error: str | None) -> None:
        if error is not None:
            raise RuntimeError(error)

    def wait(self, step: str) -> None:
        self._waits += 1
        self.log.append("wait")
        if self._waits == self._fails_at:
            raise HangError("the GPU is gone")

    def new_event(self) -> Any:
        return Event(self.log)

    def elapsed_ns(self, first: Any, last: Any) -> float:
        return 2000.0


def calling(log: list[str], fail_at: int = -1) -> Callable[[], None]:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        log.append("call")
        if count == fail_at:
            raise OSError("no route")

    return call


def test_events_lie_around_the_call_behind_the_start_line() -> None:
    gpu = StandIn()
    runner = timing.CudaRunner(gpu, "events", calling(gpu.log), 1, lambda: None)
    found = runner.timed(3, 1, 2)
    assert gpu.log[:3] == ["call", "call", "wait"]
    assert gpu.log[3:] == ["arm", "record", "call", "record", "release", "wait"] * 3
    assert found.durations.tolist() == [2000] * 3
    assert len(found.starts) == 0


def test_a_queue_is_timed_by_the_host_clock() -> None:
    gpu = StandIn()
    found = timing.CudaRunner(gpu, "throughput", calling(gpu.log), 4, lambda: None).timed(2, 4, 0)
    assert gpu.log == ["wait", *(["align", *["call"] * 4, "wait"] * 2)]
    assert np.all(found.durations > 0)


@pytest.mark.parametrize("mode", ["events", "latency"])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5])
def test_after_an_error_every_alignment_is_still_made(mode: str, fail_at: int) -> None:
    gpu = StandIn()
    found = timing.CudaRunner(gpu, mode, calling(gpu.log, fail_at), 1, lambda: None).timed(4, 1, 1)
    assert found.error == "OSError: no route"
    assert not found.hung
    assert sum(gpu.log.count(word) for word in ("release", "pass", "align")) == 4


def test_an_error_of_the_alignment_follows_the_calls_error() -> None:
    gpu = StandIn()
    gpu.align = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    runner = timing.CudaRunner(gpu, "latency", calling(gpu.log, 1), 1, lambda: None)
    with pytest.raises(RuntimeError, match="OSError: no route; then division by zero"):
        runner.timed(4, 1, 1)


def test_a_hang_is_no_ordinary_error() -> None:
    gpu = StandIn(wait_fails_at=3)
    found = timing.CudaRunner(gpu, "events", calling(gpu.log), 1, lambda: None).timed(5, 1, 1)
    assert found.hung
    assert found.error == "the GPU is gone"
    assert gpu.log.count("release") + gpu.log.count("pass") == 5


def test_a_failure_that_the_library_reports_later_is_the_cells() -> None:
    def failed() -> None:
        if "record" in gpu.log:
            raise RuntimeError("rank 1 is late")

    gpu = StandIn()
    found = timing.CudaRunner(gpu, "events", calling(gpu.log), 1, failed).timed(2, 1, 1)
    assert found.error == "RuntimeError: rank 1 is late"
