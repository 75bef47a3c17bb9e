"""Calls on own streams, forked from the current stream and joined again. A graph can capture them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Fork:
    """`count` streams of the current GPU, with their `handles`."""

    def __init__(self, count: int) -> None:
        import torch

        self._torch = torch
        self._streams = [torch.cuda.Stream() for _ in range(count)]
        self.handles = [int(stream.cuda_stream) for stream in self._streams]

    def bound(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """Returns a call that queues call i, bound to stream i, behind the work of the current stream. Later
        work of the current stream waits for all calls."""
        begun = self._torch.cuda.Event()
        lanes: list[tuple[Any, Any, Callable[[], object]]] = [
            (stream, self._torch.cuda.Event(), call)
            for stream, call in zip(self._streams, calls, strict=True)
        ]
        current = self._torch.cuda.current_stream

        def call() -> None:
            main = current()
            begun.record(main)
            for stream, done, work in lanes:
                stream.wait_event(begun)
                work()
                done.record(stream)
            for _, done, _ in lanes:
                main.wait_event(done)

        return call
