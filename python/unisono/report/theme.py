"""Holds the colours and type of the report.

The page uses them as CSS variables, in light and dark. So do its charts (an SVG attribute may be
`var(--ink)`), which therefore follow the theme and the printer. Pictures get the light values."""

from __future__ import annotations

import re
from typing import Any

from unisono.records import text

FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# Known backends have a fixed colour and shape; others take what is left, in order.
_NAMES = "unisono mpi gloo nccl nccl-windows torch-symm:one_shot torch-symm:two_shot"
_KNOWN = {name: number for number, name in enumerate(_NAMES.split())}
# The symbols of Vega that the series have, and their outlines in the page's legend.
SHAPES = {
    "circle": "M5 1a4 4 0 1 0 .01 0z",
    "square": "M1.5 1.5h7v7h-7z",
    "triangle-up": "M5 1l4.4 8H.6z",
    "diamond": "M5 .5L9.5 5 5 9.5.5 5z",
    "cross": "M3.5 1h3v2.5H9v3H6.5V9h-3V6.5H1v-3h2.5z",
    "triangle-down": "M5 9L.6 1h8.8z",
    "stroke": "M0 4h10v2H0z",
    "triangle-right": "M9 5L1 9.4V.6z",
}

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
# The classes of coloured cells: steps between them, colours in light and dark, white (w) or black (k) text.
RATIO_STEPS = (0.25, 0.5, 0.667, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 4.0)  # slower (orange) to faster (blue)
SHARE_STEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8)  # of the speed of light
VARIATION_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
STEPS = {"d": RATIO_STEPS, "p": SHARE_STEPS, "v": VARIATION_STEPS}
_CLASSES = {
    "d": (
        "#96330f #bd4f12 #de7a35 #efa76c #f8d3b3 #ededea #cfe0f6 #9fc3ee #6da2e3 #3775c6 #1c4c99",
        "#ffa066 #e07d3d #a5531f #85491f #553522 #2c3138 #24394f #25507b #2b68a8 #5595dd #8cc0ff",
        ("wwkkkkkkkww", "kkwwwwwwwkk"),
    ),
    "p": (
        "#eef2f8 #dde8f6 #c3d8f2 #a1c3ee #7caae4 #5290d8 #2f70c2 #1c4c99",
        "#1d2530 #1f2e40 #223a56 #254a72 #2b5e94 #336ca8 #5f9ade #8cc0ff",
        ("kkkkkkww", "wwwwwwkk"),
    ),
    "v": (
        "#f3f2ef #f6e9dc #f7d9bd #f4c093 #eca065 #dc7a39 #bd4f12 #8d300e",
        "#22262b #2f2a26 #453325 #634027 #86512a #9c5523 #de8444 #ffae78",
        ("kkkkkkww", "wwwwwwkk"),
    ),
}
_INK = ({"w": "#ffffff", "k": "#1a1e23"}, {"w": "#e7eaee", "k": "#101418"})


def variables(dark: bool = False) -> dict[str, str]:
    """Returns all colours of one theme by the name of their CSS variable, without the dashes."""
    found = {name: values[dark] for name, values in _BASE.items()}
    found |= {f"s{i}": values[dark] for i, values in enumerate(_SERIES)}
    for name, (*colours, inks) in _CLASSES.items():
        found |= {f"{name}{i}": colour for i, colour in enumerate(colours[dark].split())}
        found |= {f"{name}{i}t": _INK[dark][ink] for i, ink in enumerate(inks[dark])}
    return found


def css() -> str:
    """Returns the variables as CSS (light, dark if the reader prefers it, light on paper) and a rule for each
    class of coloured cells."""
    light, dark = ("".join(f"--{k}:{v};" for k, v in variables(side).items()) for side in (False, True))
    names = [f"{name}{i}" for name, steps in STEPS.items() for i in range(len(steps) + 1)]
    rules = "".join(
        f".scale .{n},.pairs .{n}{{fill:var(--{n});background:var(--{n});color:var(--{n}t)}}\n" for n in names
    )
    return (
        f":root{{color-scheme:light dark;--font:{FONT};{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{rules}"
    )


def series(backends: list[str]) -> dict[str, int]:
    """Returns the series (colour and shape) of each backend."""
    chosen = {name: _KNOWN[name] for name in backends if name in _KNOWN}
    free = [i for i in range(len(_SERIES)) if i not in chosen.values()]
    for i, name in enumerate(name for name in backends if name not in chosen):
        chosen[name] = free[i] if i < len(free) else i % len(_SERIES)
    return {name: chosen[name] for name in backends}


def colours(backends: list[str]) -> list[str]:
    """Returns the CSS colour of each backend."""
    return [f"var(--s{number})" for number in series(backends).values()]


def shapes(backends: list[str]) -> list[str]:
    """Returns the symbol of each backend, so that colour is not the only difference."""
    return [list(SHAPES)[number] for number in series(backends).values()]


def steps_in_words(name: str) -> list[str]:
    """Returns the steps of a scale for its legend."""
    return [f"{round(step, 2):g}" if name == "d" else text.percent(step) for step in STEPS[name]]


def classes(name: str, ink: bool = False) -> list[str]:
    """Returns the colours of the classes of a scale (`d`, `p` or `v`), or of the text on them."""
    return [f"var(--{name}{i}{'t' if ink else ''})" for i in range(len(STEPS[name]) + 1)]


def resolve(spec: Any) -> Any:
    """Returns a copy of a chart's specification with the light colours in place of the variables."""
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
    """Returns the Vega-Lite configuration of every chart."""
    words = {"labelColor": "var(--ink2)", "titleColor": "var(--ink2)", "titleFontWeight": 500}
    lines = {
        "gridColor": "var(--grid)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "tickSize": 4,
    }
    sizes = {"labelFontSize": 11, "titleFontSize": 11, "titlePadding": 8, "labelPadding": 5}
    title = {"color": "var(--ink)", "fontSize": 13, "fontWeight": 600, "anchor": "start", "offset": 8}
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": {**words, **lines, **sizes},
        "legend": {**words, "labelFontSize": 12, "symbolStrokeWidth": 2},
        "title": {**title, "subtitleColor": "var(--ink2)", "subtitleFontSize": 11},
    }
