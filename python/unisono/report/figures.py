"""Decides which panels of charts stand in the report, once for page and pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from . import matmuls
from .analysis import efficiencies, group_by, workload_costs
from .model import Model
from .payload import DIMENSIONS, Json, costs, efficiency_panels, in_common, results

BANDWIDTH, LATENCY, SPREAD = (
    "bandwidth-panels",
    "latency-panels",
    "spread-panels",
)  # ids of elements of the page
EXPERTS = {BANDWIDTH: "experts-bandwidth", LATENCY: "experts-time"}  # where those of all shapes stand
_MOST_SIZES = 10  # for which a chart of the spread is readable
_MOST_TICKS = 7  # for which a panel has room


@dataclass(frozen=True)
class Figure:
    """Holds a chart: its place, its template, its rows, and what it changes in the template."""

    place: str
    template: str
    rows: list[Json]
    title: str
    detail: str = ""
    height: int | None = None  # points; None: as the template says
    sizes: list[int] = field(default_factory=list)  # ticks of the axis of sizes, if the template has one
    decades: bool = True  # whether ticks at 1, 2, 5 suit the axis of times
    choice: Json = field(default_factory=dict)  # the values of DIMENSIONS for which the figure is shown


def fits(properties: Json, choice: Json) -> bool:
    """Returns whether a row or figure has the chosen values; without a property it fits every choice."""
    return all(properties.get(name) in (None, value) for name, value in choice.items())


def panels(rows: list[Json]) -> list[Figure]:
    """Returns the panels of bandwidth, latency and spread: one for each collective and choice."""
    found = []
    groups = group_by(rows, lambda row: (row["collective"], *(row[name] for name in DIMENSIONS)))
    for (collective, *values), own in groups.items():
        choice = {name: value for name, value in zip(DIMENSIONS, values, strict=True) if value is not None}
        names = collective, choice.get("op", "")
        few = _few_sizes(own)
        decades = _decades([row[end] / row["median"] for row in few for end in ("min", "max")])
        found.append(Figure(SPREAD, "spread", few, *names, 170, decades=decades, choice=choice))
        sized = [row for row in own if row["bytes"]]
        sizes = sorted({row["column"] for row in sized})
        ticks = sizes[:: math.ceil(len(sizes) / _MOST_TICKS) or 1]
        decades = _decades([row[end] for row in sized for end in ("low", "high")])
        by = "_by_tokens" if own[0]["shape"] else ""
        for place, template in ((BANDWIDTH, f"bandwidth{by}"), (LATENCY, f"latency{by}")) if sized else ():
            if place == BANDWIDTH and not any(row["busbw"] for row in sized):
                continue
            found.append(Figure(place, template, sized, *names, 210, ticks, decades, choice))
    return found


def fixed(model: Model) -> list[Figure]:
    """Returns the charts of mixture of experts, workloads and scaling, which do not depend on a choice."""
    found = experts(model)
    for name, detail, rows in matmuls.bars(model):
        found.append(Figure("matmul-bands", "overlap", rows, name, detail))
    for number, cost in enumerate(workload_costs(model)):
        found.append(Figure(f"workload-{number}", "bars", costs(cost), f"Time per {cost.workload.unit}"))
    for kind, curves in group_by(efficiencies(model), lambda one: one.kind).items():
        for panel in efficiency_panels(curves):
            found.append(Figure(f"efficiency-{kind}", "efficiency", **panel, height=190))
    return found


def experts(model: Model) -> list[Figure]:
    """Returns curves by tokens of every call and shape of a mixture of experts; of bandwidth if any row comes
    from another rank."""
    sweep = {row.id for row in model.rows}
    rows = [row for row in results(model) if row["shape"] and row["id"] in sweep]
    return [
        replace(one, place=EXPERTS[one.place], detail=in_common(one.rows, model), choice={})
        for one in panels(rows)
        if one.place in EXPERTS
        and len({row["column"] for row in one.rows}) > 1
        and (one.place != BANDWIDTH or any(row["busbw"] for row in one.rows))
    ]


def _decades(values: list[float]) -> bool:
    return bool(values) and max(values) >= 10 * min(values)


def _few_sizes(rows: list[Json]) -> list[Json]:
    """Returns the rows of a few sizes, evenly spaced, the first and the last included."""
    columns = sorted({row["column"] for row in rows})
    last = _MOST_SIZES - 1
    if len(columns) > _MOST_SIZES:
        columns = [columns[round(i * (len(columns) - 1) / last)] for i in range(_MOST_SIZES)]
    return [row for row in rows if row["column"] in columns]
