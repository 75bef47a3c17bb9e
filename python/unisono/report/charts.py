"""The charts, as Altair templates over rows of `payload.result`: one template each, used by the page and by
the PNGs."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import analysis, theme
from .payload import Json
from .theme import RATIO_STEPS, SHARE_STEPS, VARIATION_STEPS

DATA = "rows"  # the name under which a template expects its data
_INK = "var(--ink)"
_MUTED = "var(--ink3)"
_SIZE_LABEL = (
    "datum.value < 1024 ? format(datum.value, '.3~r') + ' B' : "
    "datum.value < 1048576 ? format(datum.value / 1024, '.3~r') + ' KiB' : "
    "datum.value < 1073741824 ? format(datum.value / 1048576, '.3~r') + ' MiB' : "
    "format(datum.value / 1073741824, '.3~r') + ' GiB'"
)
_TIME_LABEL = (
    "datum.value === 0 ? '0' : datum.value < 1 ? format(datum.value * 1000, '.3~r') + ' ns' : "
    "datum.value < 1000 ? format(datum.value, '.3~r') + ' µs' : "
    "datum.value < 1000000 ? format(datum.value / 1000, '.3~r') + ' ms' : "
    "format(datum.value / 1000000, '.3~r') + ' s'"
)
# 1, 2, 5, 10, 20 … for logarithmic axes: Vega keeps those in range and thins them to the count. For less than
# a decade its own ticks are better, so the users of a template take these away then.
_ONE_TWO_FIVE = [float(f"{m}e{power}") for power in range(-4, 9) for m in (1, 2, 5)]
_KINDS = ("out", "box", "curve")  # of the rows of `distribution`
_TIP = [
    alt.Tooltip("backend:N"),
    alt.Tooltip("size:N"),
    alt.Tooltip("t_median:N", title="median time"),
    alt.Tooltip("t_interval:N", title="95 % interval"),
    alt.Tooltip("t_busbw:N", title="bus bandwidth, GB/s"),
    alt.Tooltip("t_sol:N", title="of the ceiling"),
    alt.Tooltip("algorithm:N"),
    alt.Tooltip("n:Q", title="samples"),
]


def _data() -> alt.NamedData:
    return alt.NamedData(DATA)


def _spec(chart: Any) -> Json:
    """The chart as Vega-Lite without what its users add: data, configuration, schema."""
    spec: Json = chart.to_dict(validate=False)  # a tenth of a report; the browser test draws each
    return {key: value for key, value in spec.items() if key not in ("$schema", "config", "datasets")}


def _legend(shown: bool) -> alt.Legend | None:
    return alt.Legend(title=None, orient="top", symbolOpacity=1) if shown else None


def _colour(backends: list[str], legend: bool) -> alt.Color:
    scale = alt.Scale(domain=backends, range=theme.colours(backends))
    return alt.Color("backend:N", scale=scale, legend=_legend(legend))


def _shape(backends: list[str], legend: bool) -> alt.Shape:
    scale = alt.Scale(domain=backends, range=theme.shapes(backends))
    return alt.Shape("backend:N", scale=scale, legend=_legend(legend))


def _bytes() -> alt.X:
    axis = alt.Axis(labelExpr=_SIZE_LABEL, tickCount=6, title="message size", grid=False, labelOverlap=True)
    return alt.X("column:Q", scale=alt.Scale(type="log", base=2, nice=False), axis=axis)


def _size() -> alt.X:
    """Sizes as equal steps."""
    axis = alt.Axis(labelAngle=0, title=None, orient="top", domain=False, ticks=False, labelOverlap=True)
    return alt.X("t_column:O", sort=alt.EncodingSortField(field="column", op="min"), axis=axis)


def curve(metric: str, backends: list[str], legend: bool = False) -> Json:
    """`bandwidth` or `latency` over the message size, one line per backend with the band of its interval."""
    low, middle, high = ("bwlow", "busbw", "bwhigh") if metric == "bandwidth" else ("low", "median", "high")
    if metric == "bandwidth":
        y = alt.Y(
            f"{middle}:Q", axis=alt.Axis(title="bus bandwidth, GB/s", tickCount=5), scale=alt.Scale(zero=True)
        )
    else:
        axis = alt.Axis(title="time per call", labelExpr=_TIME_LABEL, tickCount=7, values=_ONE_TWO_FIVE)
        y = alt.Y(f"{middle}:Q", axis=axis, scale=alt.Scale(type="log", nice=False))
    colour = _colour(backends, legend)
    base = alt.Chart(_data()).encode(x=_bytes())
    band = base.mark_area(opacity=0.2).encode(y=alt.Y(f"{low}:Q"), y2=f"{high}:Q", color=colour)
    line = base.mark_line(strokeWidth=1.8).encode(y=y, color=colour)
    points = base.mark_point(filled=True, size=42, opacity=1).encode(
        y=y, color=colour, shape=_shape(backends, legend), tooltip=_TIP
    )
    layers = [band, line, points]
    if metric == "bandwidth":
        ceiling = (
            base.transform_filter("isValid(datum.ceiling)")
            .transform_aggregate(top="max(ceiling)", groupby=["column"])
            .mark_line(strokeDash=[5, 4], strokeWidth=1.4, color=_MUTED)
            .encode(y=alt.Y("top:Q"))
        )
        layers.insert(0, ceiling)
    return _spec(alt.layer(*layers))


def efficiency(backends: list[str], legend: bool = False) -> Json:
    """Efficiency (logarithmic) over the number of ranks, one line per backend with the band of its interval.
    Rows: backend, ranks, value, low, high and the words of the tooltip."""
    axis = alt.Axis(title="ranks", labelAngle=0, grid=False)
    scale = alt.Axis(title="efficiency", format=".3~%", tickCount=5, values=_ONE_TWO_FIVE)
    base = alt.Chart(_data()).encode(x=alt.X("ranks:O", axis=axis))
    colour, tip = _colour(backends, legend), [alt.Tooltip("backend:N"), alt.Tooltip("ranks:O")]
    tip += [alt.Tooltip("t_value:N", title="efficiency"), alt.Tooltip("t_median:N", title="median time")]
    tip += [alt.Tooltip("t_busbw:N", title="bus bandwidth, GB/s")]
    y = alt.Y("value:Q", axis=scale, scale=alt.Scale(type="log", nice=False))
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", axis=scale), y2="high:Q", color=colour)
    line = base.mark_line(strokeWidth=1.8).encode(y=y, color=colour)
    points = base.mark_point(filled=True, size=42, opacity=1)
    points = points.encode(y=y, color=colour, shape=_shape(backends, legend), tooltip=tip)
    return _spec(alt.layer(band, line, points))


def _when(test: str, value: str) -> list[Any]:
    return [{"test": test, "value": value}]


def _cells(
    field: str,
    name: str,
    steps: tuple[float, ...],
    text: str,
    y: alt.Y,
    tooltip: list[alt.Tooltip],
    shift: str = "0",
) -> list[alt.Chart]:
    """Coloured cells and their text, of the same classes. The text is `shift` (an expression) points lower;
    in a chart whose parameter `dense` is true it is small and has no unit."""
    scale = alt.Scale(type="threshold", domain=list(steps), range=theme.classes(name, steps))
    ink = alt.Scale(type="threshold", domain=list(steps), range=theme.classes(name, steps, ink=True))
    base = alt.Chart(_data()).encode(x=_size(), y=y)
    absent = f"!isValid(datum.{field})"
    rect = base.mark_rect(cornerRadius=2, stroke="var(--surface)", strokeWidth=1.5, invalid="show").encode(
        color=alt.Color(f"{field}:Q", scale=scale, legend=None, condition=_when(absent, "var(--raised)")),
        tooltip=tooltip,
    )
    bare = f"replace(datum.{text}, /×| %/, '')"  # noqa: RUF001
    brief = base.transform_calculate(brief=f"dense ? {bare} : datum.{text}")
    size = alt.ExprRef("dense ? 9.5 : 11")
    label = brief.mark_text(fontSize=size, fontWeight=600, dy=alt.ExprRef(shift), invalid="show").encode(
        text="brief:N",
        color=alt.Color(f"{field}:Q", scale=ink, legend=None, condition=_when(absent, "var(--ink2)")),
    )
    return [rect, label]


def pairs(names: list[str]) -> Json:
    """A matrix of pairs of GPUs or ranks with these names: senders down, receivers across; in a cell the
    measured value."""
    scale = alt.Scale(domain=names)
    steps = tuple(range(1, len(theme.VARIATION_STEPS) + 1))
    fill = alt.Scale(type="threshold", domain=list(steps), range=theme.classes("v", theme.VARIATION_STEPS))
    ink = alt.Scale(
        type="threshold", domain=list(steps), range=theme.classes("v", theme.VARIATION_STEPS, ink=True)
    )
    base = alt.Chart(_data()).encode(
        x=alt.X("target:N", scale=scale, axis=alt.Axis(title="to", orient="top", labelAngle=0)),
        y=alt.Y("source:N", scale=scale, axis=alt.Axis(title="from")),
    )
    rect = base.mark_rect(cornerRadius=2, stroke="var(--surface)", strokeWidth=1.5).encode(
        color=alt.Color("class:Q", scale=fill, legend=None)
    )
    label = base.mark_text(fontSize=11, fontWeight=600).encode(
        text="text:N", color=alt.Color("class:Q", scale=ink, legend=None)
    )
    chart = alt.layer(rect, label, height=alt.Step(32), width=alt.Step(52))
    return _spec(chart.resolve_scale(color="independent"))


def heat() -> Json:
    """Speed-up of the subject over the best peer: collective by size; in a cell the ratio and the subject's
    own time."""
    y = alt.Y("collective:N", sort=None, axis=_names())
    tooltip = [
        alt.Tooltip("collective:N"),
        alt.Tooltip("size:N"),
        alt.Tooltip("t_ratio:N", title="speed-up"),
        alt.Tooltip("t_range:N", title="from its intervals"),
        alt.Tooltip("verdict:N"),
        alt.Tooltip("t_own:N", title="subject"),
        alt.Tooltip("t_peer:N", title="best peer"),
    ]
    rect, label = _cells("ratio", "d", RATIO_STEPS, "cell", y, tooltip, "dense || !datum.own ? 0 : -6")
    ink = alt.Scale(
        type="threshold", domain=list(RATIO_STEPS), range=theme.classes("d", RATIO_STEPS, ink=True)
    )
    own = (
        alt.Chart(_data())
        .transform_filter("!dense")
        .mark_text(fontSize=9.5, dy=8, opacity=0.85, invalid="show")
        .encode(
            x=_size(),
            y=y,
            text="own:N",
            color=alt.Color(
                "ratio:Q", scale=ink, legend=None, condition=_when("!isValid(datum.ratio)", "var(--ink2)")
            ),
        )
    )
    chart = alt.layer(rect, label, own, height=alt.Step(38)).resolve_scale(color="independent")
    return _spec(chart.add_params(alt.param("dense", value=False)))


def _names() -> alt.Axis:
    return alt.Axis(title=None, domain=False, ticks=False, labelColor=_INK, labelFontSize=12, labelLimit=260)


def grid(metric: str) -> Json:
    """`sol` (share of the ceiling) or `cv` (coefficient of variation): a row per collective and backend, by
    size."""
    name, steps = ("p", SHARE_STEPS) if metric == "sol" else ("v", VARIATION_STEPS)
    y = alt.Y("label:N", sort=None, axis=_names())
    title = "of the ceiling" if metric == "sol" else "variation"
    extra = [alt.Tooltip(f"t_{metric}:N", title=title)] if metric == "cv" else []
    rect, label = _cells(metric, name, steps, f"t_{metric}", y, [alt.Tooltip("collective:N"), *_TIP, *extra])
    chart = alt.layer(rect, label, height=alt.Step(24)).resolve_scale(color="independent")
    chart = chart.transform_filter(f"isValid(datum.{metric})")
    chart = chart.transform_calculate(label="datum.collective + '  ·  ' + datum.backend")
    return _spec(chart.add_params(alt.param("dense", value=False)))


def spread(backends: list[str], legend: bool = False) -> Json:
    """Minimum to maximum (thin) and quartiles (thick) of the samples, over their median, by size; readable
    for about ten sizes."""
    base = alt.Chart(_data()).encode(
        x=alt.X(
            "t_column:O",
            sort=alt.EncodingSortField(field="column", op="min"),
            axis=alt.Axis(labelAngle=0, title="message size", labelOverlap=True, ticks=False),
        ),
        xOffset=alt.XOffset("backend:N", scale=alt.Scale(domain=backends)),
        color=_colour(backends, legend),
    )
    base = base.transform_calculate(
        r0="datum.min / datum.median",
        r1="datum.q1 / datum.median",
        r3="datum.q3 / datum.median",
        r4="datum.max / datum.median",
    )
    tooltip = [
        alt.Tooltip("backend:N"),
        alt.Tooltip("size:N"),
        alt.Tooltip("t_min:N", title="minimum"),
        alt.Tooltip("t_median:N", title="median"),
        alt.Tooltip("t_max:N", title="maximum"),
        alt.Tooltip("t_cv:N", title="variation"),
        alt.Tooltip("n:Q", title="samples"),
    ]
    axis = alt.Axis(title="time over median", tickCount=5, format="~r", values=_ONE_TWO_FIVE)
    y = alt.Y("r0:Q", scale=alt.Scale(type="log", nice=False), axis=axis)
    rule = base.mark_rule(strokeWidth=1.6).encode(y=y, y2="r4:Q", tooltip=tooltip)
    thick = alt.ExprRef("max(2, min(9, 0.6 * bandwidth('xOffset')))")
    bar = base.mark_rule(strokeWidth=thick).encode(y=alt.Y("r1:Q", axis=axis), y2="r3:Q", tooltip=tooltip)
    one = (
        alt.Chart(_data())
        .transform_calculate(one="1")
        .transform_aggregate(one="min(one)")
        .mark_rule(color=_MUTED)
    )
    return _spec(alt.layer(one.encode(y=alt.Y("one:Q", axis=axis)), rule, bar))


def distribution(backends: list[str]) -> Json:
    """The samples of one case as a box plot (Tukey: whiskers reach the last sample within 1.5 quartile
    distances) above the share of them that took at most so long, over one axis of time. Rows of `kind` box
    hold q1, median, q3, wlow, whigh; rows of `kind` out are the samples beyond the whiskers; those of `kind`
    curve have value (µs) and share."""
    time = alt.Axis(labelExpr=_TIME_LABEL, title="time per call", tickCount=8, labelOverlap=True)
    bare = alt.Axis(tickCount=8, title=None, labels=False, ticks=False, domain=False)
    log = alt.Scale(type="log", nice=False)
    colour = _colour(backends, False)
    rows = {kind: alt.Chart(_data()).transform_filter(f"datum.kind == '{kind}'") for kind in _KINDS}

    x = alt.X("value:Q", scale=log, axis=bare)
    y = alt.Y("backend:N", sort=backends, axis=alt.Axis(title=None, domain=False, ticks=False))
    points = rows["out"].mark_point(size=14, filled=True, opacity=0.35, clip=True)
    base = rows["box"].encode(y=y, color=colour)
    whiskers = base.mark_rule(strokeWidth=1.6, clip=True).encode(x=alt.X("wlow:Q"), x2="whigh:Q")
    quartiles = base.mark_bar(height=16, cornerRadius=2, clip=True)
    quartiles = quartiles.encode(x=alt.X("q1:Q"), x2="q3:Q", tooltip=_TIP)
    median = base.mark_tick(thickness=2, size=22).encode(x=alt.X("median:Q"), color=alt.value(_INK))
    box = alt.layer(points.encode(x=x, y=y, color=colour), whiskers, quartiles, median, height=alt.Step(34))

    line = rows["curve"].mark_line(interpolate="step-after", strokeWidth=1.8, clip=True)
    share = line.encode(
        x=alt.X("value:Q", scale=log, axis=time),
        y=alt.Y("share:Q", axis=alt.Axis(format="%", title="share of samples", tickCount=5)),
        color=colour,
        order="share:Q",
    )
    return _spec(alt.vconcat(box, share.properties(height=220), spacing=6).resolve_scale(x="shared"))


def bars(backends: list[str]) -> Json:
    """Time per unit of a workload. Rows: backend (or `best of each`), unit, unit_low, unit_high, t_unit."""
    domain = [*backends, analysis.BEST_OF_EACH]
    scale = alt.Scale(domain=domain, range=[*theme.colours(backends), _MUTED])
    axis = alt.Axis(labelExpr=_TIME_LABEL, title=None, tickCount=6)
    base = alt.Chart(_data()).encode(y=alt.Y("backend:N", sort=domain, axis=_names()))
    bar = base.mark_bar(height=16, cornerRadius=2).encode(
        x=alt.X("unit:Q", axis=axis, scale=alt.Scale(zero=True)),
        color=alt.Color("backend:N", scale=scale, legend=None),
    )
    rule = base.mark_rule(color=_INK, strokeWidth=1.4).encode(x=alt.X("unit_low:Q"), x2="unit_high:Q")
    label = base.mark_text(align="left", dx=6, color=_INK, fontSize=11).encode(
        x=alt.X("unit_high:Q"), text="t_unit:N"
    )
    return _spec(alt.layer(bar, rule, label, height=alt.Step(28)))


def templates(backends: list[str]) -> dict[str, Json]:
    """Every template of the page by name."""
    return {
        "heat": heat(),
        "bandwidth": curve("bandwidth", backends),
        "latency": curve("latency", backends),
        "sol": grid("sol"),
        "cv": grid("cv"),
        "spread": spread(backends),
        "distribution": distribution(backends),
        "bars": bars(backends),
        "efficiency": efficiency(backends),
    }
