"""Two runs, case by case: is B faster than A?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from unisono.records import Case, stats, text
from unisono.records.stats import Verdict
from unisono.records.vocabulary import case_text

from .markdown import table as markdown_table
from .model import Model, Row, load

_STYLES = {Verdict.FASTER: "green", Verdict.SLOWER: "red", Verdict.SAME: "dim", Verdict.UNCLEAR: "yellow"}
_HEAD = ["Verdict", "Backend", "Case", "A", "A 95 %", "B", "B 95 %", "A / B"]


@dataclass(frozen=True)
class Change:
    """One case on one backend in both runs. `ratio` above 1: B is faster."""

    a: Row
    b: Row
    tolerance: float = stats.TOLERANCE

    @property
    def ratio(self) -> float:
        return self.a.interval.median / self.b.interval.median

    @property
    def verdict(self) -> Verdict:
        """Of B against A."""
        return stats.verdict(self.b.interval, self.a.interval, self.tolerance)

    def cells(self) -> list[str]:
        a, b = self.a.interval, self.b.interval
        sides = [cell for side in (a, b) for cell in (text.time(side.median), text.span(side.low, side.high))]
        return [str(self.verdict), self.b.backend, _case(self.b), *sides, text.ratio(self.ratio)]


@dataclass
class Comparison:
    """`changes` in the order of the report; `only_a` and `only_b` are results that the other run does not
    have."""

    a: Path
    b: Path
    changes: list[Change] = field(default_factory=list)
    only_a: list[Row] = field(default_factory=list)
    only_b: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(change.verdict for change in self.changes)

    def of(self, verdict: Verdict) -> list[Change]:
        return [change for change in self.changes if change.verdict is verdict]

    @property
    def exit_code(self) -> int:
        """0 where anything was compared."""
        return 0 if self.changes else 1

    @property
    def mean(self) -> float:
        """Geometric mean of A / B over all changes; NaN without any."""
        return stats.geometric_mean([change.ratio for change in self.changes])

    def summary(self) -> str:
        """One sentence."""
        if not self.changes:
            return "The two runs have no case in common, so nothing was compared."
        counts = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in Verdict)
        cases = text.count(len(self.changes), "case")
        return f"{cases} in both runs: B is {counts}; geometric mean of A / B {text.ratio(self.mean)}."


def _case(row: Row) -> str:
    return case_text(row.key.case, row.key.workload)


def _index(
    model: Model, backend: str | None, by_machine: bool
) -> dict[tuple[str, str | None, Case, str], Row]:
    return {
        (
            model.machines[row.key.machine] if by_machine else "",
            row.key.workload,
            row.key.case,
            row.backend,
        ): row
        for row in model.all_rows
        if backend in (None, row.backend)
    }


def compare(a: Path, b: Path, backend: str | None = None, tolerance: float = stats.TOLERANCE) -> Comparison:
    """Compares the records at `b` with those at `a` (files or directories), on every backend or only on
    `backend`.

    FASTER: B's interval lies wholly below A's and the medians differ by more than `tolerance` (0.02 is 2 %).
    SLOWER is the mirror image; SAME: both intervals lie within `tolerance` of each other; else UNCLEAR, as
    where either run has too few visits for an interval. Raises what `load` raises, and ValueError for a
    tolerance below 0."""
    if not tolerance >= 0:
        raise ValueError(f"the tolerance is {tolerance}: give 0 or more, like 0.02 for 2 %.")
    first, second = load(a), load(b)
    found = Comparison(Path(a), Path(b))
    by_machine = len(first.machines) > 1 or len(second.machines) > 1
    ours, theirs = _index(first, backend, by_machine), _index(second, backend, by_machine)
    found.changes = [Change(ours[key], row, tolerance) for key, row in theirs.items() if key in ours]
    found.only_a = [row for key, row in ours.items() if key not in theirs]
    found.only_b = [row for key, row in theirs.items() if key not in ours]
    unsure = sum(not (change.a.interval.sure and change.b.interval.sure) for change in found.changes)
    if unsure:
        found.notes.append(
            f"{text.count(unsure, 'case')} had fewer than {stats.MIN_SAMPLES} visits in a run, so that the "
            "verdict is UNCLEAR: give the bench a longer --budget."
        )
    if set(first.machines) != set(second.machines):
        machines = [text.listing(model.machines) for model in (first, second)]
        found.notes.append(f"The machines differ: A ran on {machines[0]}; B on {machines[1]}.")
    if backend is not None and not ours and not theirs:
        known = sorted({*first.backends, *second.backends})
        found.notes.append(f"Neither run has a result of {backend}: they have {text.listing(known)}.")
    for name, model in (("A", first), ("B", second)):
        found.notes += [
            f"{name}: {source.name} is {source.state}."
            for source in model.sources
            if source.state != "complete"
        ]
        if model.failures:
            found.notes.append(
                f"{name} has {text.count(len(model.failures), 'failure')}; failed cases are not compared."
            )
        found.notes += [f"{name}: {problem}" for problem in text.shortened(model.problems)]
    return found


def _missing(comparison: Comparison) -> list[tuple[str, list[Row]]]:
    both = (("A", comparison.only_a), ("B", comparison.only_b))
    return [(f"{text.count(len(rows), 'result')} only in {name}", rows) for name, rows in both if rows]


def render_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown, the changed cases first."""
    md = text.markdown
    lines = [
        "# Comparison of two runs",
        "",
        f"A: {md(comparison.a)}, B: {md(comparison.b)}",
        "",
        md(comparison.summary()),
        "",
    ]
    lines += [f"- {md(note)}" for note in comparison.notes] + [""]
    lines += markdown_table(_HEAD, (change.cells() for change in _ordered(comparison)), range(3, 8))
    for title, rows in _missing(comparison):
        lines += [f"## {title}", "", *(f"- {md(row.backend)}: {md(_case(row))}" for row in rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _ordered(comparison: Comparison) -> list[Change]:
    """SLOWER first, the largest change of each verdict on top."""
    order = [Verdict.SLOWER, Verdict.FASTER, Verdict.UNCLEAR, Verdict.SAME]
    return sorted(comparison.changes, key=lambda c: (order.index(c.verdict), -max(c.ratio, 1 / c.ratio)))


def render(comparison: Comparison, everything: bool = False) -> RenderableType:
    """The comparison for a terminal: the cases that are FASTER or SLOWER, or with `everything` all of
    them."""
    chosen = [c for c in _ordered(comparison) if everything or c.verdict in (Verdict.FASTER, Verdict.SLOWER)]
    parts: list[RenderableType] = [Text(text.plain(comparison.summary()), style="bold")]
    parts += [Text(text.plain(note), style="yellow") for note in comparison.notes]
    if chosen:
        grid = RichTable(box=None, pad_edge=False, header_style="bold")
        for i, name in enumerate(_HEAD):
            grid.add_column(name, justify="right" if i > 2 else "left", no_wrap=i != 2)
        for change in chosen:
            verdict, *cells = change.cells()
            grid.add_row(
                Text(verdict, style=_STYLES[change.verdict]), *(Text(text.plain(cell)) for cell in cells)
            )
        parts.append(grid)
    for title, rows in _missing(comparison):
        shown = "; ".join(f"{row.backend} {_case(row)}" for row in rows[:5])
        parts.append(Text(text.plain(f"{title}: {shown}{' …' if len(rows) > 5 else ''}"), style="dim"))
    return Group(*parts)
