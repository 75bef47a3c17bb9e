"""How a matmul is cut into chunks: the same way each time for a shape and a number of ranks, since bits may
depend on it. A chunk is a panel: a range of rows, or of columns.

A GPU works on tiles of the product in waves, a tile on each SM. Of what the last wave leaves idle, matmuls
win back a part, by measurement: half of it counts as lost here. Each chunk also costs its start.
The plan takes the most chunks that together take hardly longer than the whole (docs/notes/matmul.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

Ranges = tuple[range, ...]

TILE_ROWS, TILE_COLUMNS = 128, 256  # of the tile that matmuls of 16-bit floats take on an H100
MOST_CHUNKS = 8
START_US = 6.0  # of a further chunk
WAVE_US = 90 / 16384  # a wave's time by the bytes of a row of A, on an H100
_MOST_COST = 1.03  # of the whole
_LEAST_WAVES = 0.5  # below, nothing is won back
_LEAST_PART = 0.75  # of the longest panel, the shortest one


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


def waves(rows: int, columns: int, sms: int) -> float:
    """Returns the waves of tiles that a matmul costs."""
    tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    return max((tiles / sms + -(-tiles // sms)) / 2, _LEAST_WAVES)


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


def best(cuts: Iterable[Ranges], waves_of: Callable[[range], float], depth: int) -> Ranges:
    """Returns the cut with the most panels that hardly costs more than the first cut, which is the whole.

    depth: the bytes of a row of A.
    """

    def cost(panels: Ranges) -> float:
        return sum(map(waves_of, panels)) * depth * WAVE_US + (len(panels) - 1) * START_US

    first, *others = cuts
    fit = [
        panels
        for panels in others
        if panels
        and min(map(len, panels)) >= _LEAST_PART * max(map(len, panels))
        and cost(panels) <= _MOST_COST * cost(first)
    ]
    return max([first, *fit], key=len)
