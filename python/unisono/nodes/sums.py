"""Sums across nodes, in rank order: every algorithm gives the bits of a communicator on one node.

- `one_shot`: everyone gets every input and combines all of them; of a reduce, the root alone. One step
  between nodes.
- `two_shot`: rank r gets everyone's r-th shard and combines it; the sums go to everyone (R. Rabenseifner,
  Optimization of Collective Reduction Operations, ICCS 2004).
- `chain`: partial sums travel from node to node (chain.py). It needs nodes whose ranks are consecutive, and
  as many on each.

A reduce_scatter is the first half of a two_shot, and a reduce's second half goes to the root alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from . import chain
from .moves import Moves
from .shards import Steps, Sum, everyones, everyones_at, everyones_shards, padded, staggered

__all__ = ["ALGORITHMS", "Sum", "all_reduce", "choose", "reduce", "reduce_scatter"]

ALGORITHMS = {
    "all_reduce": ("one_shot", "two_shot", "chain"),
    "reduce": ("one_shot", "two_shot", "chain"),
    "reduce_scatter": ("two_shot", "chain"),
}
ONE_SHOT_BYTES = 256 << 10  # of all inputs: up to here they go as they are to everyone, or to the root
CHAIN_BYTES = 8 << 20  # from here on in a chain, where it saves traffic


def choose(collective: str, moves: Moves, size: int, wide: float = 1, root: int = 0) -> str:
    """The algorithm for inputs of `size` bytes, whose partial sums are `wide` times as large."""
    place = moves.topology
    here, last = len(place.local), len(place.nodes) - 1
    if collective != "reduce_scatter" and (size * place.size <= ONE_SHOT_BYTES or place.size == 2):
        return "one_shot"
    if size < CHAIN_BYTES or not place.uniform:
        return "two_shot"
    # What the busiest node takes in, or sends, in inputs' sizes. two_shot: of the inputs of other nodes a
    # shard for each of its ranks, and the sums, but of a reduce_scatter. The chain: partial sums, and on a
    # node within it that gets them the sums, too.
    two_shot = (here + (collective != "reduce_scatter")) * last / (last + 1)
    if collective == "all_reduce":  # of which a chain keeps both directions busy, and copies less
        return "chain" if wide + (last > 1) <= two_shot else "two_shot"
    if collective == "reduce":
        within = float(0 < place.node_of[root] < last)
    else:
        within = 1 / (last + 1) if last > 1 else 0.0
    steps = -(-size // chain.BLOCK_BYTES)
    late = (steps + 2 * last) / steps  # each node begins 2 steps later than the one before
    return "chain" if late * (wide + within) < two_shot else "two_shot"


def all_reduce(moves: Moves, x: Any, out: Any, what: Sum, algorithm: str | None) -> None:
    """The combination of everyone's `x` to everyone's `out`, which may be `x`."""
    match algorithm or choose("all_reduce", moves, len(x), what.wide / what.item):
        case "one_shot":
            staggered(partial(_one_shot, moves, what), x, out, what)
        case "two_shot":
            staggered(partial(_two_shot, moves, what), x, out, what)
        case _:
            chain.AllReduce(moves, what, x, out).run()


def reduce_scatter(moves: Moves, x: Any, out: Any, what: Sum, algorithm: str | None) -> None:
    """Rank r gets the combination of everyone's r-th block."""
    if (algorithm or choose("reduce_scatter", moves, len(x), what.wide / what.item)) == "chain":
        return chain.ReduceScatter(moves, what, x, out).run()
    shards, pending = everyones_shards(moves, x, what, 0)
    pending.wait()
    moves.space.combine(out, None, shards, what.dtype, what.op, what.ranks)


def reduce(moves: Moves, x: Any, out: Any, what: Sum, root: int, algorithm: str | None) -> None:
    """The root's `out` gets the combination of everyone's `x`; elsewhere it is None."""
    taken = x if out is None else out  # read by the root alone
    match algorithm or choose("reduce", moves, len(x), what.wide / what.item, root):
        case "one_shot":
            staggered(partial(_at_root, moves, what, root), x, taken, what)
        case "two_shot":
            staggered(partial(_to_root, moves, what, root), x, taken, what)
        case _:
            chain.Reduce(moves, what, x, out, root).run()


def _one_shot(moves: Moves, what: Sum, slot: int, x: Any, out: Any) -> Steps:
    rows, pending = everyones(moves, x, what, slot)
    yield
    pending.wait()
    moves.space.combine(out, None, rows, what.dtype, what.op, what.ranks)


def _two_shot(moves: Moves, what: Sum, slot: int, x: Any, out: Any) -> Steps:
    rows, pending = everyones_shards(moves, padded(moves, x, what.item, what.ranks), what, slot)
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


def _at_root(moves: Moves, what: Sum, root: int, slot: int, x: Any, out: Any) -> Steps:
    rows, pending = everyones_at(moves, x, what, slot, root)
    yield
    pending.wait()
    if rows:
        moves.space.combine(out, None, rows, what.dtype, what.op, what.ranks)


def _to_root(moves: Moves, what: Sum, root: int, slot: int, x: Any, out: Any) -> Steps:
    rows, pending = everyones_shards(moves, padded(moves, x, what.item, what.ranks), what, slot)
    yield
    pending.wait()
    n = len(rows[0])
    shard = moves.space.scratch("shard", n)
    moves.space.combine(shard, None, rows, what.dtype, what.op, what.ranks)
    here = moves.topology.rank == root
    whole = moves.space.scratch("whole", n * what.ranks) if here else None
    moves.gather(shard, whole, root).wait()
    if whole is not None:
        moves.space.copy(out, whole[: len(out)])
