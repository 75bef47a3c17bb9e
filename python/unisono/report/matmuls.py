"""Matmuls with their collective in the report, beside the matmul alone and the collective alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from unisono.records import text
from unisono.records.stats import Interval
from unisono.records.vocabulary import MATMULS, alone, product_text

from .analysis import group_by
from .blocks import Table, left, right, table
from .model import Model
from .pairing import pairs
from .payload import Json, in_common, slice_of
from .row import Key, Row
from .studies import Members, of, over_variants, ratio, times

CERTAIN = 0.5  # an overlap is told if its interval is no wider: 50 points of per cent


@dataclass(frozen=True)
class Parts:
    """The subject's times of what a matmul with its collective consists of."""

    matmul: Interval
    collective: Interval

    def overlap(self, fused: Interval) -> Interval:
        """Returns the share of the shorter part that a call hides: the times of both parts less that of the
        call, over the shorter part's."""
        shorter = min(self.matmul.median, self.collective.median)
        low = (self.matmul.low + self.collective.low - fused.high) / shorter
        high = (self.matmul.high + self.collective.high - fused.low) / shorter
        return Interval((self.matmul.median + self.collective.median - fused.median) / shorter, low, high)


def cases(model: Model) -> list[Members]:
    """Returns every matmul with its collective, with the rows of all backends."""
    rows = [row for row in model.rows if row.key.case.collective in MATMULS]
    return list(group_by(rows, lambda row: row.key).items())


def parts(model: Model) -> dict[Key, Parts]:
    """Returns the parts of each case whose parts were measured too."""
    own = {row.key: row.interval for row in model.rows if row.backend == _subject(model)}
    found = {}
    for key, _ in cases(model):
        matmul, collective = (own.get(Key(key.machine, key.workload, case)) for case in alone(key.case))
        if matmul is not None and collective is not None:
            found[key] = Parts(matmul, collective)
    return found


def _subject(model: Model) -> str:
    return model.subject or model.backends[0]


def _shape(item: Members) -> str:
    shape = item[0].case.matmul
    return product_text(shape) if shape else ""


def places(model: Model) -> list[tuple[str, list[Members]]]:
    """Returns the cases of each place, mode and type, with words for those."""
    found = group_by(cases(model), lambda item: item[0].without("collective", "bytes", "matmul"))
    return [
        (in_common([slice_of(item[0], model) for item in items], model), items) for items in found.values()
    ]


def study(model: Model) -> list[Table]:
    """Returns a table for each place, with a row for each matmul with its collective: both parts alone, every
    backend's time, the subject's overlap, and its speed-up over its own variants and over the best peer."""
    known = parts(model)
    return [replace(_table(model, items, known), title=where) for where, items in places(model)]


def _table(model: Model, found: list[Members], known: dict[Key, Parts]) -> Table:
    rows = [row for _, members in found for row in members]
    matched = {pair.own.key: pair for pair in pairs(rows, model.subject)[0]}

    def part(time: Callable[[Parts], Interval], item: Members) -> str:
        return text.time(time(known[item[0]]).median) if item[0] in known else text.MISSING

    def overlap(item: Members) -> str:
        own = of(_subject(model), item)
        if own is None or item[0] not in known:
            return text.MISSING
        hidden = known[item[0]].overlap(own.interval)
        return text.percent(hidden.median) if hidden.high - hidden.low <= CERTAIN else "unclear"

    return table(
        found,
        left("Call", lambda item: item[0].case.collective),
        right("m × k × n", _shape),  # noqa: RUF001
        right("Overlap", overlap),
        right("Matmul", partial(part, lambda parts: parts.matmul)),
        right("Collective", partial(part, lambda parts: parts.collective)),
        *times(rows),
        *over_variants(rows, model.subject),
        right("Speed-up", lambda item: ratio(matched.get(item[0]))),
    )


def bars(model: Model) -> Iterator[tuple[str, str, list[Json]]]:
    """Yields for each call in each place its name, the place, and a row for each shape and backend: the time
    over that of the matmul alone, and where it would be with all of the shorter part hidden, and with none.
    """
    known = parts(model)
    for where, found in places(model):
        for name, items in group_by(found, lambda item: item[0].case.collective).items():
            rows = [row for item in items if item[0] in known for row in _bars(item, known[item[0]])]
            if rows:
                yield name, where, rows


def _bars(item: Members, of_case: Parts) -> list[Json]:
    matmul, collective = of_case.matmul.median, of_case.collective.median
    ends = {"best": max(matmul, collective) / matmul, "apart": (matmul + collective) / matmul}
    return [{"product": _shape(item), **_bar(row, matmul), **ends} for row in item[1]]


def _bar(row: Row, matmul: float) -> Json:
    interval = row.interval
    return {
        "backend": row.backend,
        "value": interval.median / matmul,
        "low": interval.low / matmul,
        "high": interval.high / matmul,
        "t_median": text.time(interval.median),
        "t_interval": text.span(interval.low, interval.high),
    }
