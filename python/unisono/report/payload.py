"""The data of the charts and of the page's tables: plain rows of JSON values, made once from the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.records import Case, Result, text
from unisono.records.vocabulary import DTYPES, pair_name, title

from . import theme
from .analysis import BEST_OF_EACH, Efficiency, WorkloadCost, efficiencies, group_by, workload_costs
from .model import Key, Model, Pair, Row, pairs

# What a reader selects on the page; a row that has no such property (the op of a broadcast) fits every
# choice.
DIMENSIONS = (
    ("machine", "Machine"),
    ("ranks", "Ranks"),
    ("mode", "Mode"),
    ("device", "Device"),
    ("processes", "Processes"),
    ("memory", "Memory"),
    ("placement", "Placement"),
    ("pair", "Pair"),
    ("scaling", "Scaling"),
    ("dtype", "Type"),
    ("op", "Op"),
    ("root", "Root"),
)
_DISTRIBUTION_BUDGET = 60_000  # values in the page for box plots and CDFs
_DISTRIBUTION_RANGE = (21, 101)

Json = dict[str, Any]


def _round(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def slice_of(key: Key) -> Json:
    """The values of DIMENSIONS, and what else places a case. A barrier has no size, so no type and no memory
    either; a case that is no point of a scaling has a value for that, which keeps the points apart."""
    c, sized = key.case, key.case.bytes > 0
    return {
        "collective": title(c),
        "bytes": c.bytes,
        "size": text.size(c.bytes),
        "machine": key.machine,
        "ranks": c.ranks,
        "mode": c.mode,
        "device": c.device,
        "processes": "one for all" if c.one_process else "one per rank",
        "memory": c.memory if sized else None,
        "placement": c.placement,
        "dtype": c.dtype if sized else None,
        "op": c.op,
        "root": c.root,
        "pair": pair_name(c),
        "scaling": c.scaling.kind if c.scaling else "none",
        "workload": key.workload,
    }


def in_common(rows: Sequence[Json], model: Model) -> str:
    """What rows with the values of `slice_of` have in common, in words: `2 ranks, latency, plain, f32`."""
    values = {name: {row[name] for row in rows} - {None} for name, _ in DIMENSIONS} | {
        "workload": {row["workload"] for row in rows}
    }
    same = {name: found.pop() if len(found) == 1 else None for name, found in values.items()}
    parts = [
        None if same["ranks"] is None else text.count(same["ranks"], "rank"),
        None if same["device"] == "cpu" else same["device"],
        "one process" if same["processes"] == "one for all" else None,
        *(same[name] for name in ("mode", "memory", "dtype")),
        None if same["placement"] == "out_of_place" else same["placement"],
        same["pair"] and f"pair {same['pair']}",
        same["workload"],
        None if same["scaling"] in (None, "none") else f"{same['scaling']} scaling",
        model.machines[same["machine"]] if len(model.machines) > 1 and same["machine"] is not None else None,
    ]
    return ", ".join(str(part).replace("_", " ") for part in parts if part)


def shared_columns(rows: list[Row]) -> dict[int, int]:
    """The column of each size in a table by size. Blocked collectives round a size down to whole blocks
    (65532 of 65536 for 3 ranks): such a size stands in the column of the power of two within a tenth of it,
    unless its collective has another there, or that itself."""
    sizes = {(row.key.case.collective, row.key.case.bytes) for row in rows}

    def near(count: int) -> int:
        power = 1 << max((count * 10 // 9).bit_length() - 1, 0)
        return power if count > 0 and 0 <= power - count <= power // 10 else count

    crowd = Counter((name, near(count)) for name, count in sizes)
    crowded = {count for name, count in sizes if crowd[name, near(count)] > 1}
    return {count: count if count in crowded else near(count) for _, count in sizes}


def _whiskers(row: Row) -> tuple[float, float]:
    """Tukey's: the outermost samples within 1.5 quartile distances of the box."""
    q1, q3 = row.quartiles
    reach = 1.5 * (q3 - q1)
    inside = row.samples[(row.samples >= q1 - reach) & (row.samples <= q3 + reach)]
    return float(inside[0]), float(inside[-1])


