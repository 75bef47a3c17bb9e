"""Signals of a launcher, which go on to the processes that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)


@contextlib.contextmanager
def signals_to(handle: Callable[[int], None]) -> Iterator[None]:
    """Gives `handle` the signals that a launcher passes on. Does nothing outside the main thread."""

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for handled, old in before.items():
            signal.signal(handled, signal.SIG_DFL if old is None else old)


def stop_with(send: Callable[[int], None]) -> None:
    """Does what Ctrl-Z means: stops the processes that `send` signals, and this one. `fg` continues all."""
    send(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    send(signal.SIGCONT)
