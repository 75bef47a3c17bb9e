"""Quantised sums across nodes: the bits of `wire=` on one node, whose docstring says what they are.

Two shots, block by block, as two_shot of sums.py: every rank gives everyone's shard of its input in the wire
form, sums its own shard of all of them, and gives the sum in the wire form to everyone. What travels between
nodes is a byte for each element, and one for each block of 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from .. import _core
from .moves import Moves
from .shards import Steps, Sum, everyones_shards, staggered
from .space import WIRE_BLOCK, Quantised

__all__ = ["all_reduce"]


def all_reduce(moves: Moves, x: Any, out: Any, what: Sum, wire: str) -> None:
    """The quantised sum or mean of everyone's `x` to everyone's `out`, which may be `x`."""
    form = Quantised(wire, what.dtype, what.op)
    staggered(partial(_two_shot, moves, what, form), x, out, what)


def _two_shot(moves: Moves, what: Sum, form: Quantised, slot: int, x: Any, out: Any) -> Steps:
    """Shards are whole blocks of 32 elements, but for what there is of the last."""
    space, rank = moves.space, moves.topology.rank
    count = len(x) // what.item
    shard = -(-count // (WIRE_BLOCK * what.ranks)) * WIRE_BLOCK
    n = _core.wire_bytes(shard)

    def cuts(coded: Any, array: Any) -> Iterator[tuple[Any, Any, int]]:
        for owner in range(what.ranks):
            begin, some = owner * shard, min(shard, count - owner * shard)
            if some > 0:
                piece = coded[owner * n :][: _core.wire_bytes(some)]
                yield piece, array[begin * what.item : (begin + some) * what.item], some

    given = space.scratch(f"given {slot}", n * what.ranks)
    for piece, elements, some in cuts(given, x):
        space.encode(piece, elements, some, form)
    rows, pending = everyones_shards(moves, given, what, slot)
    yield
    pending.wait()
    whole = space.scratch(f"whole {slot}", n * what.ranks)
    mine, some = whole[rank * n : (rank + 1) * n], min(shard, count - rank * shard)
    if some > 0:
        size = _core.wire_bytes(some)
        space.combine_encoded(mine[:size], [row[:size] for row in rows], some, form)
    pending = moves.all_gather(mine, whole)
    yield
    pending.wait()
    for piece, elements, some in cuts(whole, out):
        space.decode(elements, piece, some, form)
