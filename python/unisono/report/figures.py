"""Decides which charts stand in the report: on the page for each choice that its reader can make, in the
pictures for the first one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from .analysis import efficiencies, group_by, workload_costs
from .model import Model
from .payload import Json, costs, dimensions, efficiency_panels

HEAT, BANDWIDTH, LATENCY = "heat", "bandwidth-panels", "latency-panels"  # ids of elements of the page
VARIATION, SPREAD, SHARES = "cv", "spread-panels", "sol-grid"
_MOST_SIZES = 10  # of a chart of the spread, which is readable for about so many
_MOST_TICKS = 7


@dataclass(frozen=True)
class Figure:
    """Holds one chart: its place, its template, its rows, and what it changes in the template."""

    place: str
    template: str
    rows: list[Json]
    title: str = ""
    detail: str = ""
    height: int | None = None  # points; None: as the template says
    sizes: list[int] = field(default_factory=list)  # ticks of the axis of sizes, if the template has one
    decades: bool = True  # whether ticks at 1, 2, 5 suit the axis of times


def choices(rows: list[Json]) -> Iterator[Json]:
    """Yields the choices of a value for each dimension that at least one row fits."""
    values = {one["name"]: one["values"] for one in dimensions(rows)}
    for chosen in itertools.product(*values.values()):
        choice = dict(zip(values, chosen, strict=True))
        if any(fits(row, choice) for row in rows):
            yield choice


def fits(row: Json, choice: Json) -> bool:
    """Returns whether a row has the chosen values. A row without a property fits every choice of it."""
    return all(row[name] in (None, value) for name, value in choice.items())


def figures(rows: list[Json], cells: list[Json], choice: Json) -> list[Figure]:
    """Returns the charts of a choice from rows of payload.results and payload.heat."""
    chosen = [row for row in rows if fits(row, choice)]
    others = {name: value for name, value in choice.items() if name not in ("mode", "memory")}
    found = _heat([cell for cell in cells if fits(cell, others)])
    for collective, own in group_by(chosen, lambda row: str(row["collective"])).items():
        names = collective, ", ".join(sorted({row["op"] for row in own if row["op"]}))
        sized = [row for row in own if row["bytes"]]
        sizes = sorted({row["column"] for row in sized})
        ticks = sizes[:: math.ceil(len(sizes) / _MOST_TICKS) or 1]
        for place, template in ((BANDWIDTH, "bandwidth"), (LATENCY, "latency")):
            decades = _decades([row[end] for row in sized for end in ("low", "high")])
            found += [Figure(place, template, sized, *names, 210, ticks, decades)] if sized else []
        few = _few_sizes(own)
        decades = _decades([row[end] / row["median"] for row in few for end in ("min", "max")])
        found.append(Figure(SPREAD, "spread", few, *names, 170, decades=decades))
    for place, metric in ((VARIATION, "cv"), (SHARES, "sol")):
        measured = [row for row in chosen if row[metric] is not None]
        found += [Figure(place, metric, measured)] if measured else []
    return found


def fixed(model: Model) -> list[Figure]:
    """Returns the charts of workloads and scaling, which do not depend on a choice."""
    found = []
    for number, cost in enumerate(workload_costs(model)):
        title = f"Time per {cost.workload.unit}"
        found += [Figure(f"workload-{number}", "bars", costs(cost), title)]
    for kind, curves in group_by(efficiencies(model), lambda one: one.kind).items():
        for panel in efficiency_panels(curves):
            found += [Figure(f"efficiency-{kind}", "efficiency", **panel, height=190)]
    return found


def _decades(values: list[float]) -> bool:
    return bool(values) and max(values) >= 10 * min(values)


def _few_sizes(rows: list[Json]) -> list[Json]:
    """Returns the rows of a few sizes, evenly spaced, the first and the last included."""
    columns = sorted({row["column"] for row in rows})
    last = _MOST_SIZES - 1
    if len(columns) > _MOST_SIZES:
        columns = [columns[round(i * (len(columns) - 1) / last)] for i in range(_MOST_SIZES)]
    return [row for row in rows if row["column"] in columns]


def _heat(cells: list[Json]) -> list[Figure]:
    """Returns a heatmap for each mode and kind of memory; what has no memory stands in each."""
    found = []
    for mode, members in group_by(cells, lambda cell: str(cell["mode"])).items():
        for memory in list(dict.fromkeys(cell["memory"] for cell in members if cell["memory"])) or [None]:
            own = [cell for cell in members if cell["memory"] in (None, memory)]
            found.append(Figure(HEAT, "heat", own, mode, f"{memory} buffers" if memory else ""))
    return found
