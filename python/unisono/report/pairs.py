"""Ping-pong by pair, as matrices: a time at the smallest size, bandwidths at the largest."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.records import text

from . import analysis, links
from .links import Matrix
from .model import Model, Row

_TIMED = "half_round_trip"
_MODES = {
    True: ("latency", "graph", "events", "throughput"),
    False: ("throughput", "graph", "events", "latency"),
}
_NAMES = {_TIMED: "half round trip", "one_way": "one way", "bidirectional": "both ways, each"}


def matrices(model: Model) -> list[Matrix]:
    """One for each pattern and backend, where more than one pair was measured, in the mode that suits a time
    or a bandwidth best; rows send. A pair in which both send stands for its reverse as well."""
    found = []
    rows = [row for row in model.all_rows if row.key.case.pair is not None]
    for members in analysis.group_by(rows, _where).values():
        if len({row.key.case.pair for row in members}) < 2:
            continue
        timed = members[0].key.case.pattern == _TIMED
        mode = min((row.key.case.mode for row in members), key=_MODES[timed].index)
        size = (min if timed else max)(row.key.case.bytes for row in members)
        shown = [row for row in members if (row.key.case.mode, row.key.case.bytes) == (mode, size)]
        found.append(_matrix(model, shown, timed))
    return sorted(found, key=lambda matrix: list(_NAMES.values()).index(matrix.title.split(": ")[0]))


def _where(row: Row) -> tuple[object, ...]:
    c = row.key.case
    place = (row.key.machine, c.ranks, c.device, c.one_process, c.memory, c.dtype)
    return (*place, c.pattern, row.backend)


def _matrix(model: Model, rows: Sequence[Row], timed: bool) -> Matrix:
    case = rows[0].key.case
    values: dict[tuple[int, int], float] = {}
    for row in rows:
        assert row.key.case.pair is not None
        value = row.interval.median if timed else row.result.busbw_gbps
        values[row.key.case.pair] = value
        if case.pattern != "one_way":
            values.setdefault((row.key.case.pair[1], row.key.case.pair[0]), value)
    best = (min if timed else max)(values.values())
    ranks = range(case.ranks)
    cells = [[links.cell(values.get((source, target)), best, timed) for target in ranks] for source in ranks]
    parts = [
        text.count(case.ranks, "rank"),
        case.mode,
        case.memory,
        *model.machine_if_several(rows[0].key.machine),
    ]
    unit = "µs" if timed else "GB/s"
    name = _NAMES[str(case.pattern)]
    title = f"{name}: {rows[0].backend}, {text.size(case.bytes)}, {unit} ({', '.join(parts)})"
    return Matrix(title, [f"rank {rank}" for rank in ranks], cells)
