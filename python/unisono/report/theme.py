"""Colours and type of the report, once: the page uses them as CSS variables, in light and dark, and so do the
charts in it (an SVG attribute may be `var(--ink)`), which therefore follow the theme and the printer; PNGs
get the light values."""

from __future__ import annotations

import re
from typing import Any

FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# One fixed colour and shape per backend: known names have theirs, others take what is left in order.
_KNOWN = {
    name: number
    for number, name in enumerate(
        ("unisono", "mpi", "gloo", "nccl", "nccl-windows", "torch-symm:one_shot", "torch-symm:two_shot")
    )
}
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke", "triangle-right")

# (light, dark); every pair keeps its text readable at 4.5:1 or its mark at 3:1 on the surface.
_SERIES = (
    ("#1f5fd0", "#6fa3ff"),
    ("#c96508", "#f2a154"),
    ("#0b8277", "#43c6b6"),
    ("#4f7d00", "#a3cf4d"),
    ("#b8235a", "#f58bb2"),
    ("#6a44bf", "#b59cf7"),
    ("#82552a", "#cfa375"),
    ("#56616d", "#9aa6b2"),
)
_BASE = {
    "bg": ("#f7f7f5", "#0f1216"),
    "surface": ("#ffffff", "#161a20"),
    "raised": ("#f2f3f4", "#1e242c"),
    "ink": ("#1a1e23", "#e7eaee"),
    "ink2": ("#545d67", "#a9b2bd"),
    "ink3": ("#6f7883", "#8b95a1"),
    "line": ("#dfe2e5", "#2d343d"),
    "grid": ("#eceef0", "#262c34"),
    "accent": ("#1f5fd0", "#6fa3ff"),
    "bad": ("#b5350c", "#ff8f66"),
    "badbg": ("#fdf0ea", "#2f1c16"),
    "warn": ("#8a5a00", "#e8b75a"),
    "warnbg": ("#fdf6e3", "#2b2414"),
}
# Slower (orange) to faster (blue) in eleven classes around a neutral middle, with the colour of the text on
# each.
RATIO_STEPS = (0.25, 0.5, 0.667, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 4.0)
_DIVERGING = (
    "#96330f #bd4f12 #de7a35 #efa76c #f8d3b3 #ededea #cfe0f6 #9fc3ee #6da2e3 #3775c6 #1c4c99".split(),
    "#ffa066 #e07d3d #a5531f #85491f #553522 #2c3138 #24394f #25507b #2b68a8 #5595dd #8cc0ff".split(),
)
_DIVERGING_INK = ("wwkkkkkkkww", "kkwwwwwwwkk")
SHARE_STEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8)  # speed of light
_SHARE = (
    "#eef2f8 #dde8f6 #c3d8f2 #a1c3ee #7caae4 #5290d8 #2f70c2 #1c4c99".split(),
    "#1d2530 #1f2e40 #223a56 #254a72 #2b5e94 #336ca8 #5f9ade #8cc0ff".split(),
)
_SHARE_INK = ("kkkkkkww", "wwwwwwkk")
VARIATION_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_VARIATION = (
    "#f3f2ef #f6e9dc #f7d9bd #f4c093 #eca065 #dc7a39 #bd4f12 #8d300e".split(),
    "#22262b #2f2a26 #453325 #634027 #86512a #9c5523 #de8444 #ffae78".split(),
)
_VARIATION_INK = ("kkkkkkww", "wwwwwwkk")


def _inks(codes: str, dark: bool) -> list[str]:
    light_text, dark_text = ("#e7eaee", "#101418") if dark else ("#ffffff", "#1a1e23")
    return [light_text if code == "w" else dark_text for code in codes]


def variables(dark: bool = False) -> dict[str, str]:
    """All colours of one theme by the name of their CSS variable, without the dashes."""
    side = 1 if dark else 0
    found = {name: values[side] for name, values in _BASE.items()}
    found |= {f"s{i}": values[side] for i, values in enumerate(_SERIES)}
    scales = (("d", _DIVERGING, _DIVERGING_INK), ("p", _SHARE, _SHARE_INK), ("v", _VARIATION, _VARIATION_INK))
    for name, colours, inks in scales:
        found |= {f"{name}{i}": colour for i, colour in enumerate(colours[side])}
        found |= {f"{name}{i}t": colour for i, colour in enumerate(_inks(inks[side], dark))}
    return found


def css() -> str:
    """The variables as CSS: light, dark where the reader prefers it, and light on paper."""
    light, dark = ("".join(f"--{k}:{v};" for k, v in variables(side).items()) for side in (False, True))
    return (
        f":root{{color-scheme:light dark;--font:{FONT};{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )


def series(backends: list[str]) -> dict[str, int]:
    """Which of the series (colour and shape) each backend has."""
    chosen = {name: _KNOWN[name] for name in backends if name in _KNOWN}
    free = [i for i in range(len(_SERIES)) if i not in chosen.values()]
    for i, name in enumerate(name for name in backends if name not in chosen):
        chosen[name] = free[i] if i < len(free) else i % len(_SERIES)
    return chosen


def colours(backends: list[str]) -> list[str]:
    """The CSS colour of each backend."""
    chosen = series(backends)
    return [f"var(--s{chosen[name]})" for name in backends]


def shapes(backends: list[str]) -> list[str]:
    """The symbol of each backend, so that colour is not the only difference."""
    chosen = series(backends)
    return [SHAPES[chosen[name]] for name in backends]


def classes(name: str, steps: tuple[float, ...], ink: bool = False) -> list[str]:
    """The colours of the classes between `steps` of a scale (`d`, `p` or `v`), or of the text on them."""
    return [f"var(--{name}{i}{'t' if ink else ''})" for i in range(len(steps) + 1)]


def resolve(spec: Any) -> Any:
    """A copy of a chart's specification with the light colours in place of the variables, for a PNG."""
    light = variables()
    if isinstance(spec, dict):
        return {key: resolve(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [resolve(value) for value in spec]
    if isinstance(spec, str):
        match = re.fullmatch(r"var\(--(\w+)\)", spec)
        return light[match[1]] if match and match[1] in light else spec
    return spec


def config() -> dict[str, Any]:
    """The Vega-Lite configuration of every chart."""
    axis = {
        "labelColor": "var(--ink2)",
        "titleColor": "var(--ink2)",
        "gridColor": "var(--grid)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": 500,
        "titlePadding": 8,
        "labelPadding": 5,
        "tickSize": 4,
    }
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": axis,
        "legend": {
            "labelColor": "var(--ink2)",
            "titleColor": "var(--ink2)",
            "titleFontWeight": 500,
            "labelFontSize": 12,
            "symbolStrokeWidth": 2,
        },
        "title": {
            "color": "var(--ink)",
            "fontSize": 13,
            "fontWeight": 600,
            "anchor": "start",
            "subtitleColor": "var(--ink2)",
            "subtitleFontSize": 11,
            "offset": 8,
        },
        "header": {"labelColor": "var(--ink)", "labelFontWeight": 600},
    }
