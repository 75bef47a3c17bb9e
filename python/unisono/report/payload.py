"""Makes the rows that charts and tables show: plain JSON values, made once from the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from unisono.records import Case, Result, Verification, text
from unisono.records.stats import Interval
from unisono.records.vocabulary import DTYPES, pair_name, shape_text, size_text, title

from .analysis import Efficiency, Point, WorkloadCost, group_by
from .model import Model
from .pairing import Pair, pairs
from .row import Key, Row

# The properties by which a reader selects rows on the page. A row without one of them (the op of a broadcast)
# fits every choice.
_NAMES = "machine ranks mode device processes memory placement offset inputs pair scaling shape dtype op root"
DIMENSIONS = {name: name.capitalize() for name in _NAMES.split()} | {"dtype": "Type"}
# The columns of all results with their headings, in order.
COLUMNS = {
    **{name: name.capitalize() for name in ("collective", "size")},
    **DIMENSIONS,
    **{name: name.capitalize() for name in ("workload", "backend", "algorithm")},
    "t_median": "Median",
    "t_interval": "95 % interval",
    "t_min": "Minimum",
    "t_p95": "p95",
    "t_p99": "p99",
    "t_max": "Maximum",
    "t_algbw": "algbw GB/s",
    "t_busbw": "busbw GB/s",
    "t_sol": "SoL",
    "t_cv": "Variation",
    "t_skew": "Skew",
    "n": "Samples",
    "calls": "Calls",
    "converged": "Converged",
    "bound": "Verified",
}
PERCENTILES = ("collective", "size", "backend", "n", "t_min", "t_median", "t_p95", "t_p99", "t_max")
_KEPT = ("collective", "size", "backend", "t_median", "t_interval", "n")  # shown also if the same everywhere
# The numbers by which a column is sorted and aligned; a column `t_x` has x.
_SORTED_BY = {
    "size": "bytes",
    "t_interval": "low",
    "ranks": "ranks",
    "root": "root",
    "offset": "offset",
    "n": "n",
    "calls": "calls",
}
_DISTRIBUTION_BUDGET = 60_000  # values in the page for box plots and cumulative shares: about 400 KB
_DISTRIBUTION_RANGE = (21, 101)  # values of each result

Json = dict[str, Any]


def _round(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def _time(us: float | None) -> str:
    return text.MISSING if us is None else text.time(us) if us else "0"


def slice_of(key: Key, model: Model) -> Json:
    """Returns the values of DIMENSIONS, and what else places a case. A barrier has no size, so it has neither
    type nor memory. A case that is no point of a scaling has a value for `scaling`, which keeps the points
    apart from the sweep."""
    c, sized = key.case, key.case.bytes > 0
    return {
        "collective": title(c),
        "bytes": c.bytes,
        "size": size_text(c),
        "machine": model.machines[key.machine],
        "ranks": c.ranks,
        "mode": c.mode,
        "device": c.device,
        "processes": "one for all" if c.one_process else "one per rank",
        "memory": c.memory if sized else None,
        "placement": c.placement.replace("_", " "),
        "offset": c.offset if sized else None,
        "inputs": c.inputs if sized else None,
        "dtype": c.dtype if sized else None,
        "op": c.op,
        "root": c.root,
        "pair": pair_name(c),
        "scaling": c.scaling.kind if c.scaling else "none",
        "shape": shape_text(c),
        "workload": key.workload,
    }


_PLACES = (
    "ranks device processes mode memory shape dtype placement offset inputs pair workload scaling machine"
)
_PLACE = _PLACES.split()
# Values that are usual, and that words leave out.
USUAL = {"device": "cpu", "processes": "one per rank", "scaling": "none", "offset": 0, "inputs": "kept"}
_PHRASES: dict[str, Callable[[Any], str]] = {
    "ranks": lambda ranks: text.count(ranks, "rank"),
    "processes": lambda how: "one process",
    "offset": "offset {} B".format,
    "inputs": "inputs {}".format,
    "pair": "pair {}".format,
    "root": "root {}".format,
    "scaling": "{} scaling".format,
}


def in_words(values: Json, usual: Json) -> list[str]:
    """Returns values of dimensions in words (`2 ranks`, `latency`), except for absent and `usual` ones."""
    named = {name: value for name, value in values.items() if value is not None and value != usual.get(name)}
    return [_PHRASES.get(name, str)(value) for name, value in named.items()]


def in_common(rows: Sequence[Json], model: Model, names: Sequence[str] = _PLACE) -> str:
    """Says what rows with the values of `slice_of` have in common: `2 ranks, latency, plain, f32`."""
    values = {name: {row[name] for row in rows} for name in names}
    for name, found in values.items():
        if name != "workload":  # a row without one belongs to the sweep
            found.discard(None)
    same = {name: found.pop() for name, found in values.items() if len(found) == 1}
    machine = model.machines[0] if len(model.machines) == 1 else None
    return ", ".join(in_words(same, {**USUAL, "placement": "out of place", "machine": machine}))


def slice_text(key: Key, model: Model) -> str:
    """Says where a case was measured, except for collective, type and size: `2 ranks, latency, plain`."""
    names = [name for name in _PLACE if name not in ("dtype", "workload")]
    return in_common([slice_of(key, model)], model, names)


def shared_columns(rows: list[Row]) -> dict[int, int]:
    """Returns the column of each number of bytes in a table by size. Blocked collectives round a size down to
    whole blocks (65532 of 65536 for 3 ranks). Such a size stands in the column of the power of two within a
    tenth of it, unless its collective has another size there."""
    sizes = {(row.key.case.collective, row.key.case.bytes) for row in rows if row.key.case.moe is None}

    def near(count: int) -> int:
        power = 1 << max((count * 10 // 9).bit_length() - 1, 0)
        return power if count > 0 and 0 <= power - count <= power // 10 else count

    crowd = Counter((name, near(count)) for name, count in sizes)
    crowded = {count for name, count in sizes if crowd[name, near(count)] > 1}
    return {count: count if count in crowded else near(count) for _, count in sizes}


_NUMBERS: dict[str, Callable[[Row], float | None]] = {
    "median": lambda row: row.interval.median,
    "low": lambda row: row.interval.low,
    "high": lambda row: row.interval.high,
    "min": lambda row: float(row.samples[0]),
    "q1": lambda row: row.quartiles[0],
    "q3": lambda row: row.quartiles[1],
    "max": lambda row: float(row.samples[-1]),
    "wlow": lambda row: row.whiskers[0],
    "whigh": lambda row: row.whiskers[1],
    "p95": lambda row: row.percentiles[0.95],
    "p99": lambda row: row.percentiles[0.99],
    "cv": lambda row: row.variation,
    "algbw": lambda row: row.result.algbw_gbps,
    "busbw": lambda row: row.result.busbw_gbps,
    "bwlow": lambda row: row.bandwidth(row.interval.high),
    "bwhigh": lambda row: row.bandwidth(row.interval.low),
    "ceiling": lambda row: row.result.ceiling_gbps,
    "sol": lambda row: row.result.sol,
    "skew": lambda row: row.result.skew_us,
}
_WORDS: dict[str, Callable[[float | None], str]] = {
    **dict.fromkeys(("median", "min", "max", "p95", "p99", "skew"), _time),
    **dict.fromkeys(("cv", "sol"), text.percent),
    **dict.fromkeys(("algbw", "busbw"), text.gbps),
}


def results(model: Model) -> list[Json]:
    """Returns all results as rows, in the report's order."""
    columns = shared_columns(model.all_rows)
    return [_result(row, model, columns) for row in model.all_rows]


