"""The parts of a report that only some runs have, as tables and matrices: links between GPUs, pairs of a
ping-pong, scaling, ways of the fabric lane, largest messages."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.records import Link, text
from unisono.records.vocabulary import DTYPES, title

from . import analysis, theme
from .content import Table
from .model import Model, Row
from .payload import Json

ENGINES = {
    "copy_engine": "copy engine",
    "sm_load": "SM loads",
    "sm_store": "SM stores",
    "bulk_store": "bulk copies of SMs",
    "flag": "flag",
}
PATTERNS = {
    "pair": "one pair, one way",
    "ring": "ring",
    "all_pairs": "all pairs",
    "round_trip": "round trip of a flag",
}


@dataclass(frozen=True)
class Matrix:
    """Pairs of GPUs or ranks: a row for each sender, a column for each receiver. A cell has its text and the
    class of its colour (of theme's scale `v`: how much worse it is than the best pair), both empty where
    nothing was measured."""

    title: str
    names: list[str]  # of the rows and of the columns
    cells: list[list[tuple[str, str]]]


@dataclass(frozen=True)
class Study:
    """A section.

    Attributes:
        words: what it shows.
        tables: each with its heading and the kind of scaling whose charts stand above it; both may be "".
    """

    title: str
    words: str
    tables: list[tuple[str, str, Table]] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return self.title.split()[0].lower()


_COLOURS = (
    "Rows send, columns receive; the colour says how much worse a pair is than the best one of its matrix."
)


def studies(model: Model) -> list[Study]:
    """Returns the sections for which something was measured."""
    found = []
    if model.links:
        words = "What the links between the GPUs carry, measured by one process that drives all of them: the "
        words += f"time of the slowest GPU, from a common start. {_COLOURS}"
        found.append(Study("Links", words, [("", "", link_table(model))], link_matrices(model)))
    if shown := pair_matrices(model):
        words = "Ping-pong of each pair of ranks alone: half a round trip at the smallest size, bandwidth of "
        words += f"one direction at the largest. {_COLOURS}"
        found.append(Study("Pairs", words, [], shown))
    if kinds := scaling_kinds(model):
        words = (
            "Efficiency against the fewest ranks measured, with the 95 % intervals of both times as a band. "
            "At 100 % a call takes as long (weak: every rank brings the same bytes), or its time falls as "
            "the ranks grow (strong: all ranks together bring the same bytes)."
        )
        tables = [
            (f"{k.capitalize()} scaling: efficiency (median time)", k, scaling_table(model, k)) for k in kinds
        ]
        found.append(Study("Scaling", words, tables))
    if (ways := fabric_table(model)).rows:
        found.append(Study("Fabric", _fabric_words(model), [("", "", ways)]))
    if model.largest:
        words = "The largest size that ran before the memory was full, and why the next larger one did not."
        found.append(Study("Largest messages", words, [("", "", largest_table(model))]))
    return found


def engine_name(engine: str) -> str:
    return ENGINES.get(engine, engine)


def link_table(model: Model) -> Table:
    """A row for each engine in each pattern, pairs put together."""
    rows = []
    groups = analysis.group_by(model.links, lambda item: (item[0], item[1].engine, item[1].pattern))
    for (machine, engine, pattern), members in groups.items():
        links = [link for _, link in members]
        timed = pattern == "round_trip"
        values = sorted(_value(link) for link in links)
        name = ", ".join([engine_name(engine), *model.machine_if_several(machine)])
        middle = statistics.median(values)
        ends = (values[0], values[-1]) if len(links) > 1 else _ends(links[0])
        show = text.time if timed else text.gbps
        blocks = links[0].blocks
        rows.append(
            [
                name,
                PATTERNS.get(pattern, pattern),
                str(links[0].devices),
                text.size(links[0].bytes),
                text.MISSING if blocks is None else str(blocks),
                f"{show(middle)}" if timed else f"{show(middle)} GB/s",
                f"{show(ends[0])} to {show(ends[1])}",
            ]
        )
    head = ["Engine", "Pattern", "GPUs", "Transfer", "Blocks", "Each GPU sends", "Range"]
    return Table(head, rows, frozenset({2, 3, 4, 5, 6}))


def _value(link: Link) -> float:
    return float(link.gbps if link.gbps is not None else link.round_trip_us or 0.0)


def _ends(link: Link) -> tuple[float, float]:
    return (min(link.samples), max(link.samples)) if link.samples else (_value(link), _value(link))


def link_matrices(model: Model) -> list[Matrix]:
    """One for each engine whose pairs were measured, and one for the round trips."""
    found = []
    for (machine, engine), members in _single_links(model).items():
        devices = _devices(members)
        timed = members[0].pattern == "round_trip"
        best = (min if timed else max)(_value(link) for link in members)
        by_pair = {(link.source, link.target): _value(link) for link in members}
        values = [[cell(by_pair.get((row, column)), best, timed) for column in devices] for row in devices]
        unit = "µs" if timed else "GB/s"
        title = [engine_name(engine), PATTERNS[members[0].pattern], unit, *model.machine_if_several(machine)]
        found.append(Matrix(", ".join(title), [f"GPU {device}" for device in devices], values))
    return found


def _single_links(model: Model) -> dict[tuple[int, str], list[Link]]:
    single = [item for item in model.links if item[1].pattern in ("pair", "round_trip")]
    groups = analysis.group_by(single, lambda item: (item[0], item[1].engine))
    return {key: [link for _, link in members] for key, members in groups.items()}


def _devices(links: Sequence[Link]) -> list[int]:
    ends = {link.source for link in links} | {link.target for link in links}
    return sorted(device for device in ends if device is not None)


def cell(value: float | None, best: float, timed: bool) -> tuple[str, str]:
    """The text and the class of a value, a time or a bandwidth, beside the best one."""
    if value is None:
        return "", ""
    worse = value / best - 1.0 if timed else 1.0 - value / best
    return text.digits(value), f"v{bisect.bisect_right(theme.VARIATION_STEPS, worse)}"


def cells(matrix: Matrix) -> list[Json]:
    """The cells of a matrix as rows of charts.pairs."""
    return [
        {"source": source, "target": target, "text": number, "class": int(name[1:])}
        for source, row in zip(matrix.names, matrix.cells, strict=True)
        for target, (number, name) in zip(matrix.names, row, strict=True)
        if number
    ]


_TIMED = "half_round_trip"
_FIRST_MODES = {
    True: ("latency", "graph", "events", "throughput"),
    False: ("throughput", "graph", "events", "latency"),
}
_PATTERN_NAMES = {_TIMED: "half round trip", "one_way": "one way", "bidirectional": "both ways, each"}


def pair_matrices(model: Model) -> list[Matrix]:
    """One for each pattern and backend, where more than one pair was measured, in the mode that suits a time
    or a bandwidth best; rows send. A pair in which both send stands for its reverse as well."""
    found = []
    rows = [row for row in model.all_rows if row.key.case.pair is not None]
    for members in analysis.group_by(rows, _of_pairs).values():
        if len({row.key.case.pair for row in members}) < 2:
            continue
        timed = members[0].key.case.pattern == _TIMED
        mode = min((row.key.case.mode for row in members), key=_FIRST_MODES[timed].index)
        size = (min if timed else max)(row.key.case.bytes for row in members)
        shown = [row for row in members if (row.key.case.mode, row.key.case.bytes) == (mode, size)]
        found.append(_pair_matrix(model, shown, timed))
    return sorted(found, key=lambda matrix: list(_PATTERN_NAMES.values()).index(matrix.title.split(": ")[0]))


def _of_pairs(row: Row) -> tuple[object, ...]:
    c = row.key.case
    place = (row.key.machine, c.ranks, c.device, c.one_process, c.memory, c.dtype)
    return (*place, c.pattern, row.backend)


def _pair_matrix(model: Model, rows: Sequence[Row], timed: bool) -> Matrix:
    case = rows[0].key.case
    values: dict[tuple[int, int], float] = {}
    for row in rows:
        assert row.key.case.pair is not None
        value = row.interval.median if timed else row.result.busbw_gbps
        values[row.key.case.pair] = value
        if case.pattern != "one_way":
            values.setdefault((row.key.case.pair[1], row.key.case.pair[0]), value)
    best = (min if timed else max)(values.values())
    ranks = range(case.ranks)
    cells = [[cell(values.get((source, target)), best, timed) for target in ranks] for source in ranks]
    parts = [
        text.count(case.ranks, "rank"),
        case.mode,
        case.memory,
        *model.machine_if_several(rows[0].key.machine),
    ]
    unit = "µs" if timed else "GB/s"
    name = _PATTERN_NAMES[str(case.pattern)]
    title = f"{name}: {rows[0].backend}, {text.size(case.bytes)}, {unit} ({', '.join(parts)})"
    return Matrix(title, [f"rank {rank}" for rank in ranks], cells)


def scaling_kinds(model: Model) -> list[str]:
    """weak, strong: those that were measured on several numbers of ranks."""
    return list(dict.fromkeys(one.kind for one in analysis.efficiencies(model)))


def scaling_table(model: Model, kind: str) -> Table:
    """A row for each case and backend, a column for each number of ranks: efficiency and median time."""
    curves = [one for one in analysis.efficiencies(model) if one.kind == kind]
    columns = sorted({point.row.key.case.ranks for one in curves for point in one.points})
    rows = []
    for one in curves:
        cells = {p.row.key.case.ranks: _point_text(p) for p in one.points}
        key = one.points[0].row.key
        parts = [key.case.mode, key.case.memory, *model.machine_if_several(key.machine)]
        head = [f"{title(key.case)} {key.case.dtype}", text.size(one.bytes), ", ".join(parts), one.backend]
        rows.append([*head, *(cells.get(ranks, text.MISSING) for ranks in columns)])
    head = ["Collective", "Bytes", "Where", "Backend"]
    names = [_ranks_text(model, kind, ranks) for ranks in columns]
    return Table([*head, *names], rows, frozenset(range(4, 4 + len(columns))))


def _point_text(point: analysis.Point) -> str:
    return f"{text.percent(point.efficiency.median)} ({text.time(point.row.interval.median)})"


def _ranks_text(model: Model, kind: str, ranks: int) -> str:
    """`8 ranks`, or `8 ranks on 2 nodes`."""
    sources = {p.row.source for one in analysis.efficiencies(model) if one.kind == kind for p in one.points}
    runs = [run for source in sources for run in model.sources[source].runs if run.ranks == ranks]
    nodes = max((len(set(run.nodes)) for run in runs), default=0)
    return text.count(ranks, "rank") + (f" on {nodes} nodes" if nodes > 1 else "")


def _fabric_rows(model: Model) -> list[Row]:
    """The results on all cases of which a way of the fabric lane has one, by case, the fastest first."""
    cases = {row.key for row in model.all_rows if row.backend.startswith("fabric:")}
    chosen = [row for row in model.all_rows if row.key in cases]
    return sorted(chosen, key=lambda row: (row.key.case.collective, row.key.case.bytes, row.interval.median))


def fabric_table(model: Model) -> Table:
    """Empty where no such run was recorded. Count: elements of one block. Gbit/s: what a rank sends to all
    others (bus bandwidth in bits)."""
    found = []
    for row in _fabric_rows(model):
        case, result = row.key.case, row.result
        found.append(
            [
                f"{case.collective} {text.size(case.bytes)}",
                f"{case.bytes // DTYPES[case.dtype].itemsize // case.ranks:,}",
                row.backend,
                result.memory or "host",
                text.digits(8 * result.busbw_gbps),
                text.gbps(result.busbw_gbps),
                text.percent(result.sol),
                text.time(row.interval.median),
                text.span(row.interval.low, row.interval.high),
            ]
        )
    head = [
        "Size",
        "Count",
        "Way",
        "Memory",
        "Gbit/s per rank",
        "Bus bandwidth GB/s",
        "Of the line rate" if _has_line_rate(model) else "Of a pair's share",
        "Latency",
        "95 % interval",
    ]
    return Table(head, found, frozenset(range(1, len(head))) - {2, 3})


def _fabric_words(model: Model) -> str:
    """What the share in the table is of, in a sentence."""
    what = (
        "The line rate is that of a rank's NIC, as its provider states it"
        if _has_line_rate(model)
        else "A pair's share is what one pair of ranks writes alone (fabric_pair), divided by the ranks: "
        "pairs do not have to share that rate, so that more than 100 % is possible"
    )
    return (
        f"Bus bandwidth counts the blocks for all other ranks. {what}. Ways that could not "
        "run here are under Failures and skips, with the reason."
    )


def _has_line_rate(model: Model) -> bool:
    return any(ceiling.name == "fabric_line" for _, ceiling in model.ceilings)


def largest_table(model: Model) -> Table:
    """The largest size of each collective that ran before the memory was full."""
    rows = [
        [
            item.backend,
            f"{item.case.collective} {item.case.dtype}, {text.count(item.case.ranks, 'rank')}, "
            f"{item.case.memory}",
            text.size(item.case.bytes),
            text.time(item.time_us),
            f"{text.size(item.used_bytes)} of {text.size(item.total_bytes)}",
            item.stopped,
        ]
        for item in model.largest
    ]
    head = ["Backend", "Case", "Largest", "Time", "Memory of the fullest GPU", "Why no larger one"]
    return Table(head, rows, frozenset({2, 3}))
