"""How the ranks of a process group find each other in a store that has keys of ranks before them.

torchrun starts ranks again with the store that those before have used, whose keys name dead processes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ...errors import TimeoutError

__all__ = ["meet"]

_LOOK_S = 1e-3  # between two looks at the store
_LATER_S = 1.0  # by which rank 0 may come later, and so end its waiting


def meet(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Returns a name that the ranks of this group share, and no group before it. Collective.

    Every rank writes a name of its own over what a rank before it has written. Rank 0 shows those that it
    sees. A rank that finds its name among them knows that rank 0 is here, and answers.

    Raises:
        TimeoutError: Ranks have not come, which the message names.
    """
    mine = uuid.uuid4().hex
    store.set(f"name/{rank}", mine)
    end = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        missing = _gather(store, mine, size, end)
        late = f"rank 0 has not met rank {', '.join(map(str, missing))}" if missing else ""
        store.set(f"{mine}/met", late)
        name = mine
    else:
        name, late = _answer(store, mine, rank, end)
    if late:
        raise TimeoutError(
            f"{late} within {timeout.total_seconds():g} s: see that every rank has been started and makes "
            "the same process groups."
        )
    return name


def _gather(store: Any, mine: str, size: int, end: float) -> list[int]:
    """Shows the other ranks which names there are, until all have answered. Returns those who have not."""
    others, before = range(1, size), [""]

    def missing() -> list[int]:
        written = [r for r in others if store.check([f"name/{r}"])]
        names = [mine, *(store.get(f"name/{r}").decode() for r in written)]
        if names != before:
            store.set("shown", " ".join(names))
            before[:] = names
        return [r for r in others if not store.check([f"{mine}/{r}"])]

    _wait(lambda: not missing(), end)
    return missing()


def _answer(store: Any, mine: str, rank: int, end: float) -> tuple[str, str]:
    """Answers rank 0. Returns its name, and what is late, if anything."""

    def shown() -> list[str]:
        names = store.get("shown").decode().split() if store.check(["shown"]) else []
        return names if mine in names else []

    if not _wait(lambda: bool(shown()), end):
        return "", f"rank {rank} has not met rank 0"
    name = shown()[0]
    store.set(f"{name}/{rank}", "")
    if not _wait(lambda: bool(store.check([f"{name}/met"])), end + _LATER_S):
        return "", f"rank {rank} has lost rank 0"
    return name, store.get(f"{name}/met").decode()


def _wait(done: Callable[[], bool], end: float) -> bool:
    """Returns whether it was done in time."""
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True
