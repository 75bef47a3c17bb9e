"""report.html: one self-contained page. Its policy lets exactly its own two scripts and one style run and
nothing load."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from importlib import resources
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from unisono.records import text
from unisono.records.stats import Verdict

from . import analysis, charts, content, method, payload, studies, theme
from .model import Model

_VERDICT_CLASSES = tuple(
    (verdict, verdict.lower()) for verdict in (Verdict.FASTER, Verdict.SAME, Verdict.UNCLEAR, Verdict.SLOWER)
)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _own_script() -> str:
    """charts.js and page.js as one script, in one scope that is theirs alone."""
    return f'"use strict";\n(() => {{\n{_asset("charts.js")}\n{_asset("page.js")}}})();\n'


@lru_cache(maxsize=1)
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, of the version that Altair writes for; bundled with
    vl-convert."""
    version = ".".join(alt.VEGALITE_VERSION.split(".")[:2])
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return bundle.replace("\r\n", "\n").replace("</script", "<\\/script")


def script_json(value: Any) -> Markup:
    """JSON for a script element: no character of it can end the element or open another."""
    raw = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    for character, escape in escapes.items():
        raw = raw.replace(character, escape)
    return Markup(raw)


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def policy(scripts: list[str], styles: list[str]) -> str:
    """The content security policy: inline blocks by their hash, no other code, style, image, font, frame or
    connection.

    No 'unsafe-eval': the charts run with Vega's expression interpreter, which Vega-Embed brings along
    (`ast`)."""
    script, style = (" ".join(_hash(block) for block in blocks) for blocks in (scripts, styles))
    return f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; form-action 'none'"


def bar(line: analysis.Headline, width: int = 120) -> list[dict[str, Any]]:
    """The segments of the bar of verdicts: class, position, width, count."""
    total = sum(line.verdicts.values())
    segments, position = [], 0.0
    for verdict, name in _VERDICT_CLASSES:
        number = line.verdicts[verdict]
        if number:
            share = width * number / total
            segments.append(
                {"name": name, "x": round(position, 2), "width": round(share, 2), "number": number}
            )
            position += share
    return segments


def _groups(model: Model) -> list[dict[str, Any]]:
    found = []
    for group in analysis.groups(model):
        if not group.total.pairs:
            continue
        lines = [{"cells": content.headline_cells(line), "bar": bar(line)} for line in group.collectives]
        found.append(
            {
                "title": content.group_title(model, group),
                "mean": text.ratio(group.total.mean),
                "pairs": content.cases_text(group.total),
                "bar": bar(group.total, 520),
                "verdicts": [
                    (name, verdict, group.total.verdicts[verdict]) for verdict, name in _VERDICT_CLASSES
                ],
                "best": content.pair_text(group.total.best),
                "worst": content.pair_text(group.total.worst),
                "alone": group.total.alone,
                "missing": group.total.missing,
                "lines": lines,
            }
        )
    return found


def _workloads(model: Model) -> list[dict[str, Any]]:
    costs = analysis.workload_costs(model)
    return [
        {
            "cost": cost,
            "where": content.slice_text(cost.key, model),
            "table": content.workload_table(cost),
            "bars": any(c.unit is not None for c in cost.costs),
        }
        for cost in costs
    ]


def render(model: Model) -> str:
    """The page."""
    scripts = [_vega(), _own_script()]
    styles = [theme.css() + _asset("page.css")]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_asset("template.html"))
    limit = payload.points_per_result(len(model.all_rows))
    return template.render(
        policy=Markup(policy(scripts, styles)),
        style=Markup(styles[0]),
        vega=Markup(scripts[0]),
        script=Markup(scripts[1]),
        data=script_json({**payload.page(model), "specs": charts.templates(model.backends)}),
        model=model,
        content=content,
        lead=content.lead(model),
        started=content.started(model),
        notices=content.notices(model),
        groups=_groups(model),
        no_headline=content.why_no_headline(model),
        fastest=content.fastest_counts(model) if len(model.backends) > 1 else None,
        crossovers=content.crossovers(model),
        uncrossed=content.uncrossed(model),
        workloads=_workloads(model),
        failures=content.failures(model),
        skips=content.skips(model.skips),
        ceilings=content.ceilings(model),
        studies=studies.studies(model),
        few=method.few(),
        paragraphs=method.paragraphs(model),
        factors=method.factors(model),
        provenance=content.provenance(model),
        points=limit,
        thinned=any(len(row.samples) > limit for row in model.all_rows),
        ratio_steps=[f"{round(step, 2):g}" for step in theme.RATIO_STEPS],
        share_steps=[text.percent(step) for step in theme.SHARE_STEPS],
        variation_steps=[text.percent(step) for step in theme.VARIATION_STEPS],
    )
