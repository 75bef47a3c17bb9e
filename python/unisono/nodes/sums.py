"""Sums across nodes, in rank order: every algorithm gives the bits of a communicator on one node.

- `one_shot`: everyone gets every input and combines all of them. One step between nodes.
- `two_shot`: rank r gets everyone's r-th shard and combines it; the sums go to everyone (R. Rabenseifner,
  Optimization of Collective Reduction Operations, ICCS 2004).
- `chain`: partial sums travel from node to node. Local rank r adds its node's part of the r-th shard to what
  comes from the node before and passes it on; the last node rounds and sends the sum back down. Block follows
  block, so that both directions of every link are in use, and each carries an input's size once, whatever the
  number of ranks of a node. It needs nodes whose ranks are consecutive, and as many on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from .. import _core
from .engine import Part, Pending
from .moves import Moves

__all__ = ["ALGORITHMS", "Sum", "all_reduce", "choose", "reduce", "reduce_scatter"]

ALGORITHMS = ("one_shot", "two_shot", "chain")
ONE_SHOT_BYTES = 32 << 10  # up to here everyone gets everything
CHAIN_BYTES = 8 << 20  # from here on in a chain, where it saves traffic
CHAIN_BLOCK_BYTES = 2 << 20  # of the input, that go through a step together: they stay in the cache
BLOCK_BYTES = 512 << 10  # of the input, for each rank, that one_shot and two_shot take at once
_INTEGERS = frozenset({"i8", "u8", "i32", "i64"})
_Steps = Iterator[None]  # what becomes of a block; it yields where it would wait for other nodes
_ENDED = object()


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


def choose(moves: Moves, size: int) -> str:
    """The algorithm for an all_reduce of `size` bytes."""
    place = moves.topology
    if size <= ONE_SHOT_BYTES or place.size == 2:
        return "one_shot"
    # with a rank a node, both send an input's size; the chain one way after the other
    return "chain" if size >= CHAIN_BYTES and place.uniform and len(place.local) > 1 else "two_shot"


def all_reduce(moves: Moves, x: Any, out: Any, what: Sum, algorithm: str | None) -> None:
    """The combination of everyone's `x` to everyone's `out`, which may be `x`."""
    match algorithm or choose(moves, len(x)):
        case "one_shot":
            _staggered(_one_shot(moves, *block, what) for block in _blocks(x, out, what))
        case "two_shot":
            _staggered(_two_shot(moves, *block, what) for block in _blocks(x, out, what))
        case _:
            _Chain(moves, what, len(x)).run(x, out)


def reduce_scatter(moves: Moves, x: Any, out: Any, what: Sum) -> None:
    """Rank r gets the combination of everyone's r-th block."""
    rows, pending = _shards(moves, x, what, 0)
    pending.wait()
    moves.space.combine(out, None, rows, what.dtype, what.op, what.ranks)


def reduce(moves: Moves, x: Any, out: Any, what: Sum, root: int) -> None:
    """The root's `out` gets the combination of everyone's `x`; elsewhere it is None."""
    taken = x if out is None else out  # read by the root alone
    _staggered(_to_root(moves, *block, what, root) for block in _blocks(x, taken, what))


def _staggered(blocks: Iterable[_Steps]) -> None:
    """Each block goes one step when the next has begun: one travels while another is combined."""
    under_way: list[_Steps] = []
    waiting = iter(blocks)
    while True:
        under_way = [*islice(waiting, 1), *under_way]
        if not under_way:
            return
        under_way = [block for block in under_way if next(block, _ENDED) is None]


def _one_shot(moves: Moves, slot: int, x: Any, out: Any, what: Sum) -> _Steps:
    rows, pending = _everyones(moves, x, what, slot)
    yield
    pending.wait()
    moves.space.combine(out, None, rows, what.dtype, what.op, what.ranks)


def _two_shot(moves: Moves, slot: int, x: Any, out: Any, what: Sum) -> _Steps:
    rows, pending = _shards(moves, _padded(moves, x, what.item, what.ranks), what, slot)
    yield
    pending.wait()
    n = len(rows[0])
    whole = out if n * what.ranks == len(out) else moves.space.scratch("whole", n * what.ranks)
    shard = whole[moves.topology.rank * n :][:n]
    moves.space.combine(shard, None, rows, what.dtype, what.op, what.ranks)
    pending = moves.all_gather(shard, whole)
    yield
    pending.wait()
    if whole is not out:
        moves.space.copy(out, whole[: len(out)])


def _to_root(moves: Moves, slot: int, x: Any, out: Any, what: Sum, root: int) -> _Steps:
    rows, pending = _shards(moves, _padded(moves, x, what.item, what.ranks), what, slot)
    yield
    pending.wait()
    n = len(rows[0])
    shard = moves.space.scratch("shard", n)
    moves.space.combine(shard, None, rows, what.dtype, what.op, what.ranks)
    here = moves.topology.rank == root
    whole = moves.space.scratch("whole", n * what.ranks) if here else None
    moves.gather(shard, whole, root)
    if whole is not None:
        moves.space.copy(out, whole[: len(out)])


def _blocks(x: Any, out: Any, what: Sum) -> Iterator[tuple[int, Any, Any]]:
    """Blocks of both, and a slot for the scratch of each: two neighbours have different ones. All but the
    last can be cut into equal shards."""
    unit = what.item * what.ranks
    block = BLOCK_BYTES // what.item * unit
    for index, begin in enumerate(range(0, len(x), block)):
        yield index % 2, x[begin : begin + block], out[begin : begin + block]


