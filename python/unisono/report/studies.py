"""Makes the tables that only some runs need: links, pairs, scaling, experts, fused norms, fabric, largest
messages."""

from __future__ import annotations

import bisect
import functools
import statistics
from collections.abc import Mapping, Sequence
from operator import attrgetter

from unisono.records import Largest, Link, text
from unisono.records.vocabulary import DTYPES, family, shape_text, size_of, title

from . import analysis, tables, theme
from .analysis import group_by
from .blocks import Cell, Column, Table, left, right, table
from .model import Model
from .pairing import Pair, against_peers, pairs
from .row import Key, Row

_ENGINES = {
    "copy_engine": "copy engine",
    "sm_load": "SM loads",
    "sm_store": "SM stores",
    "bulk_store": "bulk copies of SMs",
    "flag": "flag",
}
_LINKS = {
    "pair": "one pair, one way",
    "ring": "ring",
    "all_pairs": "all pairs",
    "round_trip": "round trip of a flag",
}
_PINGPONGS = {"half_round_trip": "half round trip", "one_way": "one way", "bidirectional": "both ways, each"}
# The modes of a ping-pong that suit a time best, and those that suit a bandwidth.
_TIME_MODES = ("latency", "graph", "events", "throughput")
_BANDWIDTH_MODES = ("throughput", "graph", "events", "latency")


def _matrix(title: str, names: Sequence[str], values: Mapping[tuple[int, int], float], timed: bool) -> Table:
    """Returns values (µs if `timed`, else GB/s): a row for each sender, a column for each receiver. The
    colour of a cell says how much worse it is than the best one: a class of theme's scale `v`."""
    best = (min if timed else max)(values.values())

    def cell(value: float | None) -> str | Cell:
        if value is None:
            return ""
        worse = value / best - 1.0 if timed else 1.0 - value / best
        return Cell(text.digits(value), f"v{bisect.bisect_right(theme.VARIATION_STEPS, worse)}")

    ends = range(len(names))
    rows = [[names[row], *(cell(values.get((row, column))) for column in ends)] for row in ends]
    return Table(["from \\ to", *names], rows, frozenset(range(1, len(names) + 1)), "pairs", title)


def links(model: Model) -> Table:
    """Returns a row for each engine in each pattern, all pairs together."""
    groups = group_by(model.links, lambda item: (item[0], item[1].engine, item[1].pattern))
    found = [(machine, [link for _, link in members]) for (machine, *_), members in groups.items()]

    def name(machine: int, link: Link) -> str:
        return ", ".join([_ENGINES.get(link.engine, link.engine), *model.machine_if_several(machine)])

    return table(
        found,
        left("Engine", lambda item: name(item[0], item[1][0])),
        left("Pattern", lambda item: _LINKS.get(item[1][0].pattern, item[1][0].pattern)),
        right("GPUs", lambda item: str(item[1][0].devices)),
        right("Transfer", lambda item: text.size(item[1][0].bytes)),
        right("Blocks", lambda item: str(item[1][0].blocks or text.MISSING)),
        right("Each GPU sends", lambda item: _middle(item[1])),
        right("Range", lambda item: _spread(item[1])),
    )


def _timed(link: Link) -> bool:
    return link.pattern == "round_trip"


def _value(link: Link) -> float:
    return float(link.gbps if link.gbps is not None else link.round_trip_us or 0.0)


def _middle(found: Sequence[Link]) -> str:
    middle = statistics.median(map(_value, found))
    return text.time(middle) if _timed(found[0]) else f"{text.gbps(middle)} GB/s"


def _spread(found: Sequence[Link]) -> str:
    """Returns the range over the pairs; over the samples if there is one link only."""
    values = [_value(link) for link in found]
    values = found[0].samples or values if len(found) == 1 else values
    show = text.time if _timed(found[0]) else text.gbps
    return f"{show(min(values))} to {show(max(values))}"


def link_matrices(model: Model) -> list[Table]:
    """Returns a matrix for each engine whose pairs were measured, and one for the round trips."""
    found = []
    single = [item for item in model.links if item[1].pattern in ("pair", "round_trip")]
    for (machine, engine), members in group_by(single, lambda item: (item[0], item[1].engine)).items():
        first = members[0][1]
        by_pair = {(link.source or 0, link.target or 0): _value(link) for _, link in members}
        devices = sorted({device for pair in by_pair for device in pair})
        values = {(devices.index(a), devices.index(b)): value for (a, b), value in by_pair.items()}
        unit = "µs" if _timed(first) else "GB/s"
        heading = [
            _ENGINES.get(engine, engine),
            _LINKS[first.pattern],
            unit,
            *model.machine_if_several(machine),
        ]
        names = [f"GPU {device}" for device in devices]
        found.append(_matrix(", ".join(heading), names, values, _timed(first)))
    return found


