"""Ends a run from its records alone: builds the report, prints the outcome, finds the exit code."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from unisono.records import FILE_NAME, Records, files, read

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def exit_code(records: Records, launcher_code: int = 0) -> int:
    """Returns 130 after Ctrl-C; 1 if a case failed, nothing was measured or the ranks ended early; else 0."""
    if any(end.interrupted for end in records.ends):
        return INTERRUPTED
    measured = records.results or records.largest
    unfinished = len(records.ends) < max(1, len(records.runs))
    broken = records.failures or unfinished or not measured or launcher_code != 0
    return FAILED if broken else OK


def ended(directory: Path, launcher_code: int, console: Console) -> Records | None:
    """Returns the records of a run, and prints if it did not end in good order. None: there are none."""
    records = read(directory) if any(directory.rglob(FILE_NAME)) else Records()
    if not records.runs:
        console.print("The ranks ended before anything was recorded; their messages are above.", style="red")
        return None
    if launcher_code != 0 or len(records.ends) < len(records.runs):
        console.print(
            "The run did not end in good order; the report holds what was recorded until then.", style="red"
        )
    if any(end.interrupted for end in records.ends):
        console.print("Interrupted: the report holds what was measured until then.")
    return records


def finish(
    directory: Path, launcher_code: int, console: Console, with_report: bool = True, named: bool = True
) -> int:
    """Builds the report of the records, prints results, summary and the report's path. Returns the exit code.
    Removes the directory if a run ended normally and measured nothing, unless the user has `named` it."""
    records = ended(directory, launcher_code, console)
    if records is None:
        return FAILED
    from unisono.report import model, terminal

    loaded = model.load(directory)
    for part in (*terminal.results(loaded), *terminal.summary(loaded)):
        console.print(part)
    for line in terminal.unmeasured(loaded):
        console.print(line, highlight=False, soft_wrap=True)
    if records.failures:
        console.print(f"{len(records.failures)} case(s) failed; the report lists them.", style="red")
    code = exit_code(records, launcher_code)
    outcomes = (records.results, records.largest, records.failures)
    if not named and launcher_code == 0 and records.ends and not any(outcomes):
        shutil.rmtree(directory)
        console.print("Nothing was measured, so no records are kept.")
        return code
    if not with_report:
        for path in files(directory):
            console.print(f"records: {shown(path)}", soft_wrap=True)
        return code
    written = show_report(directory, console)
    return code or (OK if written else FAILED)


def show_report(directory: Path, console: Console) -> bool:
    """Builds the report and prints its path. If the report cannot be built or written, prints why and the
    path of the records. Returns False if the report cannot be written."""
    from unisono import report

    try:
        for path in report.build(directory):
            if path.suffix == ".html":
                console.print(f"report: {shown(path)}", soft_wrap=True)
    except (ImportError, OSError) as error:
        console.print(f"records: {shown(directory / FILE_NAME)}; {error}", soft_wrap=True)
        return isinstance(error, ImportError)
    return True


def shown(path: Path) -> str:
    """Returns the path, relative to the current directory if it lies below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