def result(row: Row, columns: dict[int, int]) -> Json:
    """One result as a row: numbers to plot and sort by (µs, GB/s, shares), and as `t_…` the same in words."""
    r, interval = row.result, row.interval
    p95, p99 = row.percentiles[0.95], row.percentiles[0.99]
    low, high = float(row.samples[0]), float(row.samples[-1])
    whisker_low, whisker_high = _whiskers(row)
    numbers = {
        "median": interval.median,
        "low": interval.low,
        "high": interval.high,
        "min": low,
        "q1": row.quartiles[0],
        "q3": row.quartiles[1],
        "max": high,
        "wlow": whisker_low,
        "whigh": whisker_high,
        "p95": p95,
        "p99": p99,
        "cv": row.variation,
        "algbw": r.algbw_gbps,
        "busbw": r.busbw_gbps,
        "bwlow": row.bandwidth(interval.high),
        "bwhigh": row.bandwidth(interval.low),
        "ceiling": r.ceiling_gbps,
        "sol": r.sol,
        "skew": r.skew_us,
    }
    words = {
        "t_median": text.time(interval.median),
        "t_interval": text.span(interval.low, interval.high),
        "t_min": text.time(low),
        "t_max": text.time(high),
        "t_p95": text.MISSING if p95 is None else text.time(p95),
        "t_p99": text.MISSING if p99 is None else text.time(p99),
        "t_cv": text.percent(row.variation),
        "t_algbw": text.gbps(r.algbw_gbps),
        "t_busbw": text.gbps(r.busbw_gbps),
        "t_sol": text.percent(r.sol),
        "t_skew": text.MISSING if r.skew_us is None else text.time(r.skew_us) if r.skew_us else "0",
    }
    return {
        "id": row.id,
        "backend": row.backend,
        **slice_of(row.key),
        **_column(row.key, columns),
        "algorithm": _algorithm(r),
        "n": len(row.samples),
        "calls": r.calls_per_sample,
        "converged": r.converged,
        "bound": r.verification.bound,
        **{name: _round(value) for name, value in numbers.items()},
        **words,
    }


def _column(key: Key, columns: dict[int, int]) -> Json:
    column = columns.get(key.case.bytes, key.case.bytes)
    return {"column": column, "t_column": text.size(column)}


def _heat_cell(key: Key, cell: str, own: str, pair: Pair | None) -> Json:
    return {
        **slice_of(key),
        "cell": cell,
        "own": own,
        "ratio": _round(pair.ratio) if pair else None,
        "t_ratio": text.ratio(pair.ratio) if pair else "",
        "t_range": f"{text.ratio(pair.low)} to {text.ratio(pair.high)}" if pair else "",
        "verdict": str(pair.verdict) if pair else cell,
        "t_own": f"{pair.own.backend} {text.time(pair.own.interval.median)}" if pair else own,
        "t_peer": f"{pair.peer.backend} {text.time(pair.peer.interval.median)}" if pair else text.MISSING,
    }


def heat(model: Model) -> list[Json]:
    """The cells of the speed-up heatmap. `≈` before a ratio: neither confidently faster nor slower."""
    matched, alone, _ = pairs(model.rows, model.subject)
    columns = shared_columns(model.all_rows)
    cells = []
    for pair in matched:
        mark = "" if pair.verdict in ("FASTER", "SLOWER") else "≈"
        own = text.time(pair.own.interval.median)
        cells.append((pair.own.key, _heat_cell(pair.own.key, mark + text.ratio(pair.ratio), own, pair)))
    for row in alone:
        cells.append((row.key, _heat_cell(row.key, "no peer", text.time(row.interval.median), None)))
    known = {key for key, _ in cells}
    for machine, failure in model.failures:
        key = Key(machine, None, failure.case)
        if failure.backend == model.subject and key not in known and _in_sweep(model, failure.case):
            cells.append((key, _heat_cell(key, "failed", "", None)))
            known.add(key)
    return [cell | _column(key, columns) for key, cell in sorted(cells, key=lambda item: item[0].order())]


def _in_sweep(model: Model, case: Case) -> bool:
    """A failed case belongs in the heatmap where its collective and size are on its axes."""
    return any(row.key.case.collective == case.collective for row in model.rows) and any(
        row.key.case.bytes == case.bytes for row in model.rows
    )


