"""Draws the report's conclusions from the rows: headlines, crossovers, efficiencies, costs of workloads."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from unisono.records import Scaling, Workload, stats
from unisono.records.stats import Interval, Verdict
from unisono.records.vocabulary import collective_order, family, sends, size_of, title

from .model import Model
from .pairing import Pair, against_peers, pairs
from .row import Key, Row

BEST_OF_EACH = "best of each"

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Groups items by key, in the order in which the keys first appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class Headline:
    """Sums up the speed-up over a set of cases. `mean` is the geometric mean of peer's over own median."""

    title: str
    pairs: list[Pair]
    alone: int  # cases of the subject without a peer
    missing: int  # cases that only peers ran

    @property
    def mean(self) -> float:
        return stats.geometric_mean([pair.ratio for pair in self.pairs])

    @property
    def verdicts(self) -> Counter[Verdict]:
        return Counter(pair.verdict for pair in self.pairs)

    @property
    def judged(self) -> int:
        """Returns the number of cases with enough visits for a verdict."""
        return sum(pair.sure or pair.verdict is Verdict.SLOWER for pair in self.pairs)

    @property
    def best(self) -> Pair:
        return max(self.pairs, key=lambda pair: pair.ratio)

    @property
    def worst(self) -> Pair:
        return min(self.pairs, key=lambda pair: pair.ratio)


@dataclass(frozen=True)
class Group:
    """Holds the headlines of one machine and number of ranks: over everything, and one per collective."""

    machine: int
    ranks: int
    total: Headline
    collectives: list[Headline]


def headline(title: str, rows: list[Row], subject: str | None) -> Headline:
    matched, alone, missing = pairs(rows, subject)
    return Headline(title, matched, len(alone), len(missing))


def groups(model: Model) -> list[Group]:
    """Returns the headlines of each machine and number of ranks."""
    found = []
    judged = [row for row in model.rows if sends(row.key.case)]
    by_ranks = group_by(judged, lambda row: (row.key.machine, row.key.case.ranks))
    for (machine, ranks), rows in sorted(by_ranks.items()):
        by_title = group_by(rows, lambda row: title(row.key.case))
        each = [
            headline(name, by_title[name], model.subject) for name in sorted(by_title, key=collective_order)
        ]
        found.append(Group(machine, ranks, headline("all cases", rows, model.subject), each))
    return found


@dataclass(frozen=True)
class Crossover:
    """Says that one library is confidently the faster up to `left`'s size, another from `right`'s size on.
    `estimate` (bytes, or tokens) is the size at which their curves meet, interpolated on logarithmic axes
    between two neighbouring sizes. It is None if neither is confidently the faster at sizes in between."""

    left: Pair
    right: Pair
    estimate: float | None


@dataclass(frozen=True)
class Curve:
    """Compares all backends on one case over its sizes. `winners` are the fastest at each contested size."""

    key: Key  # of the smallest size
    winners: list[Pair]
    crossovers: list[Crossover]

    @property
    def only(self) -> str | None:
        """Returns the backend that is confidently the fastest somewhere and never confidently overtaken."""
        names = {winner.own.backend for winner in self.winners if winner.verdict is Verdict.FASTER}
        return names.pop() if len(names) == 1 else None


def _without_size(key: Key) -> Key:
    scaling = key.case.scaling and Scaling(kind=key.case.scaling.kind, bytes=0)
    moe = key.case.moe and msgspec.structs.replace(key.case.moe, tokens=0, remote_bytes=0)
    norm = key.case.norm and msgspec.structs.replace(key.case.norm, rows=0)
    matmul = key.case.matmul and msgspec.structs.replace(key.case.matmul, m=0)
    case = msgspec.structs.replace(key.case, scaling=scaling, moe=moe, norm=norm, matmul=matmul)
    return Key(key.machine, key.workload, case).without("bytes")


def curves(model: Model) -> list[Curve]:
    """Returns for every case that at least two backends ran who is the fastest at each size, and where one
    library overtakes another."""
    found = []
    sweep = [row for row in model.all_rows if row.key.workload is None and sends(row.key.case)]
    for members in group_by(sweep, lambda row: _without_size(row.key)).values():
        sizes = group_by(members, lambda row: row.key.case.bytes)
        table = [{row.backend: row for row in sizes[size]} for size in sorted(sizes)]
        winners = [_winner(rows.values()) for rows in table if len(rows) > 1]
        names = {name for rows in table for name in rows}
        crossings = []
        for one, other in itertools.combinations([n for n in model.backends if n in names], 2):
            if family(one) != family(other):
                common = [(rows[one], rows[other]) for rows in table if one in rows and other in rows]
                crossings += _crossings(common)
        if winners:
            found.append(Curve(members[0].key, winners, crossings))
    return sorted(found, key=lambda curve: curve.key.order())


def _winner(rows: Iterable[Row]) -> Pair:
    """Compares the fastest of at least two rows with the others."""
    first, *others = sorted(rows, key=lambda row: row.interval.median)
    return against_peers(first, others)


def _crossings(sizes: list[tuple[Row, Row]]) -> list[Crossover]:
    """Returns the crossovers of two backends; `sizes` are those that both ran, in ascending order."""
    winners = [(index, _winner(both)) for index, both in enumerate(sizes)]
    sure = [one for one in winners if one[1].verdict is Verdict.FASTER]
    return [
        Crossover(left, right, _estimate(left, right) if before + 1 == after else None)
        for (before, left), (after, right) in itertools.pairwise(sure)
        if left.own.backend != right.own.backend
    ]