def pair_matrices(model: Model) -> list[Table]:
    """Returns a matrix for each pattern and backend that measured more than one pair. Each is in the mode
    that suits a time or a bandwidth best. A pair in which both send stands for its reverse as well."""
    rows = [row for row in model.all_rows if row.key.case.pair is not None]
    groups = group_by(rows, lambda row: (row.key.without("bytes", "mode", "pair", "placement"), row.backend))
    found = []
    for pattern in _PINGPONGS:
        for (key, _), members in groups.items():
            if key.case.pattern == pattern and len({row.key.case.pair for row in members}) > 1:
                found.append(_pair_matrix(model, members, pattern == "half_round_trip"))
    return found


def _pair_matrix(model: Model, members: Sequence[Row], timed: bool) -> Table:
    mode = min((row.key.case.mode for row in members), key=(_TIME_MODES if timed else _BANDWIDTH_MODES).index)
    size = (min if timed else max)(row.key.case.bytes for row in members)
    rows = [row for row in members if (row.key.case.mode, row.key.case.bytes) == (mode, size)]
    key, case = rows[0].key, rows[0].key.case
    values = {}
    for row in rows:
        assert row.key.case.pair is not None
        values[row.key.case.pair] = row.interval.median if timed else row.result.busbw_gbps
    if case.pattern != "one_way":
        values = {(b, a): value for (a, b), value in values.items()} | values
    where = [text.count(case.ranks, "rank"), mode, case.memory, *model.machine_if_several(key.machine)]
    name, unit = _PINGPONGS[str(case.pattern)], "µs" if timed else "GB/s"
    heading = f"{name}: {rows[0].backend}, {text.size(size)}, {unit} ({', '.join(where)})"
    return _matrix(heading, [f"rank {rank}" for rank in range(case.ranks)], values, timed)


def scaling_kinds(model: Model) -> list[str]:
    """Returns those of weak and strong that were measured on several numbers of ranks."""
    return list(dict.fromkeys(one.kind for one in analysis.efficiencies(model)))


def scaling(model: Model, kind: str) -> Table:
    """Returns a row for each case and backend, a column for each number of ranks: efficiency and time."""
    curves = [one for one in analysis.efficiencies(model) if one.kind == kind]
    points = {(one.where, one.backend): {p.row.key.case.ranks: p for p in one.points} for one in curves}
    sources = {point.row.source for one in curves for point in one.points}
    runs = [run for source in sources for run in model.sources[source].runs]

    def heading(ranks: int) -> str:
        nodes = max((len(set(run.nodes)) for run in runs if run.ranks == ranks), default=0)
        return text.count(ranks, "rank") + (f" on {nodes} nodes" if nodes > 1 else "")

    def where(one: analysis.Efficiency) -> str:
        case = one.where.case
        return ", ".join([case.mode, case.memory, *model.machine_if_several(one.where.machine)])

    def cell(ranks: int, one: analysis.Efficiency) -> str:
        point = points[one.where, one.backend].get(ranks)
        if point is None:
            return text.MISSING
        return f"{text.percent(point.efficiency.median)} ({text.time(point.row.interval.median)})"

    return table(
        curves,
        left("Collective", lambda one: f"{title(one.where.case)} {one.where.case.dtype}"),
        left("Bytes", lambda one: text.size(one.bytes)),
        left("Where", where),
        left("Backend", lambda one: one.backend),
        *(
            right(heading(ranks), functools.partial(cell, ranks))
            for ranks in sorted({ranks for own in points.values() for ranks in own})
        ),
    )


Members = tuple[Key, list[Row]]  # of one case, on all backends


def experts(model: Model) -> Table:
    """Returns a row for each case of a mixture of experts: every backend's time, and of the subject GB/s of
    all rows that a rank takes and of those that come from other ranks, its share of the ceiling, and the SMs
    that it takes."""
    rows = [row for row in model.rows if row.key.case.moe is not None]
    cases = list(group_by(rows, lambda row: row.key).items())
    own = {row.key: row for row in rows if row.backend == (model.subject or model.backends[0])}
    matched = {pair.own.key: pair for pair in pairs(rows, model.subject)[0]}

    def rate(name: str, item: Members) -> str:
        return text.gbps(getattr(own[item[0]].result, name)) if item[0] in own else text.MISSING

    def share(item: Members) -> str:
        return text.percent(own[item[0]].result.sol) if item[0] in own else text.MISSING

    def sms(item: Members) -> str:
        taken = own[item[0]].result.sms if item[0] in own else None
        return text.MISSING if taken is None else str(taken)

    on_gpus = any(row.result.sms is not None for row in own.values())
    return table(
        cases,
        left("Call", lambda item: title(item[0].case)),
        left("Shape", lambda item: str(shape_text(item[0].case))),
        left("Type", lambda item: item[0].case.dtype),
        left("Where", functools.partial(where, model)),
        right("Tokens", lambda item: f"{size_of(item[0].case):,}"),
        *times(rows),
        right("GB/s", functools.partial(rate, "algbw_gbps")),
        right("Between ranks", functools.partial(rate, "busbw_gbps")),
        right("Of the ceiling", share),
        *([right("SMs", sms)] if on_gpus else []),
        right("Speed-up", lambda item: ratio(matched.get(item[0]))),
    )


