"""Builds ping-pongs and all_to_alls of a library's own sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from unisono.bench import pairs
from unisono.bench.timing import Call
from unisono.records import Case


def pingpong(case: Case, rank: int, bind: Callable[[str], Call]) -> Call:
    """Returns the call of a ping-pong. `bind` returns that of `send`, `recv` or `exchange` (both)."""
    if case.pattern == "bidirectional":
        return bind("exchange")
    order = ("send", "recv") if pairs.goes_first(case, rank) else ("recv", "send")
    if case.pattern == "one_way":
        return bind(order[0])
    return in_turn([bind(verb) for verb in order])


def steps(rank: int, size: int) -> list[tuple[int, int]]:
    """Returns (to, from) of the steps by which each rank reaches all others, in an order without deadlock."""
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]


def in_turn(calls: Sequence[Call]) -> Call:
    """Returns a call that makes `calls` one after the other."""
    ready = tuple(calls)

    def call() -> None:
        for one in ready:
            one()

    return call


def own_block(x: Any, out: Any, rank: int) -> Call:
    """Returns a copy of the own block of an all_to_all; of torch tensors on the current stream."""
    if isinstance(x, np.ndarray):
        return partial(np.copyto, out[rank], x[rank])
    return partial(out[rank].copy_, x[rank])
