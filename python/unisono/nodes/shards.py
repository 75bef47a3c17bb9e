"""What is combined, how arrays are cut for that, and how the cuts meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import _core
from .engine import Part, Pending
from .moves import Moves
from .space import WIRE_BLOCK

__all__ = [
    "SHARD_BYTES",
    "Steps",
    "Sum",
    "cut",
    "everyones",
    "everyones_at",
    "everyones_shards",
    "padded",
    "staggered",
]

SHARD_BYTES = 512 << 10  # of a block, for each rank, at least
BLOCK_BYTES = 4 << 20  # of one of a long input, of few ranks: each costs the engine its start
Steps = Iterator[None]  # what becomes of a block; it yields where it would wait for other nodes
_ENDED = object()
_INTEGERS = frozenset({"i8", "u8", "i32", "i64"})


class Sum(NamedTuple):
    """What is combined. `exact`: a partial result needs no more than the dtype itself."""

    dtype: str
    op: str
    item: int  # bytes of an element
    ranks: int

    @property
    def exact(self) -> bool:
        """Minima, maxima, integers that wrap, and floats that are combined in their own type."""
        if self.op in ("min", "max"):
            return True
        return self.op != "avg" and (self.dtype in _INTEGERS or self.dtype in ("f32", "f64"))

    @property
    def wide(self) -> int:
        """Bytes of an element of a partial result."""
        return self.item if self.exact else _core.wide_bytes(self.dtype)


def cut(array: Any, count: int) -> list[Any]:
    """`count` equal parts."""
    n = len(array) // count
    return [array[index * n : (index + 1) * n] for index in range(count)]


def padded(moves: Moves, x: Any, item: int, parts: int) -> Any:
    """`x`, or a copy that is long enough to be cut into as many equal parts."""
    length = -(-len(x) // (item * parts)) * item * parts
    if length == len(x):
        return x
    longer = moves.space.scratch("padded", length)
    moves.space.copy(longer[: len(x)], x)
    return longer


def staggered(step: Callable[[int, Any, Any], Steps], x: Any, out: Any, what: Sum) -> None:
    """`step` of each block of both, with a slot for the block's scratch: two neighbours have different ones.
    Each goes one step when the next has begun: one travels while another is combined. All blocks but the last
    can be cut into equal shards of whole wire blocks."""
    unit = WIRE_BLOCK * what.item * what.ranks
    block = max(SHARD_BYTES * what.ranks, min(len(x) // 2, BLOCK_BYTES)) // unit * unit
    if len(x) <= block:  # the same in less time, which counts for small ones
        for _ in step(0, x, out):
            pass
        return
    under_way: list[Steps] = []
    for index, begin in enumerate(range(0, len(x), block)):
        begun = step(index % 2, x[begin : begin + block], out[begin : begin + block])
        under_way = [steps for steps in (begun, *under_way) if next(steps, _ENDED) is None]
    while under_way:
        under_way = [steps for steps in under_way if next(steps, _ENDED) is None]


def everyones(moves: Moves, x: Any, what: Sum, slot: int) -> tuple[Sequence[Any], Pending]:
    """Everyone's `x`, in rank order."""
    staged = moves.space.scratch(f"everyone's {slot}", len(x) * what.ranks)
    rows = cut(staged, what.ranks)
    if moves.topology.apart:
        return _exchanged(moves, rows, [x] * what.ranks)
    return rows, moves.all_gather(x, staged)


def everyones_at(moves: Moves, x: Any, what: Sum, slot: int, root: int) -> tuple[Sequence[Any], Pending]:
    """Everyone's `x`, in rank order, at the root; elsewhere nothing."""
    if moves.topology.rank != root:
        return [], moves.gather(x, None, root)
    staged = moves.space.scratch(f"everyone's {slot}", len(x) * what.ranks)
    rows = cut(staged, what.ranks)
    if not moves.topology.apart:
        return rows, moves.gather(x, staged, root)
    rows[root] = x
    return rows, moves.engine.exchange([], [Part(rank, rows[rank]) for rank in moves.topology.peers])


def everyones_shards(moves: Moves, x: Any, what: Sum, slot: int) -> tuple[Sequence[Any], Pending]:
    """This rank's shard of everyone's `x`, in rank order."""
    staged = moves.space.scratch(f"everyone's {slot}", len(x))
    rows = cut(staged, what.ranks)
    if moves.topology.apart:
        return _exchanged(moves, rows, cut(x, what.ranks))
    return rows, moves.all_to_all(x, staged, slot)


def _exchanged(moves: Moves, rows: list[Any], given: Sequence[Any]) -> tuple[Sequence[Any], Pending]:
    """Part p of `given` goes to rank p, whose part comes to row p: what is this rank's own is not copied.
    None of them is empty."""
    place = moves.topology
    sends = [Part(rank, given[rank]) for rank in place.peers]
    receives = [Part(rank, rows[rank]) for rank in place.peers]
    rows[place.rank] = given[place.rank]
    return rows, moves.engine.exchange(sends, receives)