def _result(row: Row, model: Model, columns: dict[int, int]) -> Json:
    """Returns a result as a row: numbers to plot and sort by (µs, GB/s, shares), and as `t_…` in words."""
    r = row.result
    numbers = {name: number(row) for name, number in _NUMBERS.items()}
    return {
        "id": row.id,
        "backend": row.backend,
        **slice_of(row.key, model),
        **_column(row.key, columns),
        "algorithm": _algorithm(r),
        "n": len(row.samples),
        "calls": r.calls_per_sample,
        "converged": "yes" if r.converged else "no",
        "bound": _bound(r.verification),
        **{name: _round(number) for name, number in numbers.items()},
        **{f"t_{name}": words(numbers[name]) for name, words in _WORDS.items()},
        "t_interval": text.span(row.interval.low, row.interval.high),
    }


def _column(key: Key, columns: dict[int, int]) -> Json:
    """Returns the column of a case in a table by size; of a mixture of experts, by tokens."""
    case = key.case
    column = columns.get(case.bytes, case.bytes) if case.moe is None else case.moe.tokens
    return {"column": column, "t_column": size_text(key.case, column)}


def _algorithm(result: Result) -> str:
    """Returns the algorithm's name, the bits of an element on the wire if it quantises, and on GPUs what it
    uses and where the data passes: `two_shot, 8.25 of 16 bits, 24 SMs, through host memory`."""
    parts = [result.algorithm or text.MISSING]
    if result.wire_bits is not None:
        parts.append(f"{result.wire_bits:g} of {8 * DTYPES[result.case.dtype].itemsize} bits")
    parts += [] if result.sms is None else [text.count(result.sms, "SM")]
    parts += ["through host memory"] if result.staged else []
    return ", ".join(parts)


