"""`unisono scaling` as tables."""

from __future__ import annotations

from unisono.records import text
from unisono.records.vocabulary import title

from . import analysis
from .content import Table
from .model import Model


def kinds(model: Model) -> list[str]:
    """weak, strong: those that were measured on several numbers of ranks."""
    return list(dict.fromkeys(one.kind for one in analysis.efficiencies(model)))


def table(model: Model, kind: str) -> Table:
    """A row for each case and backend, a column for each number of ranks: efficiency and median time."""
    curves = [one for one in analysis.efficiencies(model) if one.kind == kind]
    columns = sorted({point.row.key.case.ranks for one in curves for point in one.points})
    rows = []
    for one in curves:
        cells = {p.row.key.case.ranks: _point_text(p) for p in one.points}
        key = one.points[0].row.key
        parts = [key.case.mode, key.case.memory, *model.machine_if_several(key.machine)]
        head = [f"{title(key.case)} {key.case.dtype}", text.size(one.bytes), ", ".join(parts), one.backend]
        rows.append([*head, *(cells.get(ranks, text.MISSING) for ranks in columns)])
    head = ["Collective", "Bytes", "Where", "Backend"]
    names = [_ranks_text(model, kind, ranks) for ranks in columns]
    return Table([*head, *names], rows, frozenset(range(4, 4 + len(columns))))


def _point_text(point: analysis.Point) -> str:
    return f"{text.percent(point.efficiency.median)} ({text.time(point.row.interval.median)})"


def _ranks_text(model: Model, kind: str, ranks: int) -> str:
    """`8 ranks`, or `8 ranks on 2 nodes`."""
    sources = {p.row.source for one in analysis.efficiencies(model) if one.kind == kind for p in one.points}
    runs = [run for source in sources for run in model.sources[source].runs if run.ranks == ranks]
    nodes = max((len(set(run.nodes)) for run in runs), default=0)
    return text.count(ranks, "rank") + (f" on {nodes} nodes" if nodes > 1 else "")
