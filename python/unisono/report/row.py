"""A row of the report: one result, what makes it comparable, and the statistics of its samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from unisono import records
from unisono.records import Case, Result, derived, stats
from unisono.records.stats import Interval
from unisono.records.vocabulary import collective_order


@dataclass(frozen=True)
class Key:
    """Makes two results comparable: the same case, machine and workload (None for the sweep)."""

    machine: int
    workload: str | None
    case: Case

    def without(self, *fields: str) -> Key:
        """Returns the key that all cases share that differ in these fields of Case only."""
        return replace(self, case=msgspec.structs.replace(self.case, **dict.fromkeys(fields)))

    def order(self) -> tuple[object, ...]:
        """Returns the sort key of the report's order: by ranks and mode, then collective, then size."""
        c = self.case
        place = (
            self.machine,
            self.workload or "",
            c.device,
            c.one_process,
            c.ranks,
            c.mode,
            c.memory if c.bytes else "~",  # a barrier has no memory and stands last
            c.placement,
            c.offset,
            c.inputs,
            (c.scaling.kind, c.scaling.bytes) if c.scaling else ("", 0),
        )
        how = (*collective_order(c.collective), c.collective, c.pattern or "", c.streams or "", c.pair or ())
        m, norm = c.moe, c.norm
        shape: tuple[object, ...] = (norm.hidden, norm.quant) if norm else ()
        shape = (c.matmul.k, c.matmul.n) if c.matmul else shape
        shape = (m.layout, m.routing, m.experts, m.top_k, m.hidden, m.seed) if m else shape
        return (*place, *how, shape, c.dtype, c.op or "", -1 if c.root is None else c.root, c.bytes)


Cell = tuple[int, str, Case | None]  # machine, backend, case; the case is None if a backend skips all


@dataclass(frozen=True)
class Row:
    """Holds one result, with the order statistics of its samples (microseconds)."""

    id: int
    key: Key
    backend: str
    result: Result
    source: int  # index in Model.sources

    @property
    def interval(self) -> Interval:
        r = self.result
        sure = len(r.visits or r.samples_us) >= stats.MIN_SAMPLES
        return Interval(r.median_us, r.ci_low_us, r.ci_high_us, sure)

    @property
    def quantises(self) -> bool:
        return self.result.wire_bits is not None

    @property
    def launches(self) -> int:
        """Returns how many launches of the ranks the interval covers; 0: the records do not say."""
        return len(set(self.result.launches))

    @cached_property
    def medians(self) -> dict[int, float]:
        """Returns the median of each launch by its number; nothing if the records do not say."""
        r = self.result
        return stats.medians(r.samples_us, r.visits, r.launches) if r.launches else {}

    @cached_property
    def visit_medians(self) -> dict[int, list[float]]:
        """Returns the medians of each launch's visits by its number; nothing if the records do not say."""
        r = self.result
        return stats.visit_medians(r.samples_us, r.visits, r.launches) if r.launches else {}

    def within(self, launches: set[int]) -> Row:
        """Returns the row of these launches alone."""
        if launches == set(self.result.launches):
            return self
        return replace(self, result=derived.of_launches(self.result, launches))

    @cached_property
    def apart(self) -> float:
        """Returns how far the launches' medians lie apart: largest less smallest, over their median."""
        found = list(self.medians.values())
        return (max(found) - min(found)) / float(np.median(found))

    @property
    def unchecked(self) -> bool:
        return self.result.verification.bound == records.NOT_CHECKED

    @property
    def cell(self) -> Cell:
        return self.key.machine, self.backend, self.key.case

    @cached_property
    def samples(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Returns all samples in ascending order."""
        return np.sort(np.asarray(self.result.samples_us, dtype=np.float64))

    @cached_property
    def quartiles(self) -> tuple[float, float]:
        q1, q3 = np.quantile(self.samples, (0.25, 0.75))
        return float(q1), float(q3)

    @cached_property
    def whiskers(self) -> tuple[float, float]:
        """Returns Tukey's whiskers: the outermost samples within 1.5 quartile distances of the box."""
        q1, q3 = self.quartiles
        reach = 1.5 * (q3 - q1)
        inside = self.samples[(self.samples >= q1 - reach) & (self.samples <= q3 + reach)]
        return float(inside[0]), float(inside[-1])

    @cached_property
    def percentiles(self) -> dict[float, float | None]:
        """Returns p50, p95 and p99; None if there are too few samples for one."""
        return stats.quantiles(self.samples)

    @cached_property
    def variation(self) -> float | None:
        return stats.variation(self.samples)

    def bandwidth(self, time_us: float) -> float:
        """Returns the bus bandwidth (GB/s) of this case for a time of `time_us`."""
        return self.result.busbw_gbps * self.result.median_us / time_us