def _bound(check: Verification) -> str:
    """Returns what the check demanded, and how much of it the error of a quantised result took."""
    return check.bound if check.error is None else f"{check.bound}; {check.error:.0%} of that seen"


def cell(value: Any) -> str:
    """Returns a value of a row as the text of a table's cell."""
    return text.MISSING if value in (None, "") else str(value)


def columns_of(rows: list[Json], names: Iterable[str] = COLUMNS) -> Json:
    """Returns the columns that tell rows apart, and in words what is the same in every row. A column has its
    heading, what it shows, and the number by which it is sorted, None if there is none."""
    alike = [name for name in names if name not in _KEPT and len({row[name] for row in rows}) == 1]
    same = {name: rows[0][name] for name in alike}
    places = {name: value for name, value in same.items() if name in (*DIMENSIONS, "workload")}
    words = in_words(places, USUAL)
    words += [f"{COLUMNS[name].lower()} {cell(same[name])}" for name in alike if name not in places]
    columns = [[COLUMNS[name], name, _sorted_by(name)] for name in names if name not in same]
    return {"same": ", ".join(words), "columns": columns}


def _sorted_by(name: str) -> str | None:
    return name[2:] if name[2:] in _NUMBERS else _SORTED_BY.get(name)


def _heat_cell(model: Model, key: Key, cell: str, own: str, pair: Pair | None) -> Json:
    return {
        **slice_of(key, model),
        "cell": cell,
        "own": own,
        "ratio": _round(pair.ratio) if pair else None,
        "t_ratio": text.ratio(pair.ratio) if pair else "",
        "t_range": f"{text.ratio(pair.interval.low)} to {text.ratio(pair.interval.high)}" if pair else "",
        "verdict": str(pair.verdict) if pair else cell,
        "t_own": f"{pair.own.backend} {text.time(pair.own.interval.median)}" if pair else own,
        "t_peer": f"{pair.peer.backend} {text.time(pair.peer.interval.median)}" if pair else text.MISSING,
    }


def heat(model: Model) -> list[Json]:
    """Returns the cells of the heatmap. `≈` before a ratio: the verdict is neither FASTER nor SLOWER."""
    matched, alone, _ = pairs(model.rows, model.subject)
    found: dict[Key, tuple[str, str, Pair | None]] = {}
    for machine, failure in model.failures:
        if failure.backend == model.subject and _in_sweep(model, failure.case):
            found[Key(machine, None, failure.case)] = "failed", "", None
    for row in alone:
        found[row.key] = "no peer", text.time(row.interval.median), None
    for pair in matched:
        mark = "" if pair.verdict in ("FASTER", "SLOWER") else "≈"
        found[pair.own.key] = mark + text.ratio(pair.ratio), text.time(pair.own.interval.median), pair
    columns = shared_columns(model.all_rows)
    keys = sorted(found, key=Key.order)
    return [_heat_cell(model, key, *found[key]) | _column(key, columns) for key in keys]


