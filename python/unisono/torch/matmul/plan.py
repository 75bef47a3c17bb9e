"""How a matmul is cut into chunks: the same way each time for a shape and a number of ranks, since bits may
depend on it. A chunk is a panel: a range of rows, or of columns.

A GPU works on tiles of the product in waves, a tile on each SM, and the last wave leaves SMs idle. Each chunk
also costs its start, and a part that travels its copy. The plan takes the cut that ends first by this
reckoning (docs/notes/matmul.md).
"""

from __future__ import annotations

from functools import lru_cache

Ranges = tuple[range, ...]

TILE_ROWS, TILE_COLUMNS = 128, 256  # of the widest tile that matmuls of 16-bit floats take on an H100
_WIDTHS = (64, 80, 96, 128, 160, 192, 224, 256)  # of their tiles
_NARROW = 0.05  # what a tile of half the width costs beyond half
MOST_CHUNKS = 8
START_US = 4.0  # of a chunk
_READ_RATE = 3e6  # bytes a microsecond at which a chunk, also of few rows, reads all of B, on an H100
WAVE_US = 90 / 16384  # a wave's time by the bytes of a row of A, on an H100
_LEAST_PART = 0.75  # of the longest panel, the shortest one
# On H200s that NVLink joins; bytes a microsecond of each GPU, and microseconds.
_PUT_RATE, _PUT_US = 380e3, 8.0  # by copy engines
_KERNEL_RATE, _KERNEL_US = 300e3, 10.0  # of a collective by itself
_BEGIN_US, _WAIT_US = 5.0, 3.0  # of a round, and before what has come is used
_LEAST_GAIN = 0.98  # of the time before, for more chunks
_SUM_RATE = 3e6  # of bytes read and written


@lru_cache
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


@lru_cache
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
    """Returns the waves that a matmul costs: whole ones of its best tiles, in waves of the widest ones."""

    def cost(width: int) -> float:
        tiles = -(-rows // TILE_ROWS) * -(-columns // width)
        narrow = TILE_COLUMNS / width - 1
        return -(-tiles // sms) * width / TILE_COLUMNS * (1 + _NARROW * narrow)

    return min(map(cost, _WIDTHS))


@lru_cache
def of_shares(
    owned: Ranges, columns: tuple[int, ...], depth: int, itemsize: int, sms: int, gathers: bool
) -> Ranges:
    """Returns the planned panels of rows that are shared out.

    columns: of each product. depth: elements of a row of A; itemsize: bytes of one. gathers: rows of A
    travel, before they are multiplied; else rows of the product, behind it.
    """
    ranks, row = len(owned), (depth if gathers else sum(columns)) * itemsize

    def us(rows: int) -> float:
        by_waves = sum(waves(rows, one, sms) for one in columns) * depth * itemsize * WAVE_US
        reading = sum(columns) * depth * itemsize / _READ_RATE if rows else 0
        return max(by_waves, reading) + START_US

    def gathered(panels: Ranges) -> float:
        matmul = link = _BEGIN_US
        for panel in orders(panels, owned)[0]:
            if rows := len(panel) - len(overlap(panel, owned[0])):
                link += rows * row / _PUT_RATE + _PUT_US
                matmul = max(matmul, link) + _WAIT_US
            matmul += us(len(panel))
        return matmul

    def scattered(panels: Ranges) -> float:
        matmul = link = _BEGIN_US
        for panel in orders(panels, owned, own_last=True)[0]:
            matmul += us(len(panel))
            if rows := len(panel) - len(overlap(panel, owned[0])):
                link = max(link, matmul) + rows * row / _PUT_RATE + _PUT_US
        return max(matmul, link) + _WAIT_US + (ranks + 1) * len(owned[0]) * row / _SUM_RATE

    whole, rows = by_shares(owned, 1), owned[-1].stop
    least = us(rows) + rows * row * (ranks - 1) / ranks / _KERNEL_RATE + _KERNEL_US
    # each peer gets one copy at a time only if no panel has several shares
    for number in range(ranks, 2 * MOST_CHUNKS + 1, ranks):
        panels = by_shares(owned, number)
        if len(panels) < 2 or min(map(len, panels)) < _LEAST_PART * max(map(len, panels)):
            continue
        time = gathered(panels) if gathers else scattered(panels)
        if time < _LEAST_GAIN * least:
            whole, least = panels, time
    return whole