def costs(found: list[WorkloadCost]) -> list[list[Json]]:
    """The bars of each workload's chart."""
    tables = []
    for cost in found:
        rows = []
        for item in [*cost.costs, *([cost.mix] if len(cost.costs) > 1 else [])]:
            if item.unit is not None:
                name = BEST_OF_EACH if item is cost.mix else item.backend
                bounds = {"unit": item.unit.median, "unit_low": item.unit.low, "unit_high": item.unit.high}
                rows.append({"backend": name, **bounds, "t_unit": text.time(item.unit.median)})
        tables.append(rows)
    return tables


def efficiency_panels(found: list[Efficiency]) -> list[Json]:
    """A panel for each case of a scaling, with the curves of all backends."""
    panels = []
    for members in group_by(found, lambda one: one.where).values():
        case = members[0].points[0].row.key.case
        rows = [
            {
                "backend": one.backend,
                "ranks": point.row.key.case.ranks,
                "value": _round(point.efficiency.median),
                "low": _round(point.efficiency.low),
                "high": _round(point.efficiency.high),
                "t_value": text.percent(point.efficiency.median),
                "t_median": text.time(point.row.interval.median),
                "t_busbw": text.gbps(point.row.result.busbw_gbps),
            }
            for one in members
            for point in one.points
        ]
        size = text.size(members[0].bytes)
        detail = f"{case.mode}, {case.memory}, {case.dtype}"
        head = {"kind": members[0].kind, "bytes": members[0].bytes}
        panels.append({**head, "title": f"{title(case)}, {size}", "detail": detail, "rows": rows})
    return panels


def points_per_result(results: int) -> int:
    """How many order statistics of a result's samples the page holds."""
    low, high = _DISTRIBUTION_RANGE
    return max(low, min(high, _DISTRIBUTION_BUDGET // max(results, 1)))


def order_statistics(row: Row, limit: int) -> list[float]:
    """At most `limit` of the sorted samples, evenly spaced in rank, minimum and maximum included."""
    n = len(row.samples)
    ranks = range(n) if n <= limit else (round(i * (n - 1) / (limit - 1)) for i in range(limit))
    return [float(f"{row.samples[i]:.5g}") for i in ranks]


def _algorithm(result: Result) -> str:
    """Its name; where it quantises, the bits of an element on the wire; on GPUs what it takes and where it
    passes: `two_shot, 8.25 of 16 bits, 24 SMs, through host memory`."""
    said = [result.algorithm or text.MISSING]
    if result.wire_bits is not None:
        said.append(f"{result.wire_bits:g} of {8 * DTYPES[result.case.dtype].itemsize} bits")
    said += [] if result.sms is None else [text.count(result.sms, "SM")]
    said += ["through host memory"] if result.staged else []
    return ", ".join(said)


def dimensions(model: Model, rows: list[Json]) -> list[Json]:
    """What can be selected: each dimension's values and the one shown first (the most frequent; mode:
    latency, else graph)."""
    found = []
    for name, label in DIMENSIONS:
        counts = Counter(row[name] for row in rows if row[name] is not None)
        if not counts:
            continue
        values = sorted(counts, key=str) if name not in ("ranks", "root", "machine") else sorted(counts)
        preferred = [mode for mode in ("latency", "graph") if name == "mode" and mode in counts]
        first = preferred[0] if preferred else max(values, key=lambda v: counts[v])
        words = {v: model.machines[v] if name == "machine" else str(v).replace("_", " ") for v in values}
        options = [{"value": v, "text": words[v]} for v in values]
        found.append({"name": name, "label": label, "options": options, "first": first})
    return found


def table(rows: list[Json]) -> Json:
    """Rows as lists of values in the order of `columns`. What is `same` in every row is said once, and of a
    column with few `words` a row has the index."""
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


def page(model: Model) -> Json:
    """Returns all that the page's script needs, each thing once, except the charts' templates."""
    columns = shared_columns(model.all_rows)
    rows = [result(row, columns) for row in model.all_rows]
    sweep = {row.id for row in model.rows}
    limit = points_per_result(len(rows))
    return {
        "backends": model.backends,
        "colours": theme.colours(model.backends),
        "shapes": theme.shapes(model.backends),
        "dimensions": dimensions(model, [row for row in rows if row["id"] in sweep]),
        "results": table(rows),
        "sweep": sorted(sweep),
        "heat": table(heat(model)),
        "costs": costs(workload_costs(model)),
        "efficiency": efficiency_panels(efficiencies(model)),
        "samples": [order_statistics(row, limit) for row in model.all_rows],
        "config": theme.config(),
    }
