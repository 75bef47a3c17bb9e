"""How a matmul is cut into chunks: the same way each time for a shape and a number of ranks, since bits may
depend on it. A chunk is a panel: a range of rows, or of columns.

A GPU works on tiles of the product in waves, a tile on each SM. A chunk whose last wave is nearly empty costs
as much as one whose last wave is full. Therefore the plan takes the most chunks that cost no further wave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

Ranges = tuple[range, ...]

TILE_ROWS, TILE_COLUMNS = 128, 256  # of the tile that matmuls of 16-bit floats take on an H100
MOST_CHUNKS = 8
# A chunk costs some 3 us beyond its part of a whole matmul. A wave of tiles along so many bytes takes some
# 90 us on an H100: the least that a chunk may take for these 3 us to be 3 %.
LEAST_BYTES = 16384
_MORE_WAVES = 1.02


def shares(rows: int, ranks: int, unit: int = 1) -> Ranges:
    """Returns each rank's rows, as torch.chunk cuts them: the last ranks may have fewer, or none.

    unit: rows that stay together.
    """
    block = -(-(rows // max(unit, 1)) // ranks) * unit
    return tuple(range(min(rank * block, rows), min((rank + 1) * block, rows)) for rank in range(ranks))


def evenly(extent: range, chunks: int, tile: int = TILE_ROWS) -> Ranges:
    """Returns at most `chunks` panels of one size, of whole tiles if a panel is longer than a tile."""
    size = max(1, -(-len(extent) // chunks))
    if size > tile:
        size = -(-size // tile) * tile
    return tuple(extent[begin : begin + size] for begin in range(0, len(extent), size))


def by_shares(owned: Ranges, chunks: int) -> Ranges:
    """Returns panels of whole shares, or of parts of a share if there are more chunks than ranks."""
    ranks = len(owned)
    if chunks <= ranks:
        together = -(-ranks // chunks)
        groups = (owned[first : first + together] for first in range(0, ranks, together))
        panels = [range(group[0].start, group[-1].stop) for group in groups]
    else:
        panels = [part for share in owned for part in evenly(share, -(-chunks // ranks))]
    return tuple(panel for panel in panels if panel)


@lru_cache
def orders(panels: Ranges, owned: Ranges, own_last: bool = False) -> tuple[Ranges, ...]:
    """Returns for each rank the panels from the first that has rows of its own, in the order of the ring.

    own_last: from the one after the last such panel.
    """
    found = []
    for rank, mine in enumerate(owned):
        own = [i for i, panel in enumerate(panels) if overlap(panel, mine)]
        if not own:  # the rank has no rows
            own = [rank * len(panels) // len(owned)]
        first = own[-1] + 1 if own_last else own[0]
        found.append((*panels[first:], *panels[:first]))
    return tuple(found)


def overlap(a: range, b: range) -> range:
    """Returns what is in both."""
    begin = max(a.start, b.start)
    return range(begin, max(begin, min(a.stop, b.stop)))


def waves(rows: int, columns: int, sms: int) -> int:
    """Returns the waves of tiles of a matmul."""
    return -(-(-(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)) // sms)


@lru_cache
def of_shares(owned: Ranges, columns: tuple[int, ...], depth: int, sms: int) -> Ranges:
    """Returns the planned panels of rows that are shared out. columns: of each product."""
    cuts = (by_shares(owned, number) for number in range(1, max(MOST_CHUNKS, len(owned)) + 1))
    return best(cuts, lambda panel: sum(waves(len(panel), one, sms) for one in columns), depth)


@lru_cache
def of_all(rows: int, columns: int, depth: int, sms: int, split: str) -> tuple[str, Ranges]:
    """Returns m and the planned panels of rows, or n and those of columns. split: empty: n if rows cannot be
    cut, but columns can."""
    numbers = range(1, MOST_CHUNKS + 1)
    by_rows = best(
        (evenly(range(rows), number) for number in numbers),
        lambda panel: waves(len(panel), columns, sms),
        depth,
    )
    by_columns = best(
        (evenly(range(columns), number, TILE_COLUMNS) for number in numbers),
        lambda panel: waves(rows, len(panel), sms),
        depth,
    )
    if split == "n" or (not split and len(by_rows) == 1 < len(by_columns)):
        return "n", by_columns
    return "m", by_rows


def best(cuts: Iterable[Ranges], waves_of: Callable[[range], int], depth: int) -> Ranges:
    """Returns the cut with the most panels that takes hardly more waves than the first, which is the whole.

    depth: the bytes of a row of A.
    """
    chosen: Ranges = ()
    whole = 0
    for panels in cuts:
        costs = [waves_of(panel) for panel in panels]
        if not chosen:
            chosen, whole = panels, sum(costs)
        elif (
            len(panels) > len(chosen)
            and sum(costs) <= whole * _MORE_WAVES
            and min(costs) * depth >= LEAST_BYTES
        ):
            chosen = panels
    return chosen
