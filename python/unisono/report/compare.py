"""Compares two runs case by case: is B faster than A?"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from rich.console import Group, RenderableType

from unisono.records import Case, stats, text
from unisono.records.stats import Interval, Verdict
from unisono.records.vocabulary import case_text

from . import markdown, terminal
from .blocks import Block, Cell, Items, Text, left, right, table
from .model import Model, load, one_phase, phases_text, uneven
from .row import Row
from .tables import timed

AB_TOLERANCE = 0.01
_STYLES = {Verdict.SLOWER: "red", Verdict.FASTER: "green", Verdict.UNCLEAR: "yellow", Verdict.SAME: "dim"}


@dataclass(frozen=True)
class Change:
    """Holds one case on one backend in both runs. `ratio` above 1: B is faster."""

    a: Row
    b: Row
    tolerance: float = stats.TOLERANCE
    alike: int | None = None  # launches of the run with fewer in a phase that both runs had; None: all

    @property
    def ratio(self) -> float:
        return self.a.interval.median / self.b.interval.median

    @property
    def ratio_text(self) -> str:
        return text.ratio(self.ratio)

    @property
    def sure(self) -> bool:
        """Returns whether both runs had enough launches of the ranks, in which runs differ."""
        least = min(self.a.launches, self.b.launches)
        return (least if self.alike is None else self.alike) >= stats.MIN_SAMPLES

    @property
    def verdict(self) -> Verdict:
        """Returns the verdict on B against A."""
        if not self.sure:
            return Verdict.UNCLEAR
        return stats.verdict(self.b.interval, self.a.interval, self.tolerance)


@dataclass(frozen=True)
class Paired(Change):
    """Holds one case on two builds that ran in the same launches. The launches' ratios are judged, so that
    what a launch does to both is not in them."""

    @cached_property
    def ratios(self) -> Interval:
        """Returns the median of A / B over the launches, and its interval; infinite without a common one."""
        return stats.ratios(self.a.visit_medians, self.b.visit_medians) or Interval(
            1.0, 0.0, math.inf, sure=False
        )

    @property
    def sure(self) -> bool:
        return self.ratios.sure

    @property
    def ratio(self) -> float:
        return self.ratios.median

    @property
    def ratio_text(self) -> str:
        found = self.ratios
        return f"{found.median:.3f}× ({found.low:.3f} to {found.high:.3f})"  # noqa: RUF001

    @property
    def verdict(self) -> Verdict:
        """Returns the verdict on B against A."""
        return stats.verdict_on_ratios(self.ratios, self.tolerance)


@dataclass
class Comparison:
    """Holds the changes in the report's order, and the results that only one run, or one build, has."""

    a: Path | str
    b: Path | str
    changes: list[Change] = field(default_factory=list)
    only_a: list[Row] = field(default_factory=list)
    only_b: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(change.verdict for change in self.changes)

    @property
    def exit_code(self) -> int:
        """Returns 0 if anything was compared, else 1."""
        return 0 if self.changes else 1

    def summary(self) -> str:
        """Returns one sentence with the counts and the geometric mean of A / B."""
        if not self.changes:
            return "The two have no case in common, so nothing was compared."
        counts = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in Verdict)
        mean = text.ratio(stats.geometric_mean([change.ratio for change in self.changes]))
        cases = text.count(len(self.changes), "case")
        return f"{cases} in both: B is {counts}; geometric mean of A / B {mean}."


def compare(a: Path, b: Path, backend: str | None = None, tolerance: float = stats.TOLERANCE) -> Comparison:
    """Compares the records at `b` with those at `a` (files or directories), on every backend or on `backend`.

    FASTER: B's interval lies wholly below A's and the medians differ by more than `tolerance` (0.02 is 2 %).
    SLOWER is the mirror image. SAME: both intervals lie within `tolerance` of each other. UNCLEAR: anything
    else, also if either run had fewer than six launches of the ranks.
    Throws: what `load` throws; ValueError for a tolerance below 0."""
    if not tolerance >= 0:
        raise ValueError(f"the tolerance is {tolerance}: give 0 or more, like 0.02 for 2 %.")
    first, second = load(a), load(b)
    found = Comparison(Path(a), Path(b))
    by_machine = len(first.machines) > 1 or len(second.machines) > 1
    ours, theirs = _index(first, backend, by_machine), _index(second, backend, by_machine)
    found.changes = [
        _alike(first, ours[key], second, row, tolerance) for key, row in theirs.items() if key in ours
    ]
    found.only_a = [row for key, row in ours.items() if key not in theirs]
    found.only_b = [row for key, row in theirs.items() if key not in ours]
    unsure = sum(not change.sure for change in found.changes)
    if unsure and any(change.alike is not None for change in found.changes):
        found.notes.append(
            f"The machine had other phases in the two runs: the bench's barrier took {phases_text(first)} in "
            f"A and {phases_text(second)} in B. Launches of another phase do not count: run both again, or "
            "compare two builds by `unisono ab`."
        )
    if unsure:
        found.notes.append(
            f"{text.count(unsure, 'case')} had fewer than {stats.MIN_SAMPLES} launches in a run, so that the "
            f"verdict is UNCLEAR: give both runs --launches {stats.MIN_SAMPLES} or more."
        )
    if set(first.machines) != set(second.machines):
        machines = [text.listing(model.machines) for model in (first, second)]
        found.notes.append(f"The machines differ: A ran on {machines[0]}; B on {machines[1]}.")
    if backend is not None and not ours and not theirs:
        known = text.listing(sorted({*first.backends, *second.backends}))
        found.notes.append(f"Neither run has a result of {backend}: they have {known}.")
    for name, model in (("A", first), ("B", second)):
        found.notes += [f"{name}: {model.without_launches}"] if model.without_launches else []
        unfinished = [source for source in model.sources if source.state != "complete"]
        found.notes += [f"{name}: {source.name} is {source.state}." for source in unfinished]
        if model.failures:
            failures = text.count(len(model.failures), "failure")
            found.notes.append(f"{name} has {failures}; failed cases are not compared.")
        found.notes += [f"{name}: {problem}" for problem in text.shortened(model.problems)]
    return found


