"""DeepEP's events: a point of a CUDA stream, and what is left to do when it has been reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UsageError

__all__ = ["EventHandle", "EventOverlap", "wait_for"]


class EventHandle:
    """A point of torch's current CUDA stream. Without a GPU every point has been reached."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event() if torch.cuda.is_available() else None
        if self._event is not None:
            self._event.record()

    def current_stream_wait(self) -> None:
        """Lets torch's current stream wait for this point."""
        if self._event is not None:
            self._event.wait()


def wait_for(event: EventHandle | EventOverlap | None) -> None:
    """Lets torch's current stream wait for an event, if there is one."""
    if isinstance(event, EventHandle) or (event is not None and event.event is not None):
        event.current_stream_wait()


class EventOverlap:
    """An event, or none, and a function that runs after the wait for it. A `with` waits at its end."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Lets torch's current stream wait for the event, and returns the result of the function, if any.

        Raises:
            UsageError: there is no event.
        """
        if self.event is None:
            raise UsageError(
                "there is no event to wait for: call with async_with_compute_stream=True, or do not wait."
            )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if release_handle:
            self.event = None
        return None if hook is None else hook()

    def wait(self) -> Any:
        """Does the same as `current_stream_wait()`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Lets the next wait run a function. One at most."""
        if self.hook_after_wait is not None:
            raise UsageError("this event has a function already: wait for the event first.")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Returns itself. release_handle: whether the end of a `with` drops the event."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release)
        self._release = False
