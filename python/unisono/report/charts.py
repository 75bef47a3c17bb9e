"""Makes the charts as templates of Vega-Lite over rows of payload.py; page and pictures use the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vl_convert

from . import analysis, payload, theme
from .payload import Json

VEGA_LITE: str = vl_convert.get_vegalite_versions()[-1]  # the version that page and pictures use
_INK = "var(--ink)"
_MUTED = "var(--ink3)"


def _units(*scales: tuple[float, float, str]) -> str:
    """Returns the expression of an axis label; each unit has its limit (0: none) and its divisor."""
    limits = [f"datum.value < {limit} ? " if limit else "" for limit, _, _ in scales]
    values = [f"format(datum.value / {divisor}, '.3~r') + ' {unit}'" for _, divisor, unit in scales]
    return " : ".join(limit + value for limit, value in zip(limits, values, strict=True))


_SIZE_LABEL = _units((2**10, 1, "B"), (2**20, 2**10, "KiB"), (2**30, 2**20, "MiB"), (0, 2**30, "GiB"))
_TIMES = _units((1, 1e-3, "ns"), (1e3, 1, "µs"), (1e6, 1e3, "ms"), (0, 1e6, "s"))
_TIME_LABEL = f"datum.value === 0 ? '0' : {_TIMES}"
# Vega keeps those of 1, 2, 5, 10, 20 … that are in range and thins them to the count. Over less than a decade
# its own ticks are better: there the users of a template take these away.
_ONE_TWO_FIVE = [float(f"{m}e{power}") for power in range(-4, 9) for m in (1, 2, 5)]
_LOG = {"type": "log", "nice": False}
_LINE = {"strokeWidth": 1.8}
_CELL = {"cornerRadius": 2, "stroke": "var(--surface)", "strokeWidth": 1.5, "invalid": "show"}
_NAMES = {"title": None, "domain": False, "ticks": False}
_LARGE_NAMES = {**_NAMES, "labelColor": _INK, "labelFontSize": 12, "labelLimit": 260}
_DENSE = [{"name": "dense", "value": False}]
_RESULT = ("backend", "size", "t_median", "t_interval", "t_busbw", "t_sol", "algorithm", "n")  # tooltip
_TITLES = payload.COLUMNS | {
    "t_ratio": "Speed-up",
    "t_range": "From its intervals",
    "t_own": "Subject",
    "t_peer": "Best peer",
    "t_value": "Efficiency",
    "verdict": "Verdict",
}


def _num(field: str, **more: Any) -> Json:
    return {"field": field, "type": "quantitative", **more}


def _name(field: str, **more: Any) -> Json:
    return {"field": field, "type": "nominal", **more}


def _end(field: str) -> Json:
    return {"field": field}


def _tip(*fields: str) -> list[Json]:
    return [_name(field, title=_TITLES[field]) for field in fields]


def _part(mark: str, style: Json, transform: Iterable[Json] = (), /, **encoding: Any) -> Json:
    steps = {"transform": list(transform)} if transform else {}
    return {**steps, "mark": {"type": mark, **style}, "encoding": encoding}


def _layers(parts: list[Json], encoding: Json, **more: Any) -> Json:
    """Returns layers that share an encoding, over the rows that the user of the template gives."""
    return {"data": {"name": "rows"}, "encoding": encoding, "layer": parts, **more}


def _colour(backends: list[str], legend: bool) -> Json:
    shown = {"title": None, "orient": "top", "symbolOpacity": 1} if legend else None
    return _name("backend", scale={"domain": backends, "range": theme.colours(backends)}, legend=shown)


def _bytes() -> Json:
    axis = {"labelExpr": _SIZE_LABEL, "tickCount": 6, "title": "message size", "grid": False}
    scale = {"type": "log", "base": 2, "nice": False}
    return _num("column", scale=scale, axis={**axis, "labelOverlap": True})


def _tokens() -> Json:
    scale = {"type": "log", "base": 2, "nice": False}
    axis = {
        "tickCount": 6,
        "title": "tokens of each rank",
        "grid": False,
        "labelOverlap": True,
        "format": ",",
    }
    return _num("column", scale=scale, axis=axis)


def _sizes(**axis: Any) -> Json:
    """Returns an axis of sizes as equal steps."""
    shown = {"labelAngle": 0, "labelOverlap": True, "ticks": False, **axis}
    return {"field": "t_column", "type": "ordinal", "sort": {"field": "column", "op": "min"}, "axis": shown}


def _curves(
    x: Json, y: Json, ends: tuple[str, str], tip: list[Json], backends: list[str], legend: bool
) -> Json:
    """Returns a line with points per backend, and the band between the fields `ends`."""
    colour = _colour(backends, legend)
    shape = {**colour, "scale": {"domain": backends, "range": theme.shapes(backends)}}
    low, high = ends
    parts = [
        _part("area", {"opacity": 0.2}, y=_num(low, axis=y["axis"]), y2=_end(high)),
        _part("line", _LINE, y=y),
        _part("point", {"filled": True, "size": 42, "opacity": 1}, y=y, shape=shape, tooltip=tip),
    ]
    return _layers(parts, {"x": x, "color": colour})


def bandwidth(backends: list[str], legend: bool) -> Json:
    """Shows bus bandwidth over the message size, with the ceiling as a dashed line."""
    return _bandwidth(_bytes(), backends, legend)


def bandwidth_by_tokens(backends: list[str], legend: bool) -> Json:
    """Shows the bandwidth of a mixture of experts, without the rows that stay, over the tokens."""
    return _bandwidth(_tokens(), backends, legend)


def _bandwidth(x: Json, backends: list[str], legend: bool) -> Json:
    y = _num("busbw", axis={"title": "bus bandwidth, GB/s", "tickCount": 5}, scale={"zero": True})
    chart = _curves(x, y, ("bwlow", "bwhigh"), _tip(*_RESULT), backends, legend)
    measured = {"filter": "isValid(datum.ceiling)"}
    top = {"aggregate": [{"op": "max", "field": "ceiling", "as": "top"}], "groupby": ["column"]}
    dashed = {"strokeDash": [5, 4], "strokeWidth": 1.4}
    ceiling = _part("line", dashed, [measured, top], y=_num("top"), color={"value": _MUTED})
    return {**chart, "layer": [ceiling, *chart["layer"]]}


def latency(backends: list[str], legend: bool) -> Json:
    """Shows the time per call over the message size, both axes logarithmic."""
    return _latency(_bytes(), backends, legend)


def latency_by_tokens(backends: list[str], legend: bool) -> Json:
    """Shows the time of a call of a mixture of experts over the tokens, both axes logarithmic."""
    return _latency(_tokens(), backends, legend)


def _latency(x: Json, backends: list[str], legend: bool) -> Json:
    axis = {"title": "time per call", "labelExpr": _TIME_LABEL, "tickCount": 7, "values": _ONE_TWO_FIVE}
    y = _num("median", axis=axis, scale=_LOG)
    return _curves(x, y, ("low", "high"), _tip(*_RESULT), backends, legend)


def efficiency(backends: list[str], legend: bool) -> Json:
    """Shows efficiency (logarithmic) over the number of ranks; rows of payload.efficiency_panels."""
    x = {"field": "ranks", "type": "ordinal", "axis": {"title": "ranks", "labelAngle": 0, "grid": False}}
    axis = {"title": "efficiency", "format": ".3~%", "tickCount": 5, "values": _ONE_TWO_FIVE}
    tip = _tip("backend", "ranks", "t_value", "t_median", "t_busbw")
    return _curves(x, _num("value", axis=axis, scale=_LOG), ("low", "high"), tip, backends, legend)


def _class(field: str, scale: str, steps: Iterable[float], ink: bool = False) -> Json:
    """Returns the colour of a cell, or of the text on it."""
    colours = {"type": "threshold", "domain": list(steps), "range": theme.classes(scale, ink)}
    absent = {"test": f"!isValid(datum.{field})", "value": "var(--ink2)" if ink else "var(--raised)"}
    return _num(field, scale=colours, legend=None, condition=[absent])


def _cells(field: str, scale: str, words: str, tip: list[Json], shift: str = "0") -> list[Json]:
    """Returns coloured cells and their text, which is `shift` (an expression) points lower. If the parameter
    `dense` is true, the text is small and has no unit."""
    steps = theme.STEPS[scale]
    bare = f"replace(datum.{words}, /×| %/, '')"  # noqa: RUF001
    brief = {"calculate": f"dense ? {bare} : datum.{words}", "as": "brief"}
    style = {"fontSize": {"expr": "dense ? 9.5 : 11"}, "fontWeight": 600, "dy": {"expr": shift}}
    return [
        _part("rect", _CELL, color=_class(field, scale, steps), tooltip=tip),
        _part(
            "text",
            {**style, "invalid": "show"},
            [brief],
            text=_name("brief"),
            color=_class(field, scale, steps, True),
        ),
    ]


def _grid(parts: list[Json], y: str, step: int, **more: Any) -> Json:
    """Returns cells by the names `y` and the size."""
    encoding = {
        "x": _sizes(title=None, orient="top", domain=False),
        "y": _name(y, sort=None, axis=_LARGE_NAMES),
    }
    independent = {"scale": {"color": "independent"}}
    return _layers(parts, encoding, height={"step": step}, resolve=independent, params=_DENSE, **more)


def heat() -> Json:
    """Shows the speed-up of the subject over the best peer by collective and size, with its own time."""
    tip = _tip("collective", "size", "t_ratio", "t_range", "verdict", "t_own", "t_peer")
    rect, label = _cells("ratio", "d", "cell", tip, "dense || !datum.own ? 0 : -6")
    style = {"fontSize": 9.5, "dy": 8, "opacity": 0.85, "invalid": "show"}
    own = _part("text", style, [{"filter": "!dense"}], text=_name("own"), color=label["encoding"]["color"])
    return _grid([rect, label, own], "collective", 38)


def shares(metric: str) -> Json:
    """Shows `sol` (share of the ceiling) or `cv` (variation) by collective, backend and size."""
    parts = _cells(
        metric, "p" if metric == "sol" else "v", f"t_{metric}", _tip("collective", *_RESULT, "t_cv")
    )
    label = {"calculate": "datum.collective + '  ·  ' + datum.backend", "as": "label"}
    return _grid(parts, "label", 24, transform=[{"filter": f"isValid(datum.{metric})"}, label])


def pairs(names: list[str]) -> Json:
    """Shows a matrix of pairs of GPUs or ranks with these names: senders down, receivers across."""
    x = _name("target", scale={"domain": names}, axis={"title": "to", "orient": "top", "labelAngle": 0})
    y = _name("source", scale={"domain": names}, axis={"title": "from"})
    steps = range(1, len(theme.VARIATION_STEPS) + 1)
    rect = _part("rect", _CELL, color=_class("class", "v", steps))
    style = {"fontSize": 11, "fontWeight": 600}
    label = _part("text", style, text=_name("text"), color=_class("class", "v", steps, ink=True))
    step, independent = {"height": {"step": 32}, "width": {"step": 52}}, {"scale": {"color": "independent"}}
    return _layers([rect, label], {"x": x, "y": y}, resolve=independent, **step)


def spread(backends: list[str], legend: bool) -> Json:
    """Shows minimum to maximum (thin) and quartiles (thick) of the samples over their median, by size.
    Readable for about ten sizes."""
    ratios = {"r0": "min", "r1": "q1", "r3": "q3", "r4": "max"}
    over = [{"calculate": f"datum.{field} / datum.median", "as": name} for name, field in ratios.items()]
    own = {
        "x": _sizes(title="message size"),
        "xOffset": _name("backend", scale={"domain": backends}),
        "color": _colour(backends, legend),
        "tooltip": _tip("backend", "size", "t_min", "t_median", "t_max", "t_cv", "n"),
    }
    axis = {"title": "time over median", "tickCount": 5, "format": "~r", "values": _ONE_TWO_FIVE}
    thick = {"strokeWidth": {"expr": "max(2, min(9, 0.6 * bandwidth('xOffset')))"}}
    once = {"aggregate": [{"op": "min", "field": "one", "as": "one"}]}
    parts = [
        _part("rule", {"color": _MUTED}, [{"calculate": "1", "as": "one"}, once], y=_num("one", axis=axis)),
        _part("rule", {"strokeWidth": 1.6}, over, **own, y=_num("r0", scale=_LOG, axis=axis), y2=_end("r4")),
        _part("rule", thick, over, **own, y=_num("r1", axis=axis), y2=_end("r3")),
    ]
    return _layers(parts, {})


def distribution(backends: list[str]) -> Json:
    """Shows the samples of one case as box plots above their cumulative shares, over one axis of time. Rows
    of `kind` box hold q1, median, q3, wlow, whigh; rows of `kind` out are the samples beyond Tukey's
    whiskers; rows of `kind` curve have a value (µs) and the share of samples that took at most so long."""
    out, box, curve = ([{"filter": f"datum.kind == '{kind}'"}] for kind in ("out", "box", "curve"))
    bare = {"tickCount": 8, "title": None, "labels": False, "ticks": False, "domain": False}
    dots = {"size": 14, "filled": True, "opacity": 0.35, "clip": True}
    whisker, thick = {"strokeWidth": 1.6, "clip": True}, {"height": 16, "cornerRadius": 2, "clip": True}
    middle = {"x": _num("median"), "color": {"value": _INK}}
    boxes = [
        _part("point", dots, out, x=_num("value", scale=_LOG, axis=bare)),
        _part("rule", whisker, box, x=_num("wlow"), x2=_end("whigh")),
        _part("bar", thick, box, x=_num("q1"), x2=_end("q3"), tooltip=_tip(*_RESULT)),
        _part("tick", {"thickness": 2, "size": 22}, box, **middle),
    ]
    own = {"y": _name("backend", sort=backends, axis=_NAMES), "color": _colour(backends, legend=False)}
    time = {"labelExpr": _TIME_LABEL, "title": "time per call", "tickCount": 8, "labelOverlap": True}
    share = {"format": "%", "title": "share of samples", "tickCount": 5}
    line = _part("line", {**_LINE, "interpolate": "step-after", "clip": True}, curve, order=_num("share"))
    below = {"x": _num("value", scale=_LOG, axis=time), "y": _num("share", axis=share), "color": own["color"]}
    charts = [_layers(boxes, own, height={"step": 34}), _layers([line], below, height=220)]
    return {"vconcat": charts, "spacing": 6, "resolve": {"scale": {"x": "shared"}}}


def bars(backends: list[str]) -> Json:
    """Shows the time per unit of a workload; rows of payload.costs."""
    domain = [*backends, analysis.BEST_OF_EACH]
    scale = {"domain": domain, "range": [*theme.colours(backends), _MUTED]}
    axis = {"labelExpr": _TIME_LABEL, "title": None, "tickCount": 6}
    x, colour = _num("value", axis=axis, scale={"zero": True}), _name("backend", scale=scale, legend=None)
    words = {"align": "left", "dx": 6, "color": _INK, "fontSize": 11}
    parts = [
        _part("bar", {"height": 16, "cornerRadius": 2}, x=x, color=colour),
        _part("rule", {"color": _INK, "strokeWidth": 1.4}, x=_num("low"), x2=_end("high")),
        _part("text", words, x=_num("high"), text=_name("t_value")),
    ]
    return _layers(parts, {"y": _name("backend", sort=domain, axis=_LARGE_NAMES)}, height={"step": 28})


def overlap(backends: list[str], legend: bool) -> Json:
    """Shows times of matmuls with their collective over the matmul alone, in a band from all of the shorter
    part hidden to nothing hidden; rows of matmuls.bars."""
    ends = [{"op": "max", "field": name, "as": name} for name in ("best", "apart")]
    band = [{"aggregate": ends, "groupby": ["product"]}]
    axis = {"title": "time over that of the matmul alone", "tickCount": 8}
    scale = {"zero": False, "nice": False, "padding": 12}
    at, colour = {"axis": axis, "scale": scale}, _colour(backends, legend)
    shape = {**colour, "scale": {"domain": backends, "range": theme.shapes(backends)}}
    tip = _tip("backend", "t_median", "t_interval")
    parts = [
        _part(
            "bar",
            {"height": 14, "opacity": 0.3},
            band,
            x=_num("best", **at),
            x2=_end("apart"),
            color={"value": _MUTED},
        ),
        _part("rule", {"strokeWidth": 1.4}, x=_num("low", **at), x2=_end("high"), color=colour),
        _part(
            "point",
            {"filled": True, "size": 60, "opacity": 1},
            x=_num("value", **at),
            color=colour,
            shape=shape,
            tooltip=tip,
        ),
    ]
    return _layers(parts, {"y": _name("product", sort=None, axis=_LARGE_NAMES)}, height={"step": 26})


def templates(backends: list[str], legend: bool = False) -> dict[str, Json]:
    """Returns every template by name, except pairs."""
    by_tokens = bandwidth_by_tokens, latency_by_tokens
    with_legend = {
        make.__name__: make(backends, legend)
        for make in (bandwidth, latency, *by_tokens, spread, efficiency, overlap)
    }
    others = {make.__name__: make(backends) for make in (distribution, bars)}
    return {"heat": heat(), "sol": shares("sol"), "cv": shares("cv"), **with_legend, **others}
