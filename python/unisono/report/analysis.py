"""What the report concludes from the rows: headline, crossovers, the cost of workloads. No formatting
here."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from unisono.records import Case, Workload, WorkloadStep, stats
from unisono.records.stats import Interval, Verdict
from unisono.records.vocabulary import collective_order, family, title

from .model import Key, Model, Pair, Row, pairs

BEST_OF_EACH = "best of each"

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Headline:
    """The speed-up over a set of cases. `mean` is the geometric mean of the ratios of medians, peer over
    subject."""

    title: str
    pairs: list[Pair]
    alone: int  # cases of the subject without a peer
    missing: int  # cases that only peers have

    @property
    def mean(self) -> float:
        return stats.geometric_mean([pair.ratio for pair in self.pairs])

    @property
    def verdicts(self) -> Counter[Verdict]:
        return Counter(pair.verdict for pair in self.pairs)

    @property
    def judged(self) -> int:
        """Cases on which a verdict can be given."""
        return sum(pair.sure or pair.verdict is Verdict.SLOWER for pair in self.pairs)

    @property
    def best(self) -> Pair:
        return max(self.pairs, key=lambda pair: pair.ratio)

    @property
    def worst(self) -> Pair:
        return min(self.pairs, key=lambda pair: pair.ratio)


@dataclass(frozen=True)
class Group:
    """One machine and number of ranks: the headline over everything, and one per collective."""

    machine: int
    ranks: int
    total: Headline
    collectives: list[Headline]


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, in the order in which the keys first appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def headline(title: str, rows: list[Row], subject: str | None) -> Headline:
    matched, alone, missing = pairs(rows, subject)
    return Headline(title, matched, len(alone), len(missing))


def groups(model: Model) -> list[Group]:
    """The headlines, for each machine and number of ranks."""
    found = []
    for (machine, ranks), rows in sorted(
        group_by(model.rows, lambda r: (r.key.machine, r.key.case.ranks)).items()
    ):
        by_collective = sorted(
            group_by(rows, lambda r: title(r.key.case)).items(), key=lambda item: collective_order(item[0])
        )
        each = [headline(name, members, model.subject) for name, members in by_collective]
        found.append(Group(machine, ranks, headline("all cases", rows, model.subject), each))
    return found


@dataclass(frozen=True)
class Winner:
    """The fastest backend of several at one size, and its rivals by their medians; `sure` where it is FASTER
    than all of them."""

    row: Row
    rivals: tuple[Row, ...]

    @property
    def second(self) -> Row | None:
        return self.rivals[0] if self.rivals else None

    @property
    def sure(self) -> bool:
        own = self.row.interval
        return all(stats.verdict(own, rival.interval) is Verdict.FASTER for rival in self.rivals)


@dataclass(frozen=True)
class Crossover:
    """Of two libraries one is faster up to `left.row`'s size, the other from `right.row`'s size on, both
    confidently. `estimate` (bytes) is where their two curves meet, interpolated on logarithmic axes, between
    two neighbouring sizes; None where neither is confidently the faster at sizes in between."""

    left: Winner
    right: Winner
    estimate: float | None


@dataclass(frozen=True)
class Curve:
    """One case over all its sizes: who is fastest where."""

    key: Key  # of the smallest size
    winners: list[Winner]
    crossovers: list[Crossover]

    @property
    def only(self) -> str | None:
        """The backend that is never confidently overtaken, where one is somewhere confidently the fastest."""
        names = {winner.row.backend for winner in self.winners if winner.sure and winner.second is not None}
        return names.pop() if len(names) == 1 else None


def _without_size(key: Key) -> tuple[object, ...]:
    c = key.case
    scaling = c.scaling.kind if c.scaling else None
    place = (key.machine, c.ranks, c.device, c.one_process, c.mode, c.memory, c.placement, scaling)
    return (*place, c.collective, c.pattern, c.pair, c.streams, c.dtype, c.op, c.root)


def curves(model: Model) -> list[Curve]:
    """For every case that at least two backends ran: the fastest at each size, and where one library
    overtakes another."""
    found = []
    sweep = [row for row in model.all_rows if row.key.workload is None]
    for members in group_by(sweep, lambda row: _without_size(row.key)).values():
        by_size = sorted(group_by(members, lambda row: row.key.case.bytes).items())
        if not any(len(rows) > 1 for _, rows in by_size):
            continue
        table = {size: {row.backend: row for row in rows} for size, rows in by_size}
        names = [name for name in model.backends if any(name in rows for rows in table.values())]
        crossings = []
        for one, other in itertools.combinations(names, 2):
            if family(one) != family(other):
                common = [rows for rows in table.values() if one in rows and other in rows]
                crossings += _crossings([(rows[one], rows[other]) for rows in common])
        found.append(Curve(members[0].key, [_winner(rows.values()) for rows in table.values()], crossings))
    return sorted(found, key=lambda curve: curve.key.order())


def _winner(rows: Iterable[Row]) -> Winner:
    first, *rest = sorted(rows, key=lambda row: row.interval.median)
    return Winner(first, tuple(rest))


def _crossings(sizes: list[tuple[Row, Row]]) -> list[Crossover]:
    """Of two backends at all sizes that both ran, in ascending order."""
    winners = [(index, _winner(both)) for index, both in enumerate(sizes)]
    return [
        Crossover(left, right, _estimate(left, right) if before + 1 == after else None)
        for (before, left), (after, right) in itertools.pairwise(one for one in winners if one[1].sure)
        if left.row.backend != right.row.backend
    ]


def _estimate(left: Winner, right: Winner) -> float | None:
    """Where log(time of one / time of the other), linear in log(size) between the two sizes, is zero."""
    assert left.second is not None and right.second is not None
    sizes = (left.row.key.case.bytes, right.row.key.case.bytes)
    if sizes[0] <= 0:
        return None
    before = math.log(left.row.interval.median / left.second.interval.median)
    after = math.log(right.second.interval.median / right.row.interval.median)
    share = before / (before - after)
    return math.exp(math.log(sizes[0]) + share * (math.log(sizes[1]) - math.log(sizes[0])))


@dataclass(frozen=True)
class Point:
    """One number of ranks; `efficiency` is 1 for the fewest, its interval from those of both times."""

    row: Row
    efficiency: Interval


@dataclass(frozen=True)
class Efficiency:
    """One backend's curve over the numbers of ranks. Curves of the same `where` differ in the backend."""

    kind: str
    bytes: int  # that a rank (weak), or all together (strong), bring
    backend: str
    points: list[Point]
    where: tuple[object, ...]