def times(rows: Sequence[Row]) -> list[Column[Members]]:
    """Returns a column of times for each backend."""

    def time(backend: str, item: Members) -> str:
        found = of(backend, item)
        return text.time(found.interval.median) if found else text.MISSING

    return [right(name, functools.partial(time, name)) for name in dict.fromkeys(row.backend for row in rows)]


def of(backend: str | None, item: Members) -> Row | None:
    return next((row for row in item[1] if row.backend == backend), None)


def where(model: Model, item: Members) -> str:
    case = item[0].case
    place = model.machine_if_several(item[0].machine)
    device = [] if case.device == "cpu" else [case.device]
    return ", ".join([text.count(case.ranks, "rank"), case.mode, *device, *place])


def ratio(pair: Pair | None) -> str:
    return text.MISSING if pair is None else f"{text.ratio(pair.ratio)} {pair.verdict}"


def over_variants(rows: Sequence[Row], subject: str | None) -> list[Column[Members]]:
    """Returns a column of the subject's speed-ups over each of its own variants."""
    names = dict.fromkeys(row.backend for row in rows)
    variants = [name for name in names if name != subject and family(name) == family(str(subject))]

    def over(variant: str, item: Members) -> str:
        own, other = of(subject, item), of(variant, item)
        return ratio(against_peers(own, [other]) if own and other else None)

    return [right(f"Over {name}", functools.partial(over, name)) for name in variants]


def norms(model: Model) -> Table:
    """Returns a row for each fused norm: every backend's time, and the subject's speed-up over its own
    variants and over the best peer."""
    rows = [row for row in model.rows if row.key.case.norm is not None]
    matched = {pair.own.key: pair for pair in pairs(rows, model.subject)[0]}
    return table(
        list(group_by(rows, lambda row: row.key).items()),
        left("Call", lambda item: title(item[0].case)),
        left("Type", lambda item: item[0].case.dtype),
        left("Where", functools.partial(where, model)),
        right("Rows", lambda item: f"{item[0].case.norm.rows:,}" if item[0].case.norm else text.MISSING),
        right("Size", lambda item: text.size(item[0].case.bytes)),
        *times(rows),
        *over_variants(rows, model.subject),
        right("Speed-up", lambda item: ratio(matched.get(item[0]))),
    )


def has_line_rate(model: Model) -> bool:
    return any(ceiling.name == "fabric_line" for _, ceiling in model.ceilings)


def fabric(model: Model) -> Table:
    """Returns the results of all cases that a way of the fabric lane ran, by case, the fastest first. Count:
    elements of one block. Gbit/s: what a rank sends to all others (bus bandwidth in bits)."""
    cases = {row.key for row in model.all_rows if row.backend.startswith("fabric:")}
    rows = [row for row in model.all_rows if row.key in cases]
    rows.sort(key=lambda row: (row.key.case.collective, row.key.case.bytes, row.interval.median))

    def count(row: Row) -> str:
        case = row.key.case
        return f"{case.bytes // DTYPES[case.dtype].itemsize // case.ranks:,}"

    return table(
        rows,
        left("Size", lambda row: f"{row.key.case.collective} {text.size(row.key.case.bytes)}"),
        right("Count", count),
        left("Way", lambda row: row.backend),
        left("Memory", lambda row: row.result.memory or "host"),
        right("Gbit/s per rank", lambda row: text.digits(8 * row.result.busbw_gbps)),
        right("Bus bandwidth GB/s", lambda row: text.gbps(row.result.busbw_gbps)),
        right(
            "Of the line rate" if has_line_rate(model) else "Of a pair's share",
            lambda row: text.percent(row.result.sol),
        ),
        *tables.timed("Latency", "95 % interval", attrgetter("interval")),
    )


def largest(model: Model) -> Table:
    """Returns the largest size of each collective that ran before the memory was full."""

    def case(item: Largest) -> str:
        c = item.case
        return f"{c.collective} {c.dtype}, {text.count(c.ranks, 'rank')}, {c.memory}"

    return table(
        model.largest,
        left("Backend", lambda item: item.backend),
        left("Case", case),
        right("Largest", lambda item: text.size(item.case.bytes)),
        right("Time", lambda item: text.time(item.time_us)),
        left(
            "Memory of the fullest GPU",
            lambda item: f"{text.size(item.used_bytes)} of {text.size(item.total_bytes)}",
        ),
        left("Why no larger one", lambda item: item.stopped),
    )
