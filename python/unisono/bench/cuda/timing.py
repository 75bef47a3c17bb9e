"""The timed loops on GPUs. A sample is one rank's; `timing.combine` takes the maximum over ranks.

graph: the calls are captured once in a CUDA graph; a sample is one run of the graph between two events,
divided by the calls. events: one call between two events. Both start behind the start line (`start`). A
sample is therefore the GPU's time from the common start to the end of this rank's work. throughput: a queue
of calls from a common start on the host to its end, by the host clock. latency: one call, in the same way.

Every wait has a deadline. Past it the sample is `hung`, and nothing more can be measured.
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
from unisono.bench.device import HangError, Runner
from unisono.bench.timing import NOT_TIMED, Call, Timed, collector_off


class Waiting(Protocol):
    """The part of the device that the loops need."""

    runtime: Runtime
    stream: int
    sm_count: int
    line: StartLine
    align: Callable[[], object]

    def wait(self, step: str) -> None:
        """Waits until the stream is empty. Past the deadline raises HangError, which names the `step`."""

    def agree(self, error: str | None) -> None:
        """Raises RuntimeError on all ranks if any has an error, with that of the lowest rank. Collective."""

    def new_event(self) -> Any:
        """Returns a timing event of torch."""

    def elapsed_ns(self, first: Any, last: Any) -> float: ...


Sample = Callable[[], float]


class CudaRunner(Runner):
    """The loops over one prepared call. `queue`: the calls of a sample in the modes with a queue."""

    def __init__(
        self, device: Waiting, mode: str, call: Call, queue: int, raise_if_failed: Callable[[], None]
    ) -> None:
        self._device, self._mode, self._call, self._queue = device, mode, call, queue
        self._raise_if_failed = raise_if_failed
        self._graph: Graph | None = None
        self._first, self._last = device.new_event(), device.new_event()

    def timed(self, samples: int, calls: int, warmup: int) -> Timed:
        """Takes samples, as `timing.timed`. Raises errors of the alignment."""
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
        """Makes the alignments of the remaining samples, for which other ranks wait. Returns the error."""
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
        """Makes the untimed calls. Returns a function that takes one sample."""
        device = self._device
        if self._mode == "graph" and calls == self._queue:
            if self._graph is None:
                self._graph = self._captured(calls, max(1, warmup))
                blocks = self._graph.blocks
                self.sms = None if blocks is None else min(blocks, device.sm_count)
            self._graph.launch()
            device.wait("the first run of the graph")
            return self._between_events(self._graph.launch)
        self._eager(warmup)
        return self._between_events(self._call) if self._by_events else self._by_host_clock(calls)

    def _captured(self, calls: int, warmup: int) -> Graph:
        """Returns the graph once all ranks have theirs. A capture may fail on one rank only, and the GPUs of
        the others would then wait."""
        graph: Graph | None = None
        failed: Exception | None = None
        try:
            self._eager(warmup)  # a library may set itself up in its first calls, but not in a capture
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


class _InCall(Exception):  # noqa: N818  (carries another error)
    """Carries an error of a call, or of the wait for it, after this sample's alignment."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised
