"""Sums across nodes, in rank order: every algorithm gives the bits of a communicator on one node.

- `one_shot`: everyone gets every input and combines all of them. One step between nodes.
- `two_shot`: rank r gets everyone's r-th shard and combines it; the sums go to everyone (R. Rabenseifner,
  Optimization of Collective Reduction Operations, ICCS 2004).
- `chain`: partial sums travel from node to node (chain.py). It needs nodes whose ranks are consecutive, and
  as many on each.

A reduce_scatter is the first half of a two_shot, and a reduce's second half goes to the root alone; both take
two_shot or the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from . import chain
from .engine import Part, Pending
from .moves import Moves
from .shards import Sum, cut, padded

__all__ = ["ALGORITHMS", "Sum", "all_reduce", "choose", "reduce", "reduce_scatter"]

ALGORITHMS = {
    "all_reduce": ("one_shot", "two_shot", "chain"),
    "reduce": ("two_shot", "chain"),
    "reduce_scatter": ("two_shot", "chain"),
}
ONE_SHOT_BYTES = 32 << 10  # up to here everyone gets everything
CHAIN_BYTES = 8 << 20  # from here on in a chain, where it saves traffic
BLOCK_BYTES = 512 << 10  # of the input, for each rank, that one_shot and two_shot take at once
_Steps = Iterator[None]  # what becomes of a block; it yields where it would wait for other nodes
_ENDED = object()


def choose(collective: str, moves: Moves, size: int, wide: float = 1, root: int = 0) -> str:
    """The algorithm for inputs of `size` bytes, whose partial sums are `wide` times as large."""
    place = moves.topology
    if collective == "all_reduce":
        if size <= ONE_SHOT_BYTES or place.size == 2:
            return "one_shot"
        # with a rank a node, both send an input's size; the chain one way after the other
        return "chain" if size >= CHAIN_BYTES and place.uniform and len(place.local) > 1 else "two_shot"
    if size < CHAIN_BYTES or not place.uniform:
        return "two_shot"
    # What the busiest node takes in, or sends, in inputs' sizes. two_shot: of the inputs of other nodes a
    # shard for each of its ranks, and at the root the sums. The chain: partial sums, and on a node within it
    # that gets them the sums, too; each node begins 2 steps later than the one before.
    here, last = len(place.local), len(place.nodes) - 1
    steps = -(-size // chain.BLOCK_BYTES)
    late = (steps + 2 * last) / steps
    if collective == "reduce":
        two_shot = (here + 1) * last / (last + 1)
        chained = wide + (0 < place.node_of[root] < last)
    else:
        two_shot = here * last / (last + 1)
        chained = wide + (1 / (last + 1) if last > 1 else 0)
    return "chain" if late * chained < two_shot else "two_shot"


def all_reduce(moves: Moves, x: Any, out: Any, what: Sum, algorithm: str | None) -> None:
    """The combination of everyone's `x` to everyone's `out`, which may be `x`."""
    match algorithm or choose("all_reduce", moves, len(x)):
        case "one_shot":
            _staggered(_one_shot(moves, *block, what) for block in _blocks(x, out, what))
        case "two_shot":
            _staggered(_two_shot(moves, *block, what) for block in _blocks(x, out, what))
        case _:
            chain.AllReduce(moves, what, x, out).run()


def reduce_scatter(moves: Moves, x: Any, out: Any, what: Sum, algorithm: str | None) -> None:
    """Rank r gets the combination of everyone's r-th block."""
    if (algorithm or choose("reduce_scatter", moves, len(x), what.wide / what.item)) == "chain":
        return chain.ReduceScatter(moves, what, x, out).run()
    shards, pending = _shards(moves, x, what, 0)
    pending.wait()
    moves.space.combine(out, None, shards, what.dtype, what.op, what.ranks)


def reduce(moves: Moves, x: Any, out: Any, what: Sum, root: int, algorithm: str | None) -> None:
    """The root's `out` gets the combination of everyone's `x`; elsewhere it is None."""
    if (algorithm or choose("reduce", moves, len(x), what.wide / what.item, root)) == "chain":
        return chain.Reduce(moves, what, x, out, root).run()
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
    rows, pending = _shards(moves, padded(moves, x, what.item, what.ranks), what, slot)
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
    rows, pending = _shards(moves, padded(moves, x, what.item, what.ranks), what, slot)
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
    rows = cut(staged, what.ranks)
    if not _alone(moves):
        return rows, moves.all_gather(x, staged)
    return _exchanged(moves, rows, [x] * what.ranks)


def _shards(moves: Moves, x: Any, what: Sum, slot: int) -> tuple[Sequence[Any], Pending]:
    """This rank's shard of everyone's `x`, in rank order."""
    staged = moves.space.scratch(f"everyone's {slot}", len(x))
    rows = cut(staged, what.ranks)
    if not _alone(moves):
        return rows, moves.all_to_all(x, staged, slot)
    return _exchanged(moves, rows, cut(x, what.ranks))


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
