"""The blocks of which every section, comparison and gate consists. html.py, markdown.py and terminal.py each
render all of them. Nothing in a block is escaped yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from unisono.records.stats import Verdict

VERDICTS = (Verdict.FASTER, Verdict.SAME, Verdict.UNCLEAR, Verdict.SLOWER)  # from good to bad
T = TypeVar("T")


@dataclass(frozen=True)
class Text:
    """A paragraph. `style`: `heading`, `code`, a class of page.css, or on a terminal a style of rich."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Items:
    """A list with a title, or without. `style`: bad or warn, or on a terminal a style of rich."""

    title: str
    items: Sequence[str]
    style: str


@dataclass(frozen=True)
class Terms:
    """Terms with their explanations."""

    terms: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Tally:
    """Counts of verdicts: a bar on the page, `3 · 0 · 1 · 2` elsewhere."""

    counts: Counter[Verdict]

    def __str__(self) -> str:
        return " · ".join(str(self.counts[verdict]) for verdict in VERDICTS)


@dataclass(frozen=True)
class Cell:
    """A coloured cell of a table. `style`: a class of page.css, or on a terminal a style of rich."""

    text: str
    style: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Headings and rows; the columns in `numeric` are aligned right. `style`: a class of page.css."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell | Tally]]
    numeric: frozenset[int] = frozenset()
    style: str = ""
    title: str = ""


@dataclass(frozen=True)
class Headline:
    """A figure with its meaning, the verdicts behind it, and remarks."""

    figure: str
    meaning: str
    verdicts: Tally
    remarks: str


@dataclass(frozen=True)
class Scale:
    """The legend of a colour scale of theme.py, between two words. Only the page shows it."""

    name: str
    low: str
    high: str


@dataclass(frozen=True)
class Chart:
    """A chart that the page's script draws in the element `id`. report.md shows pictures instead: those whose
    name is `picture`, or begins with it and an underscore."""

    id: str
    style: str = ""
    picture: str = ""


@dataclass(frozen=True)
class Part:
    """Blocks that the reader unfolds if they have a title, or that `only` the page or the twin shows.
    `style`: a class of page.css."""

    blocks: Sequence[Block]
    title: str = ""
    only: str = ""
    style: str = ""


Block = Text | Items | Terms | Table | Headline | Scale | Chart | Part
Column = tuple[str, bool, Callable[[T], str | Cell | Tally]]  # heading, whether of numbers, and the cell


def left(title: str, cell: Callable[[T], str | Cell | Tally]) -> Column[T]:
    """Returns a column of text."""
    return title, False, cell


def right(title: str, cell: Callable[[T], str | Cell | Tally]) -> Column[T]:
    """Returns a column of numbers."""
    return title, True, cell


def table(items: Iterable[T], *columns: Column[T]) -> Table:
    """Returns a table with a row for each item."""
    numeric = frozenset(i for i, (_, number, _) in enumerate(columns) if number)
    rows = [[cell(item) for _, _, cell in columns] for item in items]
    return Table([title for title, _, _ in columns], rows, numeric)
