"""The Moes of a DeepEP V1 Buffer, whose users name neither the most tokens nor the number of handles."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Moes", "Routing"]


class Routing:
    """V1's handle: the routing of a dispatch, for its combine and further ones. Valid as long as it lives.

    Attributes:
        moe, routing: the Moe, and its handle.
        rows: of received tensors.
        exact: whether exactly so many have come.
    """

    def __init__(self, moe: Any, routing: Any, rows: int, exact: bool) -> None:
        self.moe, self.routing, self.rows, self.exact = moe, routing, rows, exact


class _Kept:
    """A Moe, and which of its routings are still in use on this rank."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe
        self._slots: list[weakref.ref[Routing] | None] = [None] * moe.options.handles
        self._made = 0

    def add(self, routing: Routing) -> None:
        """Notes a new routing of the Moe."""
        self._slots[self._made % len(self._slots)] = weakref.ref(routing)
        self._made += 1

    def full(self) -> bool:
        """Returns whether the next routing replaces one in use."""
        return _alive(self._slots[self._made % len(self._slots)])

    def in_use(self) -> int:
        """Returns the number of routings in use."""
        return sum(map(_alive, self._slots))


class Moes:
    """Moes by kind. One is replaced when a rank has more tokens, or when its routings are all in use.

    Args:
        communicator: of the ranks.
        handles: routings that a Moe keeps at first.
    """

    def __init__(self, communicator: Any, handles: int) -> None:
        self._communicator, self._handles = communicator, handles
        self._kept: dict[Any, _Kept] = {}
        self._replaced: list[_Kept] = []

    def take(self, kind: Any, tokens: int, make: Callable[[int, int], Any]) -> _Kept:
        """Returns the Moe of a kind, for so many tokens and one more routing. Collective.

        Args:
            make: returns a new Moe for max_tokens and handles.
        """
        kept = self._kept.get(kind)
        full, in_use = (True, 0) if kept is None else (kept.full(), kept.in_use())
        mine = (tokens, full, in_use, sum(one.in_use() for one in self._replaced))
        told = self._communicator.all_reduce(torch.tensor(mine, dtype=torch.int64), op="max")
        most, full, in_use, elsewhere = told.tolist()
        if not elsewhere:
            self._free()
        if kept is not None and not full and most <= kept.moe.max_tokens:
            return kept
        handles = self._handles
        if kept is not None:
            self._replaced.append(kept)
            most, handles = max(most, kept.moe.max_tokens), kept.moe.options.handles
            handles *= 2 if 2 * in_use > handles else 1
        self._kept[kind] = _Kept(make(_roomy(most), handles))
        return self._kept[kind]

    def fixed(self, kind: Any, make: Callable[[int], Any]) -> Any:
        """Returns the Moe of a kind whose sizes are known. The first call is collective.

        Args:
            make: returns a new Moe for a number of handles.
        """
        if kind not in self._kept:
            self._kept[kind] = _Kept(make(self._handles))
        return self._kept[kind].moe

    def _free(self) -> None:
        """Frees what has been replaced. Collective: no rank may have work under way there."""
        if not self._replaced:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._communicator.barrier()
        self._replaced.clear()


def _alive(of: weakref.ref[Routing] | None) -> bool:
    return of is not None and of() is not None


def _roomy(tokens: int) -> int:
    """Returns a number of tokens that grows in few steps, by a quarter at most."""
    unit = 1 << max(tokens.bit_length() - 3, 4)
    return max(-(-tokens // unit), 1) * unit