def _estimate(left: Pair, right: Pair) -> float | None:
    """Returns the size at which log(time of one / time of the other), linear in log(size), is zero."""
    sizes = (size_of(left.own.key.case), size_of(right.own.key.case))
    if sizes[0] <= 0:
        return None
    share = math.log(left.ratio) / (math.log(left.ratio) + math.log(right.ratio))
    return math.exp(math.log(sizes[0]) + share * (math.log(sizes[1]) - math.log(sizes[0])))


@dataclass(frozen=True)
class Point:
    """Holds the efficiency on one number of ranks, with its interval; the fewest ranks have 1."""

    row: Row
    efficiency: Interval


@dataclass(frozen=True)
class Efficiency:
    """Holds one backend's curve over the numbers of ranks. Curves of the same `where` share a chart."""

    kind: str
    bytes: int  # that a rank (weak), or all ranks together (strong), bring
    backend: str
    points: list[Point]
    where: Key


def efficiencies(model: Model) -> list[Efficiency]:
    """Returns a curve for every case that `unisono scaling` measured on at least two numbers of ranks. With
    n0 the fewest ranks, weak efficiency is t(n0) / t(n), strong efficiency n0 t(n0) / (n t(n))."""
    found = []
    rows = [row for row in model.all_rows if row.key.case.scaling is not None]
    for where, members in group_by(rows, lambda row: row.key.without("bytes", "ranks")).items():
        scaling = where.case.scaling
        assert scaling is not None
        for backend, own in group_by(members, lambda row: row.backend).items():
            own.sort(key=lambda row: row.key.case.ranks)
            points = [Point(row, _efficiency(scaling.kind, own[0], row)) for row in own]
            if len(points) > 1:
                found.append(Efficiency(scaling.kind, scaling.bytes, backend, points, where))
    return sorted(found, key=_curve_order)


def _curve_order(one: Efficiency) -> tuple[object, ...]:
    """Sorts weak before strong, then by collective and size."""
    key = one.points[0].row.key
    return (one.kind != "weak", *collective_order(title(key.case)), key.case.dtype, one.bytes, key.order())


def _efficiency(kind: str, fewest: Row, row: Row) -> Interval:
    first, own = fewest.interval, row.interval
    if row is fewest:
        return Interval(1.0, 1.0, 1.0)
    share = 1.0 if kind == "weak" else fewest.key.case.ranks / row.key.case.ranks
    return Interval(
        share * first.median / own.median, share * first.low / own.high, share * first.high / own.low
    )


@dataclass(frozen=True)
class Cost:
    """Holds the time of one unit of a workload on one backend, or on the best of each: the sum of calls times
    median. The interval adds the ends of the intervals, so it covers at least what they cover."""

    backend: str
    parts: list[Row | None]  # one per step; None if the step was not measured
    unit: Interval | None  # None if a part is missing


@dataclass(frozen=True)
class WorkloadCost:
    """Holds the costs of one workload on one machine, number of ranks, mode and kind of memory. `mix` takes
    the best backend for each step; it is the last of `costs` if there are several backends."""

    workload: Workload
    key: Key
    costs: list[Cost]
    mix: Cost

    def saved(self, cost: Cost) -> float | None:
        """Returns the time (µs per unit) that the best backend for each step saves over `cost`."""
        if cost is self.mix or cost.unit is None or self.mix.unit is None:
            return None
        return cost.unit.median - self.mix.unit.median


def workload_costs(model: Model) -> list[WorkloadCost]:
    """Returns the costs of every workload, machine, number of ranks, mode, kind of memory and placement."""
    found = []
    for ranks, workload in model.workloads:
        of_workload = [row for row in model.workload_rows if row.key.workload == workload.name]
        mine = [row for row in of_workload if row.key.case.ranks == ranks]
        for rows in group_by(mine, lambda row: row.key.without(*_STEP, "root", "streams")).values():
            each = {name: [r for r in rows if r.backend == name] for name in model.backends}
            costs = [_cost(workload, name, _parts(workload, own)) for name, own in each.items() if own]
            mix = _cost(workload, BEST_OF_EACH, _parts(workload, rows))
            found.append(WorkloadCost(workload, rows[0].key, [*costs, mix] if len(costs) > 1 else costs, mix))
    return found


_STEP = (
    "collective",
    "bytes",
    "dtype",
    "op",
    "moe",
    "matmul",
)  # the fields that a step of a workload shares with its case


def _parts(workload: Workload, rows: list[Row]) -> list[Row | None]:
    """Returns the fastest row of each step."""

    def values(thing: object) -> list[object]:
        return [getattr(thing, name) for name in _STEP]

    by_time = sorted(rows, key=lambda row: row.interval.median)
    return [next((r for r in by_time if values(r.key.case) == values(s)), None) for s in workload.steps]


def _cost(workload: Workload, backend: str, parts: list[Row | None]) -> Cost:
    intervals = [part.interval for part in parts if part is not None]
    if not intervals or len(intervals) != len(parts):
        return Cost(backend, parts, None)
    calls = [step.calls for step in workload.steps]

    def total(ends: list[float]) -> float:
        return math.fsum(n * end for n, end in zip(calls, ends, strict=True))

    median, low, high = (total([getattr(i, end) for i in intervals]) for end in ("median", "low", "high"))
    return Cost(backend, parts, Interval(median, low, high))