def _in_sweep(model: Model, case: Case) -> bool:
    """Returns whether a failed case's collective and size are on the axes of the heatmap."""
    cases = [row.key.case for row in model.rows]
    return any(c.collective == case.collective for c in cases) and any(c.bytes == case.bytes for c in cases)


def costs(cost: WorkloadCost) -> list[Json]:
    """Returns the bars of a workload's chart."""
    found = [(cost.backend, cost.unit) for cost in cost.costs if cost.unit is not None]
    return [{"backend": name, **_interval(unit), "t_value": text.time(unit.median)} for name, unit in found]


def _interval(interval: Interval) -> Json:
    ends = {"value": interval.median, "low": interval.low, "high": interval.high}
    return {name: _round(value) for name, value in ends.items()}


def efficiency_panels(found: list[Efficiency]) -> list[Json]:
    """Returns a panel for each case of a scaling, with the curves of all backends."""
    return [
        {
            "title": f"{title(where.case)}, {text.size(members[0].bytes)}",
            "detail": f"{where.case.mode}, {where.case.memory}, {where.case.dtype}",
            "rows": [_point(one.backend, point) for one in members for point in one.points],
        }
        for where, members in group_by(found, lambda one: one.where).items()
    ]


def _point(backend: str, point: Point) -> Json:
    row, efficiency = point.row, point.efficiency
    return {
        "backend": backend,
        "ranks": row.key.case.ranks,
        **_interval(efficiency),
        "t_value": text.percent(efficiency.median),
        "t_median": text.time(row.interval.median),
        "t_busbw": text.gbps(row.result.busbw_gbps),
    }


def points_per_result(results: int) -> int:
    """Returns how many order statistics of a result's samples the page holds."""
    low, high = _DISTRIBUTION_RANGE
    return max(low, min(high, _DISTRIBUTION_BUDGET // max(results, 1)))


def order_statistics(row: Row, limit: int) -> list[float]:
    """Returns at most `limit` of the sorted samples, evenly spaced in rank, minimum and maximum included."""
    n = len(row.samples)
    ranks = range(n) if n <= limit else (round(i * (n - 1) / (limit - 1)) for i in range(limit))
    return [float(f"{row.samples[i]:.5g}") for i in ranks]


def dimensions(rows: list[Json]) -> list[Json]:
    """Returns each dimension's values and the one shown first: the most frequent. Of modes that are
    equally frequent latency or graph comes first."""
    found = []
    for name, label in DIMENSIONS.items():
        counts = Counter(row[name] for row in rows if row[name] is not None)
        if not counts:
            continue
        values = sorted(counts)
        first = max(values, key=lambda value: (counts[value], value in ("latency", "graph")))
        found.append({"name": name, "label": label, "values": values, "first": first})
    return found


def table(rows: list[Json]) -> Json:
    """Returns rows as lists of values in the order of `columns`. What is the `same` in every row stands once,
    and a column of few `words` holds their indices."""
    names = list(rows[0]) if rows else []
    values = {name: list(dict.fromkeys(row[name] for row in rows)) for name in names}
    same = {name: found[0] for name, found in values.items() if len(found) == 1}
    words = {
        name: found
        for name, found in values.items()
        if name not in same and 8 * len(found) <= len(rows) and any(isinstance(v, str) for v in found)
    }
    columns = [name for name in names if name not in same]
    index = {name: {value: i for i, value in enumerate(found)} for name, found in words.items()}
    cells = [[index[n][row[n]] if n in words else row[n] for n in columns] for row in rows]
    return {"same": same, "words": words, "columns": columns, "rows": cells}