def efficiencies(model: Model) -> list[Efficiency]:
    """Of every case that `unisono scaling` measured on at least two numbers of ranks. With the fewest ranks
    n0: weak t(n0) / t(n), strong n0 t(n0) / (n t(n))."""
    found = []
    rows = [row for row in model.all_rows if row.key.case.scaling is not None]
    for where, members in group_by(rows, _without_ranks).items():
        scaling = members[0].key.case.scaling
        assert scaling is not None
        for backend, own in group_by(members, lambda row: row.backend).items():
            own.sort(key=lambda row: row.key.case.ranks)
            points = [Point(row, _efficiency(scaling.kind, own[0], row)) for row in own]
            if len(points) > 1:
                found.append(Efficiency(scaling.kind, scaling.bytes, backend, points, where))
    return sorted(found, key=_curve_order)


def _curve_order(one: Efficiency) -> tuple[object, ...]:
    """Weak before strong, then by collective and its sizes."""
    key = one.points[0].row.key
    return (one.kind != "weak", *collective_order(title(key.case)), key.case.dtype, one.bytes, key.order())


def _without_ranks(row: Row) -> tuple[object, ...]:
    c = row.key.case
    place = (row.key.machine, c.scaling, c.device, c.one_process, c.mode, c.memory, c.placement)
    return (*place, c.collective, c.streams, c.dtype, c.op, c.root)


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
    """What one unit of a workload costs on one backend (or on the best of each): the sum of calls x median.
    The interval adds the ends of the intervals, so it covers at least what theirs do."""

    backend: str
    parts: list[Row | None]  # one per step; None: not measured
    unit: Interval | None  # None where a part is missing


@dataclass(frozen=True)
class WorkloadCost:
    """One workload on one machine, number of ranks, mode and kind of memory."""

    workload: Workload
    key: Key
    costs: list[Cost]
    mix: Cost  # the best backend for each step

    def saving(self, cost: Cost) -> float | None:
        """The share of `cost`'s time that choosing the best backend for each step saves."""
        if cost.unit is None or self.mix.unit is None:
            return None
        return 1.0 - self.mix.unit.median / cost.unit.median


def _matches(step: WorkloadStep, case: Case) -> bool:
    return (step.collective, step.bytes, step.dtype, step.op) == (
        case.collective,
        case.bytes,
        case.dtype,
        case.op,
    )


def workload_costs(model: Model) -> list[WorkloadCost]:
    """Every workload that was measured, for each machine, number of ranks, mode, kind of memory and
    placement."""
    found = []
    for ranks, workload in model.workloads:
        rows_of = [row for row in model.workload_rows if row.key.workload == workload.name]
        mine = [row for row in rows_of if row.key.case.ranks == ranks]
        for rows in group_by(mine, _workload_slice).values():
            costs = []
            for backend in model.backends:
                ours = [row for row in rows if row.backend == backend]
                if ours:
                    parts = [next((r for r in ours if _matches(s, r.key.case)), None) for s in workload.steps]
                    costs.append(Cost(backend, parts, _total(workload, parts)))
            best = [_fastest([cost.parts[i] for cost in costs]) for i in range(len(workload.steps))]
            found.append(
                WorkloadCost(workload, rows[0].key, costs, Cost(BEST_OF_EACH, best, _total(workload, best)))
            )
    return found


def _workload_slice(row: Row) -> tuple[int | str | bool, ...]:
    c = row.key.case
    return (row.key.machine, c.ranks, c.mode, c.memory, c.placement, c.device, c.one_process)


def _fastest(parts: list[Row | None]) -> Row | None:
    return min((p for p in parts if p is not None), key=lambda row: row.interval.median, default=None)


def _total(workload: Workload, parts: list[Row | None]) -> Interval | None:
    rows = [part for part in parts if part is not None]
    if not rows or len(rows) != len(parts):
        return None
    calls = [step.calls for step in workload.steps]
    intervals = [row.interval for row in rows]
    return Interval(
        math.fsum(n * i.median for n, i in zip(calls, intervals, strict=True)),
        math.fsum(n * i.low for n, i in zip(calls, intervals, strict=True)),
        math.fsum(n * i.high for n, i in zip(calls, intervals, strict=True)),
    )
