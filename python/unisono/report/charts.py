"""Makes the charts as templates of Vega-Lite over rows of payload.py; page and pictures use the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import vl_convert

from . import analysis, theme

Json = dict[str, Any]
VEGA_LITE: str = vl_convert.get_vegalite_versions()[-1]  # the version that page and pictures use
DATA = "rows"  # the name under which a template expects its rows
_INK = "var(--ink)"
_MUTED = "var(--ink3)"


def _units(scales: Iterable[tuple[float, float, str]]) -> str:
    """Returns the expression of an axis label; each unit has its limit (0: none) and its divisor."""
    return " : ".join(
        (f"datum.value < {limit} ? " if limit else "")
        + f"format(datum.value / {divisor}, '.3~r') + ' {unit}'"
        for limit, divisor, unit in scales
    )


_SIZE_LABEL = _units([(2**10, 1, "B"), (2**20, 2**10, "KiB"), (2**30, 2**20, "MiB"), (0, 2**30, "GiB")])
_TIMES = _units([(1, 1e-3, "ns"), (1e3, 1, "µs"), (1e6, 1e3, "ms"), (0, 1e6, "s")])
_TIME_LABEL = f"datum.value === 0 ? '0' : {_TIMES}"
# Vega keeps those of 1, 2, 5, 10, 20 … that are in range and thins them to the count. Over less than a decade
# its own ticks are better: there the users of a template take these away.
_ONE_TWO_FIVE = [float(f"{m}e{power}") for power in range(-4, 9) for m in (1, 2, 5)]
_TIP = {
    "backend": "backend",
    "size": "size",
    "t_median": "median time",
    "t_interval": "95 % interval",
    "t_busbw": "bus bandwidth, GB/s",
    "t_sol": "of the ceiling",
    "algorithm": "algorithm",
    "n": "samples",
}
_LOG = {"type": "log", "nice": False}
_LINE = {"strokeWidth": 1.8}
_CELL = {"cornerRadius": 2, "stroke": "var(--surface)", "strokeWidth": 1.5, "invalid": "show"}
_NAMES = {"title": None, "domain": False, "ticks": False}
_LARGE_NAMES = {**_NAMES, "labelColor": _INK, "labelFontSize": 12, "labelLimit": 260}


def _quantity(field: str, **more: Any) -> Json:
    return {"field": field, "type": "quantitative", **more}


def _name(field: str, **more: Any) -> Json:
    return {"field": field, "type": "nominal", **more}


def _tip(fields: Mapping[str, str]) -> list[Json]:
    return [_name(field, title=title) for field, title in fields.items()]


def _part(mark: str, style: Json, transform: Iterable[Json] = (), /, **encoding: Any) -> Json:
    steps = {"transform": list(transform)} if transform else {}
    return {**steps, "mark": {"type": mark, **style}, "encoding": encoding}


def _layers(parts: list[Json], **more: Any) -> Json:
    return {"data": {"name": DATA}, "layer": parts, **more}


def _colour(backends: list[str], legend: bool) -> Json:
    shown = {"title": None, "orient": "top", "symbolOpacity": 1} if legend else None
    return _name("backend", scale={"domain": backends, "range": theme.colours(backends)}, legend=shown)


def _bytes() -> Json:
    axis = {
        "labelExpr": _SIZE_LABEL,
        "tickCount": 6,
        "title": "message size",
        "grid": False,
        "labelOverlap": True,
    }
    return _quantity("column", scale={"type": "log", "base": 2, "nice": False}, axis=axis)


def _sizes(**axis: Any) -> Json:
    """Returns an axis of sizes as equal steps."""
    shown = {"labelAngle": 0, "labelOverlap": True, "ticks": False, **axis}
    return {"field": "t_column", "type": "ordinal", "sort": {"field": "column", "op": "min"}, "axis": shown}


def _curves(
    backends: list[str], legend: bool, x: Json, y: Json, ends: tuple[str, str], tip: Json
) -> list[Json]:
    """Returns a line with points per backend, and the band between the fields `ends`."""
    colour = _colour(backends, legend)
    shape = {**colour, "scale": {"domain": backends, "range": theme.shapes(backends)}}
    low, high = ends
    return [
        _part(
            "area", {"opacity": 0.2}, x=x, y=_quantity(low, axis=y["axis"]), y2={"field": high}, color=colour
        ),
        _part("line", _LINE, x=x, y=y, color=colour),
        _part(
            "point",
            {"filled": True, "size": 42, "opacity": 1},
            x=x,
            y=y,
            color=colour,
            shape=shape,
            tooltip=_tip(tip),
        ),
    ]


def bandwidth(backends: list[str], legend: bool = False) -> Json:
    """Shows bus bandwidth over the message size, with the ceiling as a dashed line."""
    y = _quantity("busbw", axis={"title": "bus bandwidth, GB/s", "tickCount": 5}, scale={"zero": True})
    top = {"aggregate": [{"op": "max", "field": "ceiling", "as": "top"}], "groupby": ["column"]}
    dashed = {"strokeDash": [5, 4], "strokeWidth": 1.4, "color": _MUTED}
    ceiling = _part(
        "line", dashed, [{"filter": "isValid(datum.ceiling)"}, top], x=_bytes(), y=_quantity("top")
    )
    return _layers([ceiling, *_curves(backends, legend, _bytes(), y, ("bwlow", "bwhigh"), _TIP)])


def latency(backends: list[str], legend: bool = False) -> Json:
    """Shows the time per call over the message size, both axes logarithmic."""
    axis = {"title": "time per call", "labelExpr": _TIME_LABEL, "tickCount": 7, "values": _ONE_TWO_FIVE}
    y = _quantity("median", axis=axis, scale=_LOG)
    return _layers(_curves(backends, legend, _bytes(), y, ("low", "high"), _TIP))


def efficiency(backends: list[str], legend: bool = False) -> Json:
    """Shows efficiency (logarithmic) over the number of ranks; rows of payload.efficiency_panels."""
    x = {"field": "ranks", "type": "ordinal", "axis": {"title": "ranks", "labelAngle": 0, "grid": False}}
    axis = {"title": "efficiency", "format": ".3~%", "tickCount": 5, "values": _ONE_TWO_FIVE}
    tip = {"backend": "backend", "ranks": "ranks", "t_value": "efficiency"}
    tip |= {"t_median": "median time", "t_busbw": "bus bandwidth, GB/s"}
    y = _quantity("value", axis=axis, scale=_LOG)
    return _layers(_curves(backends, legend, x, y, ("low", "high"), tip))


def _class(field: str, scale: str, steps: Iterable[float], ink: bool, absent: str) -> Json:
    """Returns the colour of a cell, or of the text on it; `absent` if there is no value."""
    colours = {"type": "threshold", "domain": list(steps), "range": theme.classes(scale, ink)}
    empty = [{"test": f"!isValid(datum.{field})", "value": absent}]
    return _quantity(field, scale=colours, legend=None, condition=empty)


def _cells(
    field: str, scale: str, words: str, y: Json, tip: Mapping[str, str], shift: str = "0"
) -> list[Json]:
    """Returns coloured cells and their text, which is `shift` (an expression) points lower.

    If the parameter `dense` is true, the text is small and has no unit."""
    steps, x = theme.STEPS[scale], _sizes(title=None, orient="top", domain=False)
    fill, ink = (
        _class(field, scale, steps, ink, absent)
        for ink, absent in ((False, "var(--raised)"), (True, "var(--ink2)"))
    )
    bare = f"replace(datum.{words}, /×| %/, '')"  # noqa: RUF001
    brief = {"calculate": f"dense ? {bare} : datum.{words}", "as": "brief"}
    style = {
        "fontSize": {"expr": "dense ? 9.5 : 11"},
        "fontWeight": 600,
        "dy": {"expr": shift},
        "invalid": "show",
    }
    return [
        _part("rect", _CELL, x=x, y=y, color=fill, tooltip=_tip(tip)),
        _part("text", style, [brief], x=x, y=y, text=_name("brief"), color=ink),
    ]


def _table(parts: list[Json], step: int, **more: Any) -> Json:
    dense = [{"name": "dense", "value": False}]
    return _layers(
        parts, height={"step": step}, resolve={"scale": {"color": "independent"}}, params=dense, **more
    )


def heat() -> Json:
    """Shows the speed-up of the subject over the best peer by collective and size, with its own time."""
    y = _name("collective", sort=None, axis=_LARGE_NAMES)
    tip = {"collective": "collective", "size": "size", "t_ratio": "speed-up", "t_range": "from its intervals"}
    tip |= {"verdict": "verdict", "t_own": "subject", "t_peer": "best peer"}
    cells = _cells("ratio", "d", "cell", y, tip, "dense || !datum.own ? 0 : -6")
    below = {"fontSize": 9.5, "dy": 8, "opacity": 0.85, "invalid": "show"}
    encoding = cells[1]["encoding"] | {"text": _name("own")}
    return _table([*cells, _part("text", below, [{"filter": "!dense"}], **encoding)], 38)


def grid(metric: str) -> Json:
    """Shows `sol` (share of the ceiling) or `cv` (variation) by collective, backend and size."""
    tip = {"collective": "collective", **_TIP, **({"t_cv": "variation"} if metric == "cv" else {})}
    label = {"calculate": "datum.collective + '  ·  ' + datum.backend", "as": "label"}
    y = _name("label", sort=None, axis=_LARGE_NAMES)
    parts = _cells(metric, "p" if metric == "sol" else "v", f"t_{metric}", y, tip)
    return _table(parts, 24, transform=[{"filter": f"isValid(datum.{metric})"}, label])


def pairs(names: list[str]) -> Json:
    """Shows a matrix of pairs of GPUs or ranks with these names: senders down, receivers across."""
    x = _name("target", scale={"domain": names}, axis={"title": "to", "orient": "top", "labelAngle": 0})
    y = _name("source", scale={"domain": names}, axis={"title": "from"})
    fill, ink = (_class("class", "v", range(1, 8), ink, "") for ink in (False, True))
    parts = [
        _part("rect", _CELL, x=x, y=y, color=fill),
        _part("text", {"fontSize": 11, "fontWeight": 600}, x=x, y=y, text=_name("text"), color=ink),
    ]
    return _table(parts, 32, width={"step": 52})


def spread(backends: list[str], legend: bool = False) -> Json:
    """Shows minimum to maximum (thin) and quartiles (thick) of the samples over their median, by size.

    Readable for about ten sizes."""
    ratios = {"r0": "min", "r1": "q1", "r3": "q3", "r4": "max"}
    over = [{"calculate": f"datum.{field} / datum.median", "as": name} for name, field in ratios.items()]
    tip = {"backend": "backend", "size": "size", "t_min": "minimum", "t_median": "median", "t_max": "maximum"}
    tip |= {"t_cv": "variation", "n": "samples"}
    axis = {"title": "time over median", "tickCount": 5, "format": "~r", "values": _ONE_TWO_FIVE}
    base = {
        "x": _sizes(title="message size"),
        "xOffset": _name("backend", scale={"domain": backends}),
        "color": _colour(backends, legend),
        "tooltip": _tip(tip),
    }
    thick = {"strokeWidth": {"expr": "max(2, min(9, 0.6 * bandwidth('xOffset')))"}}
    y = _quantity("r0", scale=_LOG, axis=axis)
    one: list[Json] = [
        {"calculate": "1", "as": "one"},
        {"aggregate": [{"op": "min", "field": "one", "as": "one"}]},
    ]
    return _layers(
        [
            _part("rule", {"color": _MUTED}, one, y=_quantity("one", axis=axis)),
            _part("rule", {"strokeWidth": 1.6}, over, **base, y=y, y2={"field": "r4"}),
            _part("rule", thick, over, **base, y=_quantity("r1", axis=axis), y2={"field": "r3"}),
        ]
    )


def distribution(backends: list[str]) -> Json:
    """Shows the samples of one case as box plots above their cumulative shares, over one axis of time.

    Rows of `kind` box hold q1, median, q3, wlow, whigh; rows of `kind` out are the samples beyond Tukey's
    whiskers; rows of `kind` curve have a value (µs) and the share of samples that took at most so long."""
    time = {"labelExpr": _TIME_LABEL, "title": "time per call", "tickCount": 8, "labelOverlap": True}
    bare = {"tickCount": 8, "title": None, "labels": False, "ticks": False, "domain": False}
    share = {"format": "%", "title": "share of samples", "tickCount": 5}
    colour = _colour(backends, False)
    own = {"y": _name("backend", sort=backends, axis=_NAMES), "color": colour}
    out, box, curve = ([{"filter": f"datum.kind == '{kind}'"}] for kind in ("out", "box", "curve"))
    dots = {"size": 14, "filled": True, "opacity": 0.35, "clip": True}
    middle = {**own, "x": _quantity("median"), "color": {"value": _INK}}
    thick = {"height": 16, "cornerRadius": 2, "clip": True}
    boxes = [
        _part("point", dots, out, x=_quantity("value", scale=_LOG, axis=bare), **own),
        _part(
            "rule", {"strokeWidth": 1.6, "clip": True}, box, x=_quantity("wlow"), x2={"field": "whigh"}, **own
        ),
        _part("bar", thick, box, x=_quantity("q1"), x2={"field": "q3"}, **own, tooltip=_tip(_TIP)),
        _part("tick", {"thickness": 2, "size": 22}, box, **middle),
    ]
    line = _part(
        "line",
        {**_LINE, "interpolate": "step-after", "clip": True},
        curve,
        x=_quantity("value", scale=_LOG, axis=time),
        y=_quantity("share", axis=share),
        color=colour,
        order=_quantity("share"),
    )
    below = {"data": {"name": DATA}, "height": 220, **line}
    charts = [_layers(boxes, height={"step": 34}), below]
    return {"vconcat": charts, "spacing": 6, "resolve": {"scale": {"x": "shared"}}}


def bars(backends: list[str]) -> Json:
    """Shows the time per unit of a workload; rows of payload.costs."""
    domain = [*backends, analysis.BEST_OF_EACH]
    scale = {"domain": domain, "range": [*theme.colours(backends), _MUTED]}
    y = _name("backend", sort=domain, axis=_LARGE_NAMES)
    axis = {"labelExpr": _TIME_LABEL, "title": None, "tickCount": 6}
    x = _quantity("unit", axis=axis, scale={"zero": True})
    words = {"align": "left", "dx": 6, "color": _INK, "fontSize": 11}
    return _layers(
        [
            _part(
                "bar",
                {"height": 16, "cornerRadius": 2},
                x=x,
                y=y,
                color=_name("backend", scale=scale, legend=None),
            ),
            _part(
                "rule",
                {"color": _INK, "strokeWidth": 1.4},
                x=_quantity("unit_low"),
                x2={"field": "unit_high"},
                y=y,
            ),
            _part("text", words, x=_quantity("unit_high"), y=y, text=_name("t_unit")),
        ],
        height={"step": 28},
    )


def templates(backends: list[str]) -> dict[str, Json]:
    """Returns every template of the page by name."""
    by_backend = (bandwidth, latency, spread, distribution, bars, efficiency)
    return {
        "heat": heat(),
        "sol": grid("sol"),
        "cv": grid("cv"),
        **{make.__name__: make(backends) for make in by_backend},
    }
