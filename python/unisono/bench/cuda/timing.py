"""The timed loops on GPUs. A sample is one rank's; the maximum over ranks is taken where they are put
together.

graph: the calls are captured once in a CUDA graph; a sample is one run of it between two events, divided by
the calls. events: one call between two events. Both start behind the start line (`start`), so that the time
is the GPU's, from the common start to the end of this rank's work. throughput: from a common start on the
host until a queue of calls is complete, by the host clock. latency: one call until it is complete, by the
host clock.

No wait is without a deadline; past it the sample says `hung`, and nothing can be measured any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from unisono.bench.cuda.runtime import Graph, Runtime
from unisono.bench.cuda.start import StartLine
from unisono.bench.device import HangError
from unisono.bench.timing import NOT_TIMED, Call, Timed, collector_off


class Waiting(Protocol):
    """The part of the device that the loops need."""

    runtime: Runtime
    stream: int
    line: StartLine
    align: Callable[[], object]

    def wait(self, step: str) -> None:
        """Until the stream is empty; past the deadline it raises HangError, which names the `step`."""

    def agree(self, error: str | None) -> None:
        """On all ranks: raises RuntimeError where any of them has an error, with that of the lowest."""

    def new_event(self) -> Any:
        """A timing event of torch on the current stream."""

    def elapsed_ns(self, first: Any, last: Any) -> float: ...


Sample = Callable[[], float]


class CudaRunner:
    """The loops over one prepared call; `queue` is how many calls a sample of a queue has."""

    def __init__(
        self, device: Waiting, mode: str, call: Call, queue: int, raise_if_failed: Callable[[], None]
    ) -> None:
        self._device, self._mode, self._call, self._queue = device, mode, call, queue
        self._raise_if_failed = raise_if_failed
        self._graph: Graph | None = None
        self._first, self._last = device.new_event(), device.new_event()

    def timed(self, samples: int, calls: int, warmup: int) -> Timed:
        """As `timing.timed`. What the alignment raises goes to the caller."""
        durations: list[float] = []
        with collector_off():
            try:
                sample = self._prepare(calls, warmup)
            except Exception as raised:
                return self._given_up(raised, samples)
            for done in range(samples):
                try:
                    durations.append(sample())
                except _InCall as broken:
                    return self._given_up(broken.raised, samples - done - 1)
        try:
            self._raise_if_failed()
        except Exception as raised:
            return self._given_up(raised, 0)
        return Timed(NOT_TIMED.starts, np.asarray(durations, np.float64).astype(np.int64))

    def _given_up(self, raised: Exception, samples_left: int) -> Timed:
        """Makes the alignments of the samples that are left, so that no other rank waits for this one
        there."""
        meet = self._device.line.pass_by if self._by_events else self._device.align
        text = str(raised) if isinstance(raised, HangError) else f"{type(raised).__name__}: {raised}"
        try:
            for _ in range(samples_left):
                meet()
        except Exception as late:
            raise RuntimeError(f"{text}; then {late}") from late
        return replace(NOT_TIMED, error=text, hung=isinstance(raised, HangError))

    @property
    def _by_events(self) -> bool:
        return self._mode in ("graph", "events")

    def _prepare(self, calls: int, warmup: int) -> Sample:
        """Makes the untimed calls; returns what takes one sample."""
        device = self._device
        if self._mode == "graph" and calls == self._queue:
            if self._graph is None:
                self._graph = self._captured(calls, max(1, warmup))
            self._graph.launch()
            device.wait("the first run of the graph")
            return self._between_events(self._graph.launch)
        self._eager(warmup)
        return self._between_events(self._call) if self._by_events else self._by_host_clock(calls)

    def _captured(self, calls: int, warmup: int) -> Graph:
        """The graph, which no rank runs before all have it: what fails in a capture may fail on one rank
        only, and the others would wait on their GPUs for it."""
        graph: Graph | None = None
        failed: Exception | None = None
        try:
            self._eager(warmup)  # a library may set itself up in its first calls, not in a capture
            graph = Graph(self._device.runtime, self._device.stream, self._call, calls)
        except Exception as raised:
            failed = raised
        try:
            self._device.agree(None if failed is None else f"{type(failed).__name__}: {failed}")
        except RuntimeError:
            if graph is not None:
                graph.close()
            if failed is not None:
                raise failed from None
            raise
        assert graph is not None
        return graph

    def _eager(self, count: int) -> None:
        for _ in repeat(None, count):
            self._call()
        self._device.wait("the untimed calls")
        self._raise_if_failed()

    def _between_events(self, work: Call) -> Sample:
        device, first, last = self._device, self._first, self._last
        arm, release, wait = device.line.arm, device.line.release, device.wait

        def sample() -> float:
            raised: Exception | None = None
            arm()
            first.record()
            try:
                work()
            except Exception as error:
                raised = error
            last.record()
            release()
            if raised is None:
                try:
                    wait("a sample")
                except Exception as error:
                    raised = error
            if raised is not None:
                raise _InCall(raised)
            return device.elapsed_ns(first, last)

        return sample

    def _by_host_clock(self, calls: int) -> Sample:
        align, wait, call, clock = self._device.align, self._device.wait, self._call, perf_counter_ns

        def sample() -> float:
            align()
            began = clock()
            try:
                for _ in repeat(None, calls):
                    call()
                wait("a sample")
            except Exception as error:
                raise _InCall(error) from error
            return float(clock() - began)

        return sample

    def close(self) -> None:
        if self._graph is not None:
            self._graph.close()
            self._graph = None


class _InCall(Exception):  # noqa: N818  (not an error of its own: it carries one)
    """What a call or the wait for it raised, behind this sample's alignment."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised
