"""The PNG plots, from the same templates as the page, in the light colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from unisono import files
from unisono.records import text

from . import analysis, charts, content, payload, studies, theme
from .model import Model, Row
from .payload import Json

_SCALE = 2.0  # pixels per point
_PANEL_WIDTH = 300
_PANEL_HEIGHT = 190
_CELL_WIDTH = 62


def write(model: Model, directory: Path) -> list[Path]:
    """Writes every plot there is data for, one file for each plot, machine and number of ranks. The names are
    stable: `bandwidth.png`, or `bandwidth_4_ranks.png` where the records hold several numbers of ranks."""
    written = []
    sweep = [row for row in model.rows if row.key.case.scaling is None]
    groups = analysis.group_by(sweep, lambda row: (row.key.machine, row.key.case.ranks))
    for (machine, ranks), rows in sorted(groups.items()):
        suffix = f"_{ranks}_ranks" if len({r for _, r in groups}) > 1 else ""
        suffix += f"_machine{machine + 1}" if len(model.machines) > 1 else ""
        for name, make in _PLOTS.items():
            spec = make(model, rows)
            if spec is not None:
                written.append(_save(spec, directory / f"{name}{suffix}.png"))
    others = {
        "workloads": _workloads(model),
        "links": _matrices("Links between the GPUs", studies.link_matrices(model)),
        "pairs": _matrices("Ping-pong by pair", studies.pair_matrices(model)),
        "efficiency_weak": _efficiency(model, "weak"),
        "efficiency_strong": _efficiency(model, "strong"),
    }
    for name, spec in others.items():
        if spec is not None:
            written.append(_save(spec, directory / f"{name}.png"))
    return written


def _save(spec: Json, path: Path) -> Path:
    version = ".".join(alt.VEGALITE_VERSION.split(".")[:2])
    return files.write(path, vl_convert.vegalite_to_png(spec, vl_version=version, scale=_SCALE))


def _figure(title: str, subtitle: str, panels: list[Json], columns: int) -> Json:
    """Panels, each with its own data, as one picture."""
    config = theme.resolve(theme.config())
    config["background"] = theme.variables()["surface"]
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/{alt.SCHEMA_VERSION}.json",
        "title": {"text": title, "subtitle": subtitle, "fontSize": 17, "subtitleFontSize": 12, "offset": 18},
        "params": [{"name": "dense", "value": False}],
        "concat": panels,
        "columns": columns,
        "spacing": 28,
        "padding": 22,
        "config": config,
    }


def _panel(template: Json, rows: list[Json], title: str, **size: Any) -> Json:
    """One template with its rows, ready to stand among others."""
    spec: Json = theme.resolve(template)  # a copy
    spec.pop("params", None)  # the whole figure has them
    for part in _parts(spec):
        part.pop("data", None)  # each takes its parent's
    return {**spec, **size, "title": title, "data": {"values": rows}}


def _parts(spec: Json) -> Iterator[Json]:
    """A chart, and all that it is made of."""
    yield spec
    for part in [*spec.get("layer", []), *spec.get("vconcat", [])]:
        yield from _parts(part)


def _chosen(model: Model, rows: list[Row], mode: str) -> tuple[list[Json], str]:
    """The rows of the page's first selection, in `mode` where it was measured, and that selection in words.
    Of runs that were merged no row may have all of its values: the usual one of those left stands in."""
    columns = payload.shared_columns(model.all_rows)
    kept = [payload.result(row, columns) for row in rows]
    choice = {dimension["name"]: dimension["first"] for dimension in payload.dimensions(model, kept)}
    for name, value in {"mode": mode, **{n: v for n, v in choice.items() if n != "mode"}}.items():
        there = Counter(row[name] for row in kept if row[name] is not None)
        chosen = value if value in there else next(iter(there.most_common(1)), (value,))[0]
        kept = [row for row in kept if row[name] in (None, chosen)]
    return kept, payload.in_common(kept, model)


def _ticks(panel: Json, rows: list[Json], times: list[float]) -> Json:
    """Ticks at sizes that were measured, at most six; and Vega's own for less than a decade of times."""
    sizes = sorted({row["column"] for row in rows})
    step = -(-len(sizes) // 6)
    for layer in panel["layer"]:
        x, y = layer["encoding"].get("x", {}), layer["encoding"].get("y", {})
        if x.get("field") == "column":
            x["axis"]["values"] = sizes[::step]
        if max(times) < 10 * min(times) and y.get("axis"):
            y["axis"].pop("values", None)
    return panel


def _panels(model: Model, rows: list[Row], mode: str, title: str, metric: str) -> Json | None:
    """A panel for each collective that has sizes: `bandwidth`, `latency` or `spread`."""
    chosen, where = _chosen(model, rows, mode)
    sized = [row for row in chosen if row["bytes"] > 0]
    if metric == "spread":
        template = charts.spread(model.backends, legend=True)
    else:
        template = charts.curve(metric, model.backends, legend=True)
    panels = []
    for name, members in analysis.group_by(sized, lambda row: str(row["collective"])).items():
        own = _few_sizes(members) if metric == "spread" else members
        if metric == "spread":
            times = [row[end] / row["median"] for row in own for end in ("min", "max")]
        else:
            times = [row[end] for row in own for end in ("low", "high")]
        panel = _panel(template, own, name, width=_PANEL_WIDTH, height=_PANEL_HEIGHT)
        panels.append(_ticks(panel, own, times))
    return _figure(title, where, panels, 3) if panels else None


def _few_sizes(rows: list[Json]) -> list[Json]:
    """At most ten of the sizes, evenly spaced, the first and the last included."""
    columns = sorted({row["column"] for row in rows})
    if len(columns) > 10:
        columns = [columns[round(i * (len(columns) - 1) / 9)] for i in range(10)]
    return [row for row in rows if row["column"] in columns]


def _bandwidth(model: Model, rows: list[Row]) -> Json | None:
    return _panels(model, rows, "throughput", "Bus bandwidth by message size", "bandwidth")


def _latency(model: Model, rows: list[Row]) -> Json | None:
    return _panels(model, rows, "latency", "Time per call by message size", "latency")


def _spread(model: Model, rows: list[Row]) -> Json | None:
    title = "Spread of the samples: minimum to maximum, quartiles, over the median"
    return _panels(model, rows, "latency", title, "spread")


def _heat(model: Model, rows: list[Row]) -> Json | None:
    ranks = rows[0].key.case.ranks
    cells = [
        cell
        for cell in payload.heat(model)
        if (cell["machine"], cell["ranks"]) == (rows[0].key.machine, ranks)
    ]
    choice = {
        d["name"]: d["first"] for d in payload.dimensions(model, cells) if d["name"] not in ("mode", "memory")
    }
    cells = [cell for cell in cells if all(cell[name] in (None, value) for name, value in choice.items())]
    template = charts.heat()
    panels, widest = [], 0
    for mode, members in analysis.group_by(cells, lambda cell: str(cell["mode"])).items():
        memories = list(dict.fromkeys(cell["memory"] for cell in members if cell["memory"] is not None))
        for memory in memories or [None]:
            own = [cell for cell in members if cell["memory"] in (None, memory)]
            columns = len({cell["column"] for cell in own})
            widest = max(widest, columns)
            title = f"{mode}, {memory} buffers" if memory else mode
            panels.append(_panel(template, own, title, width=_CELL_WIDTH * columns))
    if not panels:
        return None
    title = f"Speed-up of {model.subject} over the best peer of each case"
    where = payload.in_common(cells, model)
    subtitle = f"{where}; median over median, {model.subject}'s own median below; ≈: neither confidently"
    return _figure(title, subtitle, panels, 1 if widest > 8 else 2)


def _grid(metric: str, title: str) -> Callable[[Model, list[Row]], Json | None]:
    def make(model: Model, rows: list[Row]) -> Json | None:
        chosen, where = _chosen(model, rows, "throughput" if metric == "sol" else "latency")
        kept = [row for row in chosen if row[metric] is not None]
        if not kept:
            return None
        width = _CELL_WIDTH * len({row["column"] for row in kept})
        return _figure(title, where, [_panel(charts.grid(metric), kept, "", width=width)], 1)

    return make


def _distribution(model: Model, rows: list[Row]) -> Json | None:
    """Box plot and CDF of the first collective at its smallest, middle and largest size."""
    chosen, where = _chosen(model, rows, "latency")
    collective = chosen[0]["collective"]
    own = [row for row in chosen if row["collective"] == collective]
    sizes = sorted({row["bytes"] for row in own})
    template = charts.distribution(model.backends)
    panels: list[Json] = []
    for size in dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])):
        members = [row for row in own if row["bytes"] == size]
        panel = _panel(template, distribution(model, members), f"{collective}, {members[0]['size']}")
        low, high = min(row["min"] for row in members), max(row["max"] for row in members)
        for chart in panel["vconcat"]:
            chart["width"] = _PANEL_WIDTH
        for part in _parts(panel):
            if x := part.get("encoding", {}).get("x"):  # no sample lies on the edge
                x.setdefault("scale", {"type": "log"})["domain"] = [0.98 * low, 1.02 * high]
        panels.append(panel)
    return _figure("Distribution of the samples", where, panels, 3)


