"""Renders report.html: one self-contained page. Its policy lets exactly its own scripts and style run, and
nothing load."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from importlib import resources
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from . import blocks, charts, figures, payload, sections, theme
from .model import Model
from .payload import Json


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _own_script() -> str:
    """Returns charts.js and page.js as one script, in a scope of its own."""
    return f'"use strict";\n(() => {{\n{_asset("charts.js")}\n{_asset("page.js")}}})();\n'


@lru_cache(maxsize=1)
def _vega() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as one script."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=charts.VEGA_LITE)
    return bundle.replace("\r\n", "\n").replace("</script", "<\\/script")


def script_json(value: Any) -> Markup:
    """Returns JSON for a script element: no character of it can end the element or open another."""
    raw = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(
        raw.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
    )


def policy(scripts: list[str], style: str) -> str:
    """Returns the content security policy: inline blocks by their hash, and nothing else of any kind. Vega
    needs no 'unsafe-eval': its expression interpreter (`ast`) comes with Vega-Embed."""

    def hashed(source: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

    allowed = f"script-src {' '.join(map(hashed, scripts))}; style-src {hashed(style)}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _bar(tally: blocks.Tally, width: int) -> list[tuple[str, float, float]]:
    """Returns the segments of a bar of verdicts: class, position and width."""
    total = sum(tally.counts.values())
    shares = [(verdict.lower(), width * tally.counts[verdict] / total) for verdict in blocks.VERDICTS]
    return [
        (name, round(sum(before for _, before in shares[:i]), 2), round(share, 2))
        for i, (name, share) in enumerate(shares)
        if share
    ]


def _filled(figure: figures.Figure) -> Json:
    """Returns the fields of a figure that are not empty."""
    return {name: value for name, value in vars(figure).items() if value not in ("", None, [], {})}


def page(model: Model) -> Json:
    """Returns all that the page's script needs, each thing once; panels hold the ids of their rows."""
    rows, ids = payload.results(model), {row.id for row in model.rows}
    sweep = [row for row in rows if row["id"] in ids]
    limit = payload.points_per_result(len(rows))
    panels = [_filled(one) | {"rows": [row["id"] for row in one.rows]} for one in figures.panels(sweep)]
    return {
        "backends": model.backends,
        "dimensions": payload.dimensions(sweep),
        "tables": {
            "results": payload.columns_of(rows),
            "percentiles": payload.columns_of(rows, payload.PERCENTILES),
        },
        "results": payload.table(rows),
        "sweep": sorted(ids),
        "heat": payload.table(payload.heat(model)),
        "panels": panels,
        "fixed": [_filled(figure) for figure in figures.fixed(model)],
        "samples": [payload.order_statistics(row, limit) for row in model.all_rows],
        "specs": charts.templates(model.backends),
        "config": theme.config(),
    }


def render(model: Model) -> str:
    """Returns the page."""
    scripts, style = [_vega(), _own_script()], theme.css() + _asset("page.css")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    outlines = [theme.SHAPES[shape] for shape in theme.shapes(model.backends)]
    environment.globals.update(bar=_bar, verdicts=blocks.VERDICTS, steps=theme.steps_in_words)
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment.from_string(_asset("template.html")).render(
        policy=Markup(policy(scripts, style)),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        data=script_json(page(model)),
        sections=sections.sections(model),
        legend=list(zip(model.backends, outlines, theme.colours(model.backends), strict=True)),
    )
