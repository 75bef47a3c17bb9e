"""What the links between GPUs carry, as tables: a summary by engine and pattern, and a matrix of pairs for
each engine."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.records import Link, text

from . import analysis, theme
from .content import Table
from .model import Model
from .payload import Json

ENGINES = {
    "copy_engine": "copy engine",
    "sm_load": "SM loads",
    "sm_store": "SM stores",
    "bulk_store": "bulk copies of SMs",
    "flag": "flag",
}
PATTERNS = {
    "pair": "one pair, one way",
    "ring": "ring",
    "all_pairs": "all pairs",
    "round_trip": "round trip of a flag",
}


@dataclass(frozen=True)
class Matrix:
    """Pairs of GPUs or ranks: a row for each sender, a column for each receiver. A cell has its text and the
    class of its colour (of theme's scale `v`: how much worse it is than the best pair), both empty where
    nothing was measured."""

    title: str
    names: list[str]  # of the rows and of the columns
    cells: list[list[tuple[str, str]]]


def engine_name(engine: str) -> str:
    return ENGINES.get(engine, engine)


def summary(model: Model) -> Table:
    """A row for each engine in each pattern, pairs put together."""
    rows = []
    groups = analysis.group_by(model.links, lambda item: (item[0], item[1].engine, item[1].pattern))
    for (machine, engine, pattern), members in groups.items():
        links = [link for _, link in members]
        timed = pattern == "round_trip"
        values = sorted(_value(link) for link in links)
        name = ", ".join([engine_name(engine), *model.machine_if_several(machine)])
        middle = statistics.median(values)
        ends = (values[0], values[-1]) if len(links) > 1 else _ends(links[0])
        show = text.time if timed else text.gbps
        blocks = links[0].blocks
        rows.append(
            [
                name,
                PATTERNS.get(pattern, pattern),
                str(links[0].devices),
                text.size(links[0].bytes),
                text.MISSING if blocks is None else str(blocks),
                f"{show(middle)}" if timed else f"{show(middle)} GB/s",
                f"{show(ends[0])} to {show(ends[1])}",
            ]
        )
    head = ["Engine", "Pattern", "GPUs", "Transfer", "Blocks", "Each GPU sends", "Range"]
    return Table(head, rows, frozenset({2, 3, 4, 5, 6}))


def _value(link: Link) -> float:
    return float(link.gbps if link.gbps is not None else link.round_trip_us or 0.0)


def _ends(link: Link) -> tuple[float, float]:
    return (min(link.samples), max(link.samples)) if link.samples else (_value(link), _value(link))


def matrices(model: Model) -> list[Matrix]:
    """One for each engine whose pairs were measured, and one for the round trips."""
    found = []
    for (machine, engine), members in _pairs(model).items():
        devices = _devices(members)
        timed = members[0].pattern == "round_trip"
        best = (min if timed else max)(_value(link) for link in members)
        by_pair = {(link.source, link.target): _value(link) for link in members}
        values = [[cell(by_pair.get((row, column)), best, timed) for column in devices] for row in devices]
        unit = "µs" if timed else "GB/s"
        title = [engine_name(engine), PATTERNS[members[0].pattern], unit, *model.machine_if_several(machine)]
        found.append(Matrix(", ".join(title), [f"GPU {device}" for device in devices], values))
    return found


def _pairs(model: Model) -> dict[tuple[int, str], list[Link]]:
    single = [item for item in model.links if item[1].pattern in ("pair", "round_trip")]
    groups = analysis.group_by(single, lambda item: (item[0], item[1].engine))
    return {key: [link for _, link in members] for key, members in groups.items()}


def _devices(links: Sequence[Link]) -> list[int]:
    ends = {link.source for link in links} | {link.target for link in links}
    return sorted(device for device in ends if device is not None)


def cell(value: float | None, best: float, timed: bool) -> tuple[str, str]:
    """The text and the class of a value, a time or a bandwidth, beside the best one."""
    if value is None:
        return "", ""
    worse = value / best - 1.0 if timed else 1.0 - value / best
    return text.digits(value), f"v{bisect.bisect_right(theme.VARIATION_STEPS, worse)}"


def cells(matrix: Matrix) -> list[Json]:
    """The cells of a matrix as rows of charts.pairs."""
    return [
        {"source": source, "target": target, "text": number, "class": int(name[1:])}
        for source, row in zip(matrix.names, matrix.cells, strict=True)
        for target, (number, name) in zip(matrix.names, row, strict=True)
        if number
    ]