def distribution(model: Model, members: list[Json]) -> list[Json]:
    """The rows of `charts.distribution` of one case's results, from all their samples."""
    by_id = {row.id: row for row in model.all_rows}
    rows: list[Json] = [{**row, "kind": "box"} for row in members]
    for row in members:
        samples = by_id[row["id"]].samples
        of = {"backend": row["backend"]}
        rows.append({**of, "kind": "curve", "value": float(samples[0]), "share": 0.0})
        for rank, value in enumerate(map(float, samples), start=1):
            rows.append({**of, "kind": "curve", "value": value, "share": rank / len(samples)})
            if not row["wlow"] <= value <= row["whigh"]:
                rows.append({**of, "kind": "out", "value": value})
    return rows


def _matrices(title: str, found: list[studies.Matrix]) -> Json | None:
    panels = [_panel(charts.pairs(one.names), studies.cells(one), one.title) for one in found]
    return _figure(title, "rows send, columns receive", panels, 2) if panels else None


def _efficiency(model: Model, kind: str) -> Json | None:
    """A panel for each collective and size, the sizes of a collective in a row where there are few."""
    found = [p for p in payload.efficiency_panels(analysis.efficiencies(model)) if p["kind"] == kind]
    if not found:
        return None
    template = charts.efficiency(model.backends, legend=True)
    panels = [
        _panel(template, one["rows"], one["title"], width=_PANEL_WIDTH, height=_PANEL_HEIGHT) for one in found
    ]
    details = text.listing(list(dict.fromkeys(one["detail"] for one in found)))
    sizes = len({one["bytes"] for one in found})
    title = f"{kind.capitalize()} scaling: efficiency against the fewest ranks"
    return _figure(title, details, panels, sizes if 2 <= sizes <= 4 else 3)


def _workloads(model: Model) -> Json | None:
    found = analysis.workload_costs(model)
    template = charts.bars(model.backends)
    panels = []
    for cost, rows in zip(found, payload.costs(found), strict=True):
        if rows:
            where = content.slice_text(cost.key, model)
            title = f"{cost.workload.title}: time per {cost.workload.unit} ({where})"
            panels.append(_panel(template, rows, title, width=620))
    return _figure("Workloads", "the sum of calls times the median of each", panels, 1) if panels else None


_PLOTS: dict[str, Callable[[Model, list[Row]], Json | None]] = {
    "speedup_heatmap": _heat,
    "bandwidth": _bandwidth,
    "latency": _latency,
    "distribution": _distribution,
    "stability": _grid("cv", "Coefficient of variation"),
    "spread": _spread,
    "sol": _grid("sol", "Bus bandwidth as a share of the measured ceiling"),
}
