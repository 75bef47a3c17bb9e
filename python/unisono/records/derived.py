"""Computes the median, interval and bandwidths of a result, when it is written and again when it is read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .schema import NOT_CHECKED, Case, Result
from .stats import Interval, launched_interval, median_interval, visited_interval
from .vocabulary import DTYPES, KNOWN, bus_factor_of, copy_factor_of

# Samples are written with 4 decimals: the median of what was read differs by at most half of the last one.
_ROUNDING_US = 1e-4
_SHARE = 1e-3  # of a bandwidth: the effect of that rounding on the shortest measured times, 0.1 µs


def interval_of(result: Result) -> Interval:
    """Returns the median, and an interval that covers the visits' and the launches' medians too."""
    if len(set(result.launches)) > 1:
        return launched_interval(result.samples_us, result.visits, result.launches)
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


def joined(results: Sequence[Result]) -> Result:
    """Returns the result of a case on a backend over all launches. One that is not checked makes the whole
    not checked.

    Requires: results that say their visits and launches."""
    first = results[0]
    if len(results) == 1:
        return first
    skews = [one.skew_us for one in results if one.skew_us is not None]
    ceilings = [one.ceiling_gbps for one in results if one.ceiling_gbps is not None]
    unchecked = [one.verification for one in results if one.verification.bound == NOT_CHECKED]
    algorithms = dict.fromkeys(one.algorithm for one in results if one.algorithm is not None)
    whole = msgspec.structs.replace(
        first,
        algorithm=" or ".join(algorithms) or None,
        samples_us=[sample for one in results for sample in one.samples_us],
        visits=[visit for one in results for visit in one.visits],
        launches=[launch for one in results for launch in one.launches],
        skew_us=float(np.median(skews)) if skews else None,
        ceiling_gbps=float(np.median(ceilings)) if ceilings else None,
        verification=(unchecked or [first.verification])[0],
        converged=all(one.converged for one in results),
    )
    return from_samples(whole)[0]


def of_launches(result: Result, launches: set[int]) -> Result:
    """Returns the part of a joined result that is of these launches.

    Requires: at least one visit of them."""
    kept = [launch in launches for launch in result.launches]
    of_sample = np.repeat(kept, result.visits)
    whole = msgspec.structs.replace(
        result,
        samples_us=np.asarray(result.samples_us)[of_sample].tolist(),
        visits=[visit for visit, keep in zip(result.visits, kept, strict=True) if keep],
        launches=[launch for launch, keep in zip(result.launches, kept, strict=True) if keep],
    )
    return from_samples(whole)[0]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _differ(written: float | None, computed: float | None) -> bool:
    if written is None or computed is None:
        return written is not computed
    return abs(written - computed) > _SHARE * abs(computed)
