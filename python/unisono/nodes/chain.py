"""Sums along a chain of nodes whose ranks are consecutive, and as many on each: in rank order.

Partial sums travel from node to node in the wide type: local rank r adds its node's part of the r-th shard of
a block to what comes from the node before and passes it on. The last node rounds. From there the sums go

- of an all_reduce from node to node to the first one: each direction of a link carries them once,
- of a reduce to the root's node, whose ranks give them to the root,
- of a reduce_scatter to the node whose blocks they are.

The traffic is the same whatever the number of a node's ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .engine import Part
from .moves import Moves
from .shards import Sum, cut, padded

__all__ = ["BLOCK_BYTES", "AllReduce", "Reduce", "ReduceScatter"]

BLOCK_BYTES = 2 << 20  # of the input, that go through a step together: they stay in the cache


class _Chain(ABC):
    """Steps in which a node works on one block while another comes in and a third goes out.

    In step t node k adds its part to block t - 2k, and the last node, K, sends what it has rounded in the
    step before, block t - 2K - 1: what is computed in one step travels in the next, and is worked on in the
    one after that. A step in which nothing travels costs nothing. Both ends of a message are in one step.
    """

    def __init__(self, moves: Moves, what: Sum, count: int, elements: int) -> None:
        """`count` blocks, whose shards have `elements` at most."""
        place, space = moves.topology, moves.space
        self._moves, self._what, self._count = moves, what, count
        self._node, self._last, self._here = place.node, len(place.nodes) - 1, len(place.local)
        self._before = place.counterpart(self._node - 1) if self._node > 0 else -1
        self._behind = place.counterpart(self._node + 1) if self._node < self._last else -1
        self._incoming = [space.scratch(f"incoming {i}", elements * what.wide) for i in range(2)]
        self._partial = [space.scratch(f"partial {i}", elements * what.wide) for i in range(2)]
        self._final = [space.scratch(f"final {i}", elements * what.item) for i in range(3)]

    def run(self) -> None:
        """All steps."""
        node, last, wide = self._node, self._last, self._what.wide
        for step in range(self._count + 4 * last):
            adding = step - 2 * node
            sends, receives = self._sums_travel(step)
            if node < last:
                sends += self._travel(self._behind, self._partial, adding - 1, wide)
            if node > 0:
                receives += self._travel(self._before, self._incoming, adding + 1, wide)
            pending = self._moves.exchange(sends, receives)
            if self._is_block(adding):
                self._add(adding)
            self._land(step)
            pending.wait()

    @abstractmethod
    def _elements(self, block: int) -> int:
        """Of a shard of that block."""

    @abstractmethod
    def _sources(self, block: int) -> list[Any]:
        """This rank's shard of that block of each of the node's ranks."""

    @abstractmethod
    def _sums_travel(self, step: int) -> tuple[list[Part], list[Part]]:
        """What is sent and received of the sums."""

    @abstractmethod
    def _land(self, step: int) -> None:
        """What the node does with sums that have come."""

    def _is_block(self, block: int) -> bool:
        return 0 <= block < self._count

    def _travel(self, rank: int, buffers: list[Any], block: int, item: int) -> list[Part]:
        if not self._is_block(block):
            return []
        return [Part(rank, buffers[block % len(buffers)][: self._elements(block) * item])]

    def _sums(self, block: int) -> Any:
        """Those of this rank's shard."""
        return self._final[block % 3][: self._elements(block) * self._what.item]

    def _add(self, block: int) -> None:
        moves, what, elements = self._moves, self._what, self._elements(block)
        sources = self._sources(block)
        prior = self._incoming[block % 2][: elements * what.wide] if self._node > 0 else None
        if prior is not None and what.exact:
            sources, prior = [prior, *sources], None
        if self._node == self._last:
            out, ranks = self._sums(block), what.ranks
        else:
            out = self._partial[block % 2][: elements * what.wide]
            ranks = what.ranks if what.exact else 0
        moves.space.combine(out, prior, sources, what.dtype, what.op, ranks)


