"""Prints blocks, and what a run has found, on a terminal."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from unisono.records import NOT_CHECKED, Link, text
from unisono.records.stats import Verdict
from unisono.records.vocabulary import scaling_text

from . import analysis, matmuls, payload, sections, studies, tables
from . import blocks as b
from .model import Model
from .row import Key, Row

MOST_ROWS = 60
NUMBERS = ("time µs", "95 %", "algbw GB/s", "busbw GB/s")


def rendered(blocks: Iterable[b.Block]) -> Iterator[RenderableType]:
    """Yields what rich prints for these blocks; everything from a record is text, without markup."""
    for block in blocks:
        match block:
            case b.Text(words, style):
                yield Text(text.plain(words), style=style)
            case b.Items(title, items, style):
                lines = [f"{title}: {'; '.join(items)}"] if title else items
                yield from (Text(text.plain(line), style=style) for line in lines)
            case b.Table():
                yield grid(block)


def grid(table: b.Table, title: str = "") -> Table:
    """Returns a table of rich."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title or table.title or None)
    for i, name in enumerate(table.head):
        made.add_column(Text(name), justify="right" if i in table.numeric else "left", no_wrap=name != "Case")
    for row in table.rows:
        made.add_row(*(Text(text.plain(cell), style=getattr(cell, "style", "")) for cell in row))
    return made


def results(model: Model) -> Iterator[RenderableType]:
    """Yields every result, in the report's order, and what FAILED; above them what is the same in all rows.
    Of more than MOST_ROWS the first ones are shown, and a sentence counts the others."""
    found = [(row.key, row.backend, _numbers(row)) for row in model.all_rows]
    failed = [*(text.MISSING for _ in NUMBERS), "FAILED"]
    found += [(Key(machine, None, f.case), f.backend, failed) for machine, f in model.failures]
    if not found:
        return
    found.sort(key=lambda line: line[0].order())
    places = [_place(key, backend, model) for key, backend, _ in found]
    telling = [name for name in places[0] if len({place[name] for place in places}) > 1]
    same = {name: value for name, value in places[0].items() if name not in telling}
    yield ", ".join(payload.in_words(same, {**payload.USUAL, "machine": same.get("machine")}))
    rows = [
        [*(str(place[name] if place[name] is not None else "") for name in telling), *numbers]
        for place, (_, _, numbers) in zip(places[:MOST_ROWS], found, strict=False)
    ]
    head = [*(payload.COLUMNS[name].lower() for name in telling), *NUMBERS, "check"]
    numeric = frozenset(i for i, name in enumerate(head) if name in ("size", *NUMBERS))
    yield grid(b.Table(head, rows, numeric))
    if len(found) > MOST_ROWS:
        yield f"{text.count(len(found) - MOST_ROWS, 'more row')}: `unisono report` shows all of them."


def _place(key: Key, backend: str, model: Model) -> payload.Json:
    """Returns what tells the results of a run apart, by column."""
    known = payload.slice_of(key, model) | {"scaling": scaling_text(key.case) or "none", "backend": backend}
    return {name: known[name] for name in payload.COLUMNS if name in known}


def _numbers(row: Row) -> list[str]:
    interval, result = row.interval, row.result
    return [
        text.digits(interval.median),
        f"{text.digits(interval.low)} to {text.digits(interval.high)}",
        text.gbps(result.algbw_gbps),
        text.gbps(result.busbw_gbps),
        "not checked" if result.verification.bound == NOT_CHECKED else "ok",
    ]


def summary(model: Model) -> Iterator[RenderableType]:
    """Yields the report's headlines: the subject against the fastest other backend of each case. Each number
    of ranks has a table with a row per collective, and a sentence if not all cases are judged."""
    compared = [group for group in analysis.groups(model) if group.total.pairs]
    for group in compared:
        table = b.table(
            [line for line in (*group.collectives, group.total) if line.pairs],
            b.left("collective", lambda line: line.title),
            b.right("cases", lambda line: str(len(line.pairs))),
            b.right("speed-up", lambda line: f"{line.mean:.2f}"),
            b.right("lowest", lambda line: f"{line.worst.ratio:.2f}"),
            *(b.right(verdict, functools.partial(_count, verdict)) for verdict in Verdict),
        )
        ranks = text.count(group.ranks, "rank")
        yield grid(table, f"{model.subject} against the fastest other backend of each case, {ranks}")
        if group.total.judged < len(group.total.pairs):
            yield f"{ranks}: {text.ratio(group.total.mean)} over {sections.cases_text(group.total)}."
    yield from (grid(one, f"matmuls with their collective, {one.title}") for one in matmuls.study(model))
    if compared and model.unsure:
        yield sections.brief(model)
    if cover := sections.launched(model):
        yield cover


def _count(verdict: Verdict, line: analysis.Headline) -> str:
    return str(line.verdicts[verdict])


def unmeasured(model: Model) -> Iterator[str]:
    """Says once for each reason why a backend left out cases that no backend measured. The run has said at
    its beginning what concerns all backends."""
    known = {row.key.case for row in model.all_rows} | {failure.case for _, failure in model.failures}
    alone = [skip for skip in model.skips if skip.case not in known and skip.case and skip.backend != "all"]
    for backend, what, reason in tables.skips(alone).rows:
        yield text.plain(f"{backend} left out {what}: {reason}")


def link_tables(found: Sequence[Link]) -> list[Table]:
    """Returns a summary by engine and pattern, and a matrix of pairs for each engine."""
    model = Model(hardware=[None], places=[[]], links=[(0, link) for link in found])
    return [grid(studies.links(model), "Links between the GPUs"), *map(grid, studies.link_matrices(model))]