def _everyones(moves: Moves, x: Any, what: Sum, slot: int) -> tuple[Sequence[Any], Pending]:
    """Everyone's `x`, in rank order."""
    staged = moves.space.scratch(f"everyone's {slot}", len(x) * what.ranks)
    rows = _rows(staged, what.ranks)
    if not _alone(moves):
        return rows, moves.all_gather(x, staged)
    return _exchanged(moves, rows, [x] * what.ranks)


def _shards(moves: Moves, x: Any, what: Sum, slot: int) -> tuple[Sequence[Any], Pending]:
    """This rank's shard of everyone's `x`, in rank order."""
    staged = moves.space.scratch(f"everyone's {slot}", len(x))
    rows = _rows(staged, what.ranks)
    if not _alone(moves):
        return rows, moves.all_to_all(x, staged, slot)
    return _exchanged(moves, rows, _rows(x, what.ranks))


def _alone(moves: Moves) -> bool:
    """Whether every node has a rank only: what is this rank's own need not be copied."""
    return all(len(ranks) == 1 for ranks in moves.topology.nodes)


def _exchanged(moves: Moves, rows: list[Any], given: Sequence[Any]) -> tuple[Sequence[Any], Pending]:
    me = moves.topology.rank
    others = [rank for rank in range(len(rows)) if rank != me]
    pending = moves.exchange(
        [Part(rank, given[rank]) for rank in others], [Part(rank, rows[rank]) for rank in others]
    )
    rows[me] = given[me]
    return rows, pending


def _rows(staged: Any, count: int) -> list[Any]:
    n = len(staged) // count
    return [staged[row * n : (row + 1) * n] for row in range(count)]


def _padded(moves: Moves, x: Any, item: int, parts: int) -> Any:
    """`x`, or a copy that is long enough to be cut into as many equal parts."""
    length = -(-len(x) // (item * parts)) * item * parts
    if length == len(x):
        return x
    longer = moves.space.scratch("padded", length)
    moves.space.copy(longer[: len(x)], x)
    return longer


class _Chain:
    """Steps in which a node works on one block while another comes in and a third goes out.

    In step t node k adds its part to block t - 2k, and hands out the finished block t - 2(2K - k), K being
    the last node: what is computed in one step travels in the next, and is worked on in the one after that.
    A step in which nothing travels costs nothing.
    """

    def __init__(self, moves: Moves, what: Sum, size: int) -> None:
        place, space = moves.topology, moves.space
        self._moves, self._what = moves, what
        self._node, self._last = place.node, len(place.nodes) - 1
        self._here = len(place.local)
        self._before = place.counterpart(self._node - 1) if self._node > 0 else -1
        self._behind = place.counterpart(self._node + 1) if self._node < self._last else -1
        self._wide = what.item if what.exact else _core.wide_bytes(what.dtype)
        unit = what.item * self._here
        self._block = max(unit, min(CHAIN_BLOCK_BYTES, size) // unit * unit)
        self._count = -(-size // self._block)
        self._shard = self._block // unit  # elements
        self._incoming = [space.scratch(f"incoming {i}", self._shard * self._wide) for i in range(2)]
        self._partial = [space.scratch(f"partial {i}", self._shard * self._wide) for i in range(2)]
        self._final = [space.scratch(f"final {i}", self._shard * what.item) for i in range(3)]

    def run(self, x: Any, out: Any) -> None:
        """All steps."""
        node, last, count = self._node, self._last, self._count
        for step in range(count + 4 * last + 1):
            adding, landing = step - 2 * node, step - 2 * (2 * last - node)
            sends: list[Part] = []
            receives: list[Part] = []
            if node < last:
                self._travel(sends, self._behind, self._partial, adding - 1, self._wide, x)
                self._travel(receives, self._behind, self._final, landing + 1, self._what.item, x)
            if node > 0:
                self._travel(sends, self._before, self._final, landing - 1, self._what.item, x)
                self._travel(receives, self._before, self._incoming, adding + 1, self._wide, x)
            pending = self._moves.exchange(sends, receives)
            if 0 <= adding < count:
                self._add(adding, x)
            if 0 <= landing < count:
                self._land(landing, out)
            pending.wait()

    def _elements(self, block: int, x: Any) -> int:
        """Of a shard of that block."""
        length = min(self._block, len(x) - block * self._block)
        return -(-length // (self._what.item * self._here))

    def _travel(
        self, parts: list[Part], rank: int, buffers: list[Any], block: int, item: int, x: Any
    ) -> None:
        if 0 <= block < self._count:
            data = buffers[block % len(buffers)][: self._elements(block, x) * item]
            parts.append(Part(rank, data))

    def _add(self, block: int, x: Any) -> None:
        moves, what, here = self._moves, self._what, self._here
        given = _padded(moves, x[block * self._block : (block + 1) * self._block], what.item, here)
        n = len(given) // here
        staged = moves.space.scratch("everyone's", len(given))
        moves.inside("all_to_all", given.reshape(here, n), staged.reshape(here, n))
        sources = list(_rows(staged, here))
        elements = n // what.item
        prior = self._incoming[block % 2][: elements * self._wide] if self._node > 0 else None
        if prior is not None and what.exact:
            sources, prior = [prior, *sources], None
        if self._node == self._last:
            out, ranks = self._final[block % 3][:n], what.ranks
        else:
            out = self._partial[block % 2][: elements * self._wide]
            ranks = what.ranks if what.exact else 0
        moves.space.combine(out, prior, sources, what.dtype, what.op, ranks)

    def _land(self, block: int, out: Any) -> None:
        moves, here = self._moves, self._here
        taken = out[block * self._block : (block + 1) * self._block]
        n = self._elements(block, out) * self._what.item
        whole = taken if n * here == len(taken) else moves.space.scratch("whole", n * here)
        moves.inside("all_gather", self._final[block % 3][:n], whole.reshape(here, n))
        if whole is not taken:
            moves.space.copy(taken, whole[: len(taken)])
