"""After the ranks have ended: the report, what to tell the user, and the exit code. Works from the records
alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unisono.bench import stats
from unisono.bench.cases import COLLECTIVES
from unisono.bench.records import FILE_NAME, Case, Records, Result, read
from unisono.bench.stats import Interval, Verdict, verdict

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def exit_code(records: Records, launcher_code: int = 0) -> int:
    """0; 1 where a case failed, nothing was measured or the ranks ended before the run did; 130 after
    Ctrl-C."""
    if any(end.interrupted for end in records.ends):
        return INTERRUPTED
    broken = records.failures or not records.ends or not records.results or launcher_code != 0
    return FAILED if broken else OK


def compared(results: list[Result], subject: str = "unisono") -> dict[str, list[tuple[float, Verdict]]]:
    """Per collective: (time of the best other backend / the subject's, verdict) for every case that both
    have."""
    cases: dict[tuple[Case, str | None], dict[str, Result]] = {}
    for result in results:
        if result.verification.after or result.verification.bound == "not checked":
            cases.setdefault((result.case, result.workload), {})[result.backend] = result
    found: dict[str, list[tuple[float, Verdict]]] = {}
    for (case, _), by_backend in cases.items():
        mine = by_backend.pop(subject, None)
        if mine is None or not by_backend or mine.median_us <= 0:
            continue
        peer = min(by_backend.values(), key=lambda r: r.median_us)
        says = verdict(_interval(mine), _interval(peer))
        found.setdefault(case.collective, []).append((peer.median_us / mine.median_us, says))
    return found


def _interval(result: Result) -> Interval:
    return Interval(result.median_us, result.ci_low_us, result.ci_high_us)


def summary(records: Records) -> Table | None:
    """unisono against the best of the others, a row per collective; None where there is nothing to
    compare."""
    rows = compared(records.results)
    if not rows:
        return None
    table = Table(
        "collective", "cases", "speed-up", "lowest", *(v.value for v in Verdict), title_justify="left"
    )
    table.title = "unisono against the fastest other backend of each case"
    ordered = [(name, rows[name]) for name in COLLECTIVES if name in rows]
    everything = [pair for pairs in rows.values() for pair in pairs]
    for name, pairs in [*ordered, ("all", everything)]:
        ratios, counts = [ratio for ratio, _ in pairs], Counter(says for _, says in pairs)
        numbers = [f"{stats.geometric_mean(ratios):.2f}", f"{min(ratios):.2f}"]
        table.add_row(name, str(len(pairs)), *numbers, *(str(counts[v]) for v in Verdict))
    return table


def finish(directory: Path, launcher_code: int, console: Console) -> int:
    """Builds the report of what was recorded, prints the summary and where the report is; returns the exit
    code."""
    if not (directory / FILE_NAME).is_file():
        console.print("The ranks ended before anything was recorded; their messages are above.", style="red")
        return FAILED
    records = read(directory)
    if launcher_code != 0 or not records.ends:
        console.print(
            "The run did not end in good order; the report holds what was recorded until then.", style="red"
        )
    if any(end.interrupted for end in records.ends):
        console.print("Interrupted: the report holds what was measured until then.")
    table = summary(records)
    if table is not None:
        console.print(table)
    if records.failures:
        console.print(f"{len(records.failures)} case(s) failed; the report lists them.", style="red")
    from unisono import report

    for path in report.build(directory):
        if path.suffix == ".html":
            console.print(f"report: {shown(path)}", soft_wrap=True)
    return exit_code(records, launcher_code)


def shown(path: Path) -> str:
    """Relative to the current directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