class AllReduce(_Chain):
    """`x` of everyone to everyone's `out`: node k hands block t - 2(2K - k) out in step t."""

    def __init__(self, moves: Moves, what: Sum, x: Any, out: Any) -> None:
        unit = what.item * len(moves.topology.local)
        self._x, self._out, self._unit = x, out, unit
        self._block = max(unit, min(BLOCK_BYTES, len(x)) // unit * unit)
        super().__init__(moves, what, -(-len(x) // self._block), self._block // unit)

    def _elements(self, block: int) -> int:
        return -(-len(self._cut(self._x, block)) // self._unit)

    def _sources(self, block: int) -> list[Any]:
        given = padded(self._moves, self._cut(self._x, block), self._what.item, self._here)
        staged = self._moves.space.scratch("everyone's", len(given))
        self._moves.inside("all_to_all", given.reshape(self._here, -1), staged.reshape(self._here, -1))
        return cut(staged, self._here)

    def _cut(self, array: Any, block: int) -> Any:
        return array[block * self._block : (block + 1) * self._block]

    def _sums_travel(self, step: int) -> tuple[list[Part], list[Part]]:
        landing, item = step - 2 * (2 * self._last - self._node), self._what.item
        sends = self._travel(self._before, self._final, landing - 1, item) if self._node > 0 else []
        receives = self._travel(self._behind, self._final, landing + 1, item) if self._behind >= 0 else []
        return sends, receives

    def _land(self, step: int) -> None:
        if self._is_block(block := step - 2 * (2 * self._last - self._node)):
            self._hand_out(block, "all_gather")

    def _hand_out(self, block: int, name: str, *root: int) -> None:
        """The sums of a block to the node's ranks, or to the root, by that collective."""
        space, shard, taken = self._moves.space, self._sums(block), self._cut(self._out, block)
        whole, length = taken, len(shard) * self._here
        if length != len(taken):
            whole = space.scratch("whole", length)
        self._moves.inside(name, shard, *root, whole.reshape(self._here, -1))
        space.copy(taken, whole[: len(taken)])


class Reduce(AllReduce):
    """`x` of everyone to the root's `out`; elsewhere it is None."""

    def __init__(self, moves: Moves, what: Sum, x: Any, out: Any, root: int) -> None:
        super().__init__(moves, what, x, out)
        self._home = moves.topology.node_of[root]
        self._root = moves.topology.nodes[self._home].index(root)

    def _sums_travel(self, step: int) -> tuple[list[Part], list[Part]]:
        def part(node: int) -> list[Part]:
            rank = self._moves.topology.counterpart(node)
            return self._travel(rank, self._final, step - 2 * self._last - 1, self._what.item)

        if self._home == self._last:
            return [], []
        return (
            part(self._home) if self._node == self._last else [],
            part(self._last) if self._node == self._home else [],
        )

    def _land(self, step: int) -> None:
        block = step - 2 * self._last - (0 if self._home == self._last else 2)
        if self._node != self._home or not self._is_block(block):
            return
        if self._out is not None:
            self._hand_out(block, "gather", self._root)
        else:
            self._moves.inside("gather", self._sums(block), self._root)


class ReduceScatter(_Chain):
    """Block p of everyone's `x` to the `out` of rank p. A block of the chain is a range of columns of the
    blocks of a node, which takes turns, so that none gets all its sums at once."""

    def __init__(self, moves: Moves, what: Sum, x: Any, out: Any) -> None:
        place = moves.topology
        unit = what.item * len(place.local)
        self._x, self._out = x.reshape(what.ranks, -1), out
        self._columns = min(max(1, BLOCK_BYTES // unit) * what.item, len(out))
        ranges = -(-len(out) // self._columns)
        super().__init__(moves, what, ranges * len(place.nodes), self._columns // what.item)

    def _cut(self, array: Any, block: int) -> Any:
        """The columns of that block."""
        begin = block // (self._last + 1) * self._columns
        return array[..., begin : begin + self._columns]

    def _goal(self, block: int) -> int:
        """The node whose block it is."""
        return block % (self._last + 1)

    def _elements(self, block: int) -> int:
        return len(self._cut(self._out, block)) // self._what.item

    def _sources(self, block: int) -> list[Any]:
        here, me, first = self._here, self._moves.topology.local_rank, self._goal(block) * self._here
        given = list(self._cut(self._x[first : first + here], block))
        sources = cut(self._moves.space.scratch("everyone's", here * len(given[me])), here)
        sources[me] = given[me]
        others = [rank for rank in range(here) if rank != me]
        if others:
            sends, receives = ([(parts[rank], rank) for rank in others] for parts in (given, sources))
            self._moves.inside("batch_send_recv", sends, receives)
        return sources

    def _sums(self, block: int) -> Any:
        return self._cut(self._out, block) if self._goal(block) == self._last else super()._sums(block)

    def _sums_travel(self, step: int) -> tuple[list[Part], list[Part]]:
        block = step - 2 * self._last - 1
        if not self._is_block(block) or (goal := self._goal(block)) == self._last:
            return [], []
        place = self._moves.topology
        sends = [Part(place.counterpart(goal), self._sums(block))] if self._node == self._last else []
        receives = [Part(place.counterpart(self._last), self._cut(self._out, block))]
        return sends, receives if self._node == goal else []

    def _land(self, step: int) -> None:
        """They have come to where they belong."""
