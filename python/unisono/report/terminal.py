"""What a run has found, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from unisono.records import NOT_CHECKED, Link, text
from unisono.records.stats import Verdict
from unisono.records.vocabulary import pair_name, scaling_text, title
from unisono.report import analysis, content, studies
from unisono.report.model import Key, Model, Row

MOST_ROWS = 60
NUMBERS = ("time µs", "95 %", "algbw GB/s", "busbw GB/s")


def results(model: Model) -> Iterator[Table | str]:
    """Every result, in the report's order, and what FAILED; a line above says what is the same in all rows.
    Of more than MOST_ROWS the first ones, and a sentence about the others."""
    found = [(row.key, _case(row.key, row.backend), _numbers(row)) for row in model.all_rows]
    for machine, failure in model.failures:
        key = Key(machine, None, failure.case)
        found.append((key, _case(key, failure.backend), [*(text.MISSING for _ in NUMBERS), "FAILED"]))
    if not found:
        return
    found.sort(key=lambda line: line[0].order())
    every = [case for _, case, _ in found]
    telling = [name for name in every[0] if len({case[name] for case in every}) > 1]
    same = [value for name, value in every[0].items() if name not in telling]
    yield ", ".join(filter(None, same))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (*telling, *NUMBERS, "check"):
        table.add_column(name, justify="right" if name in ("size", *NUMBERS) else "left")
    for _, case, numbers in found[:MOST_ROWS]:
        table.add_row(*(case[name] for name in telling), *numbers)
    yield table
    if len(found) > MOST_ROWS:
        yield f"{text.count(len(found) - MOST_ROWS, 'more row')}: `unisono report` shows all of them."


def _case(key: Key, backend: str) -> dict[str, str]:
    """What tells the results of a run apart, by column; empty where a case has no such thing."""
    case = key.case
    return {
        "workload": key.workload or "",
        "ranks": text.count(case.ranks, "rank"),
        "collective": title(case),
        "pair": pair_name(case) or "",
        "scaling": scaling_text(case) or "",
        "size": text.size(case.bytes),
        "dtype": case.dtype,
        "op": case.op or "",
        "root": "" if case.root is None else f"root {case.root}",
        "placement": case.placement.replace("_", " "),
        "memory": case.memory,
        "mode": case.mode,
        "backend": backend,
    }


def _numbers(row: Row) -> list[str]:
    interval, result = row.interval, row.result
    return [
        text.digits(interval.median),
        f"{text.digits(interval.low)} to {text.digits(interval.high)}",
        text.gbps(result.algbw_gbps),
        text.gbps(result.busbw_gbps),
        "not checked" if result.verification.bound == NOT_CHECKED else "ok",
    ]


def summary(model: Model) -> Iterator[Table | str]:
    """The report's headlines: the subject against the fastest other backend of each case, a row per
    collective; one table for each number of ranks, none where there is nothing to compare. A sentence below
    says how much of it is judged."""
    compared = False
    for group in analysis.groups(model):
        if not group.total.pairs:
            continue
        table = Table("collective", "cases", "speed-up", "lowest", *(v.value for v in Verdict))
        ranks = text.count(group.ranks, "rank")
        table.title = f"{model.subject} against the fastest other backend of each case, {ranks}"
        for line in (*group.collectives, group.total):
            if line.pairs:
                numbers = [str(len(line.pairs)), f"{line.mean:.2f}", f"{line.worst.ratio:.2f}"]
                table.add_row(line.title, *numbers, *(str(line.verdicts[v]) for v in Verdict))
        yield table
        compared = True
        if group.total.judged < len(group.total.pairs):
            yield f"{ranks}: {text.ratio(group.total.mean)} over {content.cases_text(group.total)}."
    if compared and model.unsure:
        yield content.brief(model)


def unmeasured(model: Model) -> Iterator[str]:
    """Why a backend left out cases of which nothing was measured on any, once for each reason. What concerns
    all backends the run has said when it began."""
    known = {row.key.case for row in model.all_rows} | {failure.case for _, failure in model.failures}
    alone = [skip for skip in model.skips if skip.case not in known and skip.case and skip.backend != "all"]
    for backend, what, reason in content.skips(alone).rows:
        yield text.plain(f"{backend} left out {what}: {reason}")


def link_tables(found: Sequence[Link]) -> list[Table]:
    """Returns a summary by engine and pattern, and a matrix of pairs for each engine."""
    shown = Model(hardware=[None], links=[(0, link) for link in found])
    summary = studies.link_table(shown)
    first = Table(*summary.head, title="Links between the GPUs")
    for row in summary.rows:
        first.add_row(*row)
    made = [first]
    for matrix in studies.link_matrices(shown):
        table = Table("from \\ to", *matrix.names, title=matrix.title)
        for name, cells in zip(matrix.names, matrix.cells, strict=True):
            table.add_row(name, *(value for value, _ in cells))
        made.append(table)
    return made