def _alike(first: Model, a: Row, second: Model, b: Row, tolerance: float) -> Change:
    """Returns the change over the launches in a phase of the machine that the other run had too. A launch
    whose barrier takes another time at its end than at its start counts as of no phase."""
    phases = first.sources[a.source].phases, second.sources[b.source].phases
    kept = [
        {
            launch
            for launch in row.medians
            if any(one_phase([*mine.get(launch, []), *theirs]) for theirs in others.values())
        }
        for row, mine, others in ((a, phases[0], phases[1]), (b, phases[1], phases[0]))
    ]
    if not all(phases) or kept == [set(a.medians), set(b.medians)]:
        return Change(a, b, tolerance)
    alike = min(map(len, kept))
    return (
        Change(a.within(kept[0]), b.within(kept[1]), tolerance, alike)
        if alike
        else Change(a, b, tolerance, 0)
    )


def ab(path: Path, a: str, b: str, tolerance: float = AB_TOLERANCE) -> Comparison:
    """Compares backend `b` with `a` in the records at `path` of launches in which both ran.

    FASTER: the interval of the launches' ratios lies wholly above 1 by more than `tolerance`. SLOWER is the
    mirror image. SAME: the interval lies within `tolerance` of 1.
    UNCLEAR: anything else, also below six launches.
    Throws: what `load` throws."""
    model = load(path)
    found = Comparison(a, b)
    ours, theirs = ({row.key: row for row in model.all_rows if row.backend == name} for name in (a, b))
    found.changes = [Paired(ours[key], row, tolerance) for key, row in theirs.items() if key in ours]
    found.only_a = [row for key, row in ours.items() if key not in theirs]
    found.only_b = [row for key, row in theirs.items() if key not in ours]
    for name in (a, b):
        known = dict.fromkeys(run.libraries.get(f"backend {name}", "unknown") for run in model.runs)
        found.notes.append(f"{name} is {text.listing(list(known))}.")
    unsure = sum(not change.sure for change in found.changes)
    if unsure:
        few = f"had fewer than {stats.MIN_SAMPLES} launches, so that the verdict is UNCLEAR"
        found.notes.append(
            f"{text.count(unsure, 'case')} {few}: give --launches {stats.MIN_SAMPLES} or more."
        )
    found.notes += [*uneven(model), *text.shortened(model.problems)]
    return found


def _index(
    model: Model, backend: str | None, by_machine: bool
) -> dict[tuple[str, str | None, Case, str], Row]:
    """Returns the rows by what makes those of two runs comparable."""
    machines = model.machines if by_machine else [""] * len(model.machines)
    return {
        (machines[row.key.machine], row.key.workload, row.key.case, row.backend): row
        for row in model.all_rows
        if backend in (None, row.backend)
    }


def _case(row: Row) -> str:
    return case_text(row.key.case, row.key.workload)


def _blocks(comparison: Comparison, everything: bool) -> list[Block]:
    """Returns the comparison, SLOWER first, the largest change of each verdict on top. Unless `everything` is
    asked for, without the cases that are SAME or UNCLEAR."""
    order = list(_STYLES)
    changes = sorted(comparison.changes, key=lambda c: (order.index(c.verdict), -max(c.ratio, 1 / c.ratio)))
    shown = changes if everything else [c for c in changes if order.index(c.verdict) < 2]
    grid = table(
        shown,
        left("Verdict", lambda change: Cell(change.verdict, _STYLES[change.verdict])),
        left("Backend", lambda change: change.b.backend),
        left("Case", lambda change: _case(change.b)),
        *timed("A", "A 95 %", attrgetter("a.interval")),
        *timed("B", "B 95 %", attrgetter("b.interval")),
        right("A / B", attrgetter("ratio_text")),
    )
    blocks: list[Block] = [Text(comparison.summary(), "bold"), Items("", comparison.notes, "yellow")]
    blocks += [grid] if shown else []
    for name, rows in (("A", comparison.only_a), ("B", comparison.only_b)):
        cases = [f"{row.backend} {_case(row)}" for row in rows]
        title = f"{text.count(len(rows), 'result')} only in {name}"
        blocks += [Items(title, cases if everything else text.shortened(cases), "dim")] if rows else []
    return blocks


def render_markdown(comparison: Comparison) -> str:
    """Returns the whole comparison as Markdown."""
    runs = Text(f"A: {comparison.a}, B: {comparison.b}")
    return markdown.document("Comparison", [runs, *_blocks(comparison, everything=True)])


def render(comparison: Comparison, everything: bool = False) -> RenderableType:
    """Returns the comparison for a terminal."""
    return Group(*terminal.rendered(_blocks(comparison, everything)))
