"""Writes numbers for people, in report and bench: sizes, times, ratios, with three significant digits."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

MISSING = "–"  # noqa: RUF001  (an en dash: there is no such number)
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def digits(value: float, significant: int = 3) -> str:
    """Returns `value` with `significant` digits, without exponent: 0.0123, 1.23, 12.3, 123, 1230."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    places = max(significant - 1 - math.floor(math.log10(abs(rounded))), 0) if rounded else 0
    return f"{rounded:.{places}f}"


def size(count: int) -> str:
    """Returns bytes in powers of 1024: `8 B`, `64 KiB`, `25.5 MiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_SIZE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    whole = value == int(value)
    return f"{int(value) if whole else digits(value)} {_SIZE_UNITS[unit]}"


def time(us: float) -> str:
    """Returns microseconds in the unit that reads best: `850 ns`, `12.3 µs`, `4.56 ms`, `1.20 s`."""
    for limit, scale, unit in ((1.0, 1e3, "ns"), (1e3, 1.0, "µs"), (1e6, 1e-3, "ms")):
        if us < limit * 0.9995:
            return f"{digits(us * scale)} {unit}"
    return f"{digits(us * 1e-6)} s"


def span(low: float, high: float) -> str:
    """Returns an interval of times (µs), in one unit if both have the same: `12.1 to 12.6 µs`."""
    first, last = time(low), time(high)
    if first.split()[1] == last.split()[1]:
        first = first.split()[0]
    return f"{first} to {last}"


def ratio(value: float) -> str:
    """Returns a speed-up: `2.31×`, `0.87×`, `12.4×`."""  # noqa: RUF002
    return f"{value:.2f}×" if 0.095 <= value < 9.995 else f"{digits(value)}×"  # noqa: RUF001


def percent(share: float | None) -> str:
    """Returns a share as per cent: `3.2 %`, `87 %`, `< 0.1 %`; a dash for None."""
    if share is None or not math.isfinite(share):
        return MISSING
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{digits(100 * share, 2)} %"


def gbps(value: float | None) -> str:
    """Returns GB/s without the unit; a dash for None."""
    return MISSING if value is None else digits(value)


def duration(seconds: float) -> str:
    """Returns an elapsed time: `42 s`, `8 min 12 s`, `1 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(stamp: str) -> str:
    """Returns an ISO 8601 time in UTC to the minute: `2026-11-21 01:32 UTC`; any other text unchanged."""
    try:
        return datetime.fromisoformat(stamp).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return stamp


def count(number: int, noun: str) -> str:
    """Returns number and noun: `1 case`, `12 cases`, `2 launches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def shortened(items: list[str], where: str = "") -> list[str]:
    """Returns the first 8 items, and how many more there are; `where`: a phrase that says where those are."""
    rest = len(items) - 8
    return items if rest <= 0 else [*items[:8], f"and {rest:,} more{where}."]


def listing(items: list[str]) -> str:
    """Returns the items in a sentence: `a`, `a and b`, `a, b and c`; `none` without any."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def printable(value: str) -> str:
    """Returns `value` with U+FFFD for every character that is not printable, except new lines and tabs.

    Escape sequences and marks that reverse a text's direction therefore reach no terminal and no page."""
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value)


def plain(value: object) -> str:
    """Returns `value` on one line of a terminal."""
    return printable(" ".join(str(value).split()))


def markdown(value: object) -> str:
    """Returns `value` for a Markdown table cell or sentence: without markup, HTML or new lines."""
    flat = re.sub(r"\s+", " ", str(value)).strip()
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", flat)
