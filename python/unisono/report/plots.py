"""Writes the pictures (PNG) from the same templates as the page's charts, in the light colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vl_convert

from unisono import files
from unisono.records import text

from . import analysis, charts, figures, matmuls, payload, studies, theme
from .analysis import group_by
from .blocks import Cell, Table
from .figures import Figure
from .model import Model
from .payload import Json

_SCALE = 2.0  # pixels per point
_PANEL = {"width": 300, "height": 190}  # points
_CELL_WIDTH = 62  # points
# A picture's panels by collective: their place, and its title.
_PANELS = {
    "bandwidth": (figures.BANDWIDTH, "Bus bandwidth by message size"),
    "time": (figures.LATENCY, "Time per call by message size"),
    "spread": (figures.SPREAD, "Spread of the samples: extremes and quartiles over the median"),
}
_GRIDS = {
    "stability": ("cv", "Coefficient of variation"),
    "sol": ("sol", "Bus bandwidth as a share of the measured ceiling"),
}


def write(model: Model, directory: Path) -> list[Path]:
    """Writes every picture for which there is data. The names are stable: `bandwidth.png`, or
    `bandwidth_4_ranks.png` if the records hold several numbers of ranks; `bandwidth_machine2.png` if they
    hold several machines; `bandwidth_graph.png` if these ranks were measured in several modes."""
    return [
        files.write(
            directory / f"{name}.png",
            vl_convert.vegalite_to_png(figure, vl_version=charts.VEGA_LITE, scale=_SCALE),
        )
        for name, figure in _figures(model)
        if figure is not None
    ]


def _figures(model: Model) -> Iterator[tuple[str, Json | None]]:
    """Yields every picture by name; None without data for it."""
    sweep = {row.id for row in model.rows}
    rows = [row for row in payload.results(model) if row["id"] in sweep and row["scaling"] == "none"]
    cells = payload.heat(model)
    groups = group_by(rows, lambda row: (model.machines.index(row["machine"]), row["ranks"]))
    for (machine, ranks), own in sorted(groups.items(), key=lambda item: item[0]):
        suffix = f"_{ranks}_ranks" if len({r for _, r in groups}) > 1 else ""
        suffix += f"_machine{machine + 1}" if len(model.machines) > 1 else ""
        place = (model.machines[machine], ranks)
        mine = [cell for cell in cells if (cell["machine"], cell["ranks"]) == place]
        yield f"speedup_heatmap{suffix}", _heat(model, mine)
        by_mode = group_by(own, lambda row: str(row["mode"]))
        for mode, members in by_mode.items():
            last = f"{suffix}_{mode}" if len(by_mode) > 1 else suffix
            for name in _PANELS:
                yield name + last, _panels(model, members, name)
            for name in _GRIDS:
                yield name + last, _grid(model, members, name)
            yield f"distribution{last}", _distribution(model, members)
    yield "experts_time", _experts(model, figures.LATENCY, "Mixture of experts: time per call by tokens")
    bandwidth = "Mixture of experts: bandwidth between ranks by tokens"
    yield "experts_bandwidth", _experts(model, figures.BANDWIDTH, bandwidth)
    yield "matmuls", _matmuls(model)
    yield "workloads", _workloads(model)
    yield "links", _matrices("Links between the GPUs", studies.link_matrices(model))
    yield "pairs", _matrices("Ping-pong by pair", studies.pair_matrices(model))
    for kind in studies.scaling_kinds(model):
        yield f"efficiency_{kind}", _efficiency(model, kind)


def _figure(title: str, subtitle: str, panels: list[Json], columns: int) -> Json | None:
    """Returns panels, each with its own rows, as one picture; None without panels."""
    if not panels:
        return None
    heading = {"text": title, "subtitle": subtitle, "fontSize": 17, "subtitleFontSize": 12, "offset": 18}
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{charts.VEGA_LITE}.json",
        "title": heading,
        "params": [{"name": "dense", "value": False}],
        "concat": panels,
        "columns": columns,
        "spacing": 28,
        "padding": 22,
        "config": theme.resolve({**theme.config(), "background": "var(--surface)"}),
    }


def _panel(template: Json, rows: list[Json], title: str, **size: Any) -> Json:
    """Returns a template with its rows, ready to stand among others."""
    spec: Json = theme.resolve(template)  # a copy
    spec.pop("params", None)  # the whole figure has them
    for part in _parts(spec):
        part.pop("data", None)  # each takes its parent's
    return {**spec, **size, "title": title, "data": {"values": rows}}


def _parts(spec: Json) -> Iterator[Json]:
    """Yields a chart, and all parts of it."""
    yield spec
    for part in [*spec.get("layer", []), *spec.get("vconcat", [])]:
        yield from _parts(part)


def _choice(rows: list[Json]) -> Json:
    """Returns the page's first choice. Of merged runs no row may have all of its values; then the usual value
    of those that are left counts."""
    first = {dimension["name"]: dimension["first"] for dimension in payload.dimensions(rows)}
    for name, value in first.items():
        found = Counter(row[name] for row in rows if row[name] is not None)
        first[name] = value if value in found or not found else found.most_common(1)[0][0]
        rows = [row for row in rows if row[name] in (None, first[name])]
    return first


def _panels(model: Model, rows: list[Json], name: str) -> Json | None:
    """Returns a panel for each collective."""
    place, title = _PANELS[name]
    templates, choice = charts.templates(model.backends, legend=True), _choice(rows)
    found = [one for one in figures.panels(rows) if one.place == place and figures.fits(one.choice, choice)]
    panels = [_ticks(_panel(templates[one.template], one.rows, one.title, **_PANEL), one) for one in found]
    where = payload.in_common([row for one in found for row in one.rows], model)
    return _figure(title, where, panels, 3)


def _experts(model: Model, place: str, title: str) -> Json | None:
    """Returns a panel for each call and shape of a mixture of experts."""
    templates = charts.templates(model.backends, legend=True)
    found = [one for one in figures.experts(model) if one.place == figures.EXPERTS[place]]
    same = payload.in_common([row for one in found for row in one.rows], model)
    several = len({row["mode"] for one in found for row in one.rows}) > 1
    panels = []
    for one in found:
        row = one.rows[0]
        what = [row["shape"], row["dtype"], *([row["mode"]] if several else [])]
        heading = {"text": one.title, "subtitle": ", ".join(what)}
        panel = _panel(templates[one.template], one.rows, "", **_PANEL) | {"title": heading}
        panels.append(_ticks(panel, one))
    return _figure(title, same, panels, 3)


def _ticks(panel: Json, figure: Figure) -> Json:
    """Sets the ticks of a panel."""
    for part in _parts(panel):
        x, y = (part.get("encoding", {}).get(axis, {}) for axis in ("x", "y"))
        if x.get("axis") and figure.sizes:
            x["axis"]["values"] = figure.sizes
        if y.get("axis") and not figure.decades:
            y["axis"].pop("values", None)
    return panel


def _grid(model: Model, rows: list[Json], name: str) -> Json | None:
    metric, title = _GRIDS[name]
    choice = _choice(rows)
    shown = [row for row in rows if figures.fits(row, choice) and row[metric] is not None]
    panels = [_panel(charts.shares(metric), shown, "", width=_width(shown))] if shown else []
    return _figure(title, payload.in_common(shown, model), panels, 1)


def _heat(model: Model, cells: list[Json]) -> Json | None:
    """Returns a panel for each mode and kind of memory; what has no memory stands in each."""
    first = {d["name"]: d["first"] for d in payload.dimensions(cells) if d["name"] not in ("mode", "memory")}
    cells = [cell for cell in cells if figures.fits(cell, first)]
    panels = []
    for mode, members in group_by(cells, lambda cell: str(cell["mode"])).items():
        for memory in list(dict.fromkeys(cell["memory"] for cell in members if cell["memory"])) or [None]:
            own = [cell for cell in members if cell["memory"] in (None, memory)]
            title = f"{mode}, {memory} buffers" if memory else mode
            panels.append(_panel(charts.heat(), own, title, width=_width(own)))
    where = payload.in_common(cells, model)
    subtitle = f"{where}; median over median, {model.subject}'s own median below; ≈: neither confidently"
    columns = 1 if any(panel["width"] > 8 * _CELL_WIDTH for panel in panels) else 2
    return _figure(f"Speed-up of {model.subject} over the best peer of each case", subtitle, panels, columns)


def _width(rows: list[Json]) -> int:
    return _CELL_WIDTH * len({row["column"] for row in rows})


def _distribution(model: Model, rows: list[Json]) -> Json | None:
    """Returns box plots and cumulative shares of the first collective at its first, middle and last size."""
    choice = _choice(rows)
    rows = [row for row in rows if figures.fits(row, choice)]
    collective = rows[0]["collective"]
    own_rows = [row for row in rows if row["collective"] == collective]
    by_size = group_by(own_rows, lambda row: int(row["bytes"]))
    sizes = sorted(by_size)
    panels: list[Json] = []
    for size in dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])):
        own = by_size[size]
        title = f"{collective}, {own[0]['size']}"
        panel = _panel(charts.distribution(model.backends), _samples(model, own), title)
        low, high = min(row["min"] for row in own), max(row["max"] for row in own)
        axis = {"type": "log", "nice": False, "domain": [0.98 * low, 1.02 * high]}  # no sample on the edge
        for chart in panel["vconcat"]:
            chart["width"] = _PANEL["width"]
        for part in _parts(panel):
            if x := part.get("encoding", {}).get("x"):
                x["scale"] = axis
        panels.append(panel)
    return _figure("Distribution of the samples", payload.in_common(rows, model), panels, 3)


def _samples(model: Model, rows: list[Json]) -> list[Json]:
    """Returns the rows of charts.distribution for the results of one case, from all their samples."""
    found: list[Json] = [{**row, "kind": "box"} for row in rows]
    for row in rows:
        samples = model.all_rows[row["id"]].samples.tolist()
        name = {"backend": row["backend"]}
        found.append({**name, "kind": "curve", "value": samples[0], "share": 0.0})
        for rank, value in enumerate(samples, start=1):
            found.append({**name, "kind": "curve", "value": value, "share": rank / len(samples)})
            if not row["wlow"] <= value <= row["whigh"]:
                found.append({**name, "kind": "out", "value": value})
    return found


def _matrices(title: str, found: list[Table]) -> Json | None:
    panels = []
    for table in found:
        names = list(table.head[1:])
        cells = [
            {"source": source, "target": target, "text": cell.text, "class": int(cell.style[1:])}
            for source, *row in table.rows
            for target, cell in zip(names, row, strict=True)
            if isinstance(cell, Cell)
        ]
        panels.append(_panel(charts.pairs(names), cells, table.title))
    return _figure(title, "rows send, columns receive", panels, 2)


def _efficiency(model: Model, kind: str) -> Json | None:
    """Returns a panel for each collective and size, the sizes of a collective in a row if there are few."""
    curves = [one for one in analysis.efficiencies(model) if one.kind == kind]
    found = payload.efficiency_panels(curves)
    template = charts.efficiency(model.backends, legend=True)
    panels = [_panel(template, one["rows"], one["title"], **_PANEL) for one in found]
    details = text.listing(list(dict.fromkeys(one["detail"] for one in found)))
    sizes = len({one.bytes for one in curves})
    title = f"{kind.capitalize()} scaling: efficiency against the fewest ranks"
    return _figure(title, details, panels, sizes if 2 <= sizes <= 4 else 3)


def _matmuls(model: Model) -> Json | None:
    panels = [
        _panel(charts.overlap(model.backends, legend=True), rows, f"{name} ({where})", width=620)
        for name, where, rows in matmuls.bars(model)
    ]
    subtitle = "the band: from all of the shorter part hidden to matmul and collective one after the other"
    return _figure("Matmuls with their collective", subtitle, panels, 1)


def _workloads(model: Model) -> Json | None:
    panels = []
    for cost in analysis.workload_costs(model):
        if rows := payload.costs(cost):
            where = payload.slice_text(cost.key, model)
            title = f"{cost.workload.title}: time per {cost.workload.unit} ({where})"
            panels.append(_panel(charts.bars(model.backends), rows, title, width=620))
    return _figure("Workloads", "the sum of calls times the median of each", panels, 1)
