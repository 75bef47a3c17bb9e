"""Live progress on rank 0: a bar with the estimated time left, drawn between batches, at most twice a second.

Without a terminal, a plain line is printed every 15 seconds. No thread draws, so that a timed rank keeps its
core.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from unisono.bench.schedule import Schedule

EVERY_S = 0.5
PLAIN_EVERY_S = 15.0


def left_text(seconds: float | None) -> str:
    """Returns the time left in words: 75 -> "about 1:15 left"; None: the budget is used up."""
    if seconds is None:
        return "the budget is used up"
    whole = max(0, int(seconds + 0.5))
    return f"about {whole // 60}:{whole % 60:02d} left"


class Display:
    """Shows the progress. `columns`: width of the user's terminal, which the ranks' output reaches through
    their launcher; None: no terminal."""

    def __init__(self, columns: int | None) -> None:
        self._plain = columns is None
        console = Console(
            file=sys.stdout, width=columns, force_terminal=not self._plain or None, markup=False, emoji=False
        )
        self._bar = Progress(
            TextColumn("{task.percentage:>3.0f}%", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]} · {task.description}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=1.0, left="?")
        self._last = time.monotonic()

    def __enter__(self) -> Display:
        if not self._plain:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._plain:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays, above the bar."""
        if self._plain:
            print(text, flush=True)
        else:
            self._bar.console.print(text, highlight=False)

    def show(self, schedule: Schedule, doing: str) -> None:
        """Draws, if enough time has passed. Called between batches."""
        now = time.monotonic()
        if now - self._last < (PLAIN_EVERY_S if self._plain else EVERY_S):
            return
        self._last = now
        share, left = schedule.share_done(), left_text(schedule.estimate_s())
        if self._plain:
            print(f"{share:4.0%} of the cells are done, {left}, now {doing}", flush=True)
            return
        self._bar.update(self._task, completed=share, left=left, description=doing)
        self._bar.refresh()
