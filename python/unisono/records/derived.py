"""Computes the median, interval and bandwidths of a result, when it is written and again when it is read."""

from __future__ import annotations

import msgspec

from .schema import Case, Result
from .stats import Interval, median_interval, visited_interval
from .vocabulary import DTYPES, KNOWN, bus_factor_of, copy_factor_of

# Samples are written with 4 decimals: the median of what was read differs by at most half of the last one.
_ROUNDING_US = 1e-4
_SHARE = 1e-3  # of a bandwidth: the effect of that rounding on the shortest measured times, 0.1 µs


def interval_of(result: Result) -> Interval:
    """Returns the median of the samples, and an interval that covers that of the visits' medians too."""
    if result.visits:
        return visited_interval(result.samples_us, result.visits)
    return median_interval(result.samples_us)


def bandwidths(
    case: Case, median_us: float, ceiling_gbps: float | None, wire_bits: float | None
) -> tuple[float, float, float | None]:
    """Returns algorithm bandwidth, bus bandwidth (both GB/s), and the share of the ceiling.

    The share counts the bytes that travel: `wire_bits` an element, None: the element's own bits. If one rank
    alone permutes rows, it counts what a copy of as much traffic copies."""
    algbw = case.bytes / (median_us * 1e3) if median_us > 0 else 0.0
    busbw = algbw * bus_factor_of(case)
    travels = busbw * wire_bits / (8 * DTYPES[case.dtype].itemsize) if wire_bits else busbw
    copies = copy_factor_of(case)
    travels = travels if copies is None else algbw * copies
    return algbw, busbw, travels / ceiling_gbps if ceiling_gbps and travels > 0 else None


def from_samples(result: Result) -> tuple[Result, str | None]:
    """Returns the result with values computed from its samples, and in words how the written ones differed
    (None: not at all).

    Requires: samples, and visits that add up to them. Written values stay if they differ only by rounding.
    Bandwidths of an unknown collective cannot be computed, and stay too."""
    interval = interval_of(result)
    times = {"median_us": interval.median, "ci_low_us": interval.low, "ci_high_us": interval.high}
    found: dict[str, float | None] = {**times}
    wrong = [name for name, value in times.items() if abs(value - getattr(result, name)) > _ROUNDING_US]
    if result.case.collective in KNOWN:
        values = bandwidths(result.case, interval.median, result.ceiling_gbps, result.wire_bits)
        rates = dict(zip(("algbw_gbps", "busbw_gbps", "sol"), values, strict=True))
        wrong += [name for name, value in rates.items() if _differ(getattr(result, name), value)]
        found |= rates
    if not wrong:
        return result, None
    example = f"{wrong[0]}: {_number(getattr(result, wrong[0]))} written, {_number(found[wrong[0]])} computed"
    changed = msgspec.structs.replace(result, **found)
    return changed, f"{', '.join(wrong)} differ from the samples ({example})"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _differ(written: float | None, computed: float | None) -> bool:
    if written is None or computed is None:
        return written is not computed
    return abs(written - computed) > _SHARE * abs(computed)
