"""Shared by the commands: options, errors in one sentence, the console, and joining or starting ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console

from unisono import launch
from unisono.bench import launches, start
from unisono.bench.cases import CaseError
from unisono.bench.options import FABRIC_RANKS, Options
from unisono.bench.provenance import usable_cores
from unisono.errors import ResourceError, UnisonoError, UsageError
from unisono.launch.run import MAX_RANKS

from .finish import FAILED, OK, USAGE

T = TypeVar("T")

Output = Annotated[
    Path | None,
    typer.Option("-O", "--output", "--out", help="Directory of records and report; default: a new one here."),
]
WithReport = Annotated[
    bool,
    typer.Option(
        "--report/--no-report",
        help="Write the report too, not only the records (`unisono report` makes it later).",
    ),
]


def console(stderr: bool = False) -> Console:
    """Returns a console of the terminal's width, or wide enough for every table if the output goes to a file.

    Brackets and colons are no markup, since names and paths may hold them."""
    wide = None if (sys.stderr if stderr else sys.stdout).isatty() else 160
    return Console(width=wide, stderr=stderr, markup=False, emoji=False)


def refuse(error: Exception, code: int = USAGE) -> NoReturn:
    """Ends the process with exit code `code`. Only rank 0 prints the error."""
    if _is_first():
        console(stderr=True).print(f"unisono: {error}", style="red", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _is_first() -> bool:
    try:
        return launch.from_env(os.environ).rank == 0
    except UsageError:
        return True


def guarded(step: Callable[[], T]) -> T:
    """Returns the result of `step`, or ends the process with the sentence of an error."""
    try:
        return step()
    except (CaseError, UsageError) as error:
        refuse(error)
    except UnisonoError as error:  # refused by the machine
        refuse(error, FAILED)


def readable(step: Callable[[], T]) -> T:
    """Returns the result of `step`, which reads records and may write a report, or ends the process. Missing
    records, and those of another schema, count as a wrong command line."""
    try:
        return step()
    except (FileNotFoundError, ValueError, ImportError) as error:
        refuse(error)
    except ResourceError as error:
        refuse(error, FAILED)
    except OSError as error:
        text = f"{error.filename or 'the records'} cannot be read: {error.strerror}."
        refuse(ResourceError(text), FAILED)


def run_bench(options: Options, ranks: int | None, done: Callable[[Path, int], int]) -> NoReturn:
    """Joins the ranks that a launcher has started, or starts the ranks. Ends the process.

    `done` runs once, in the process that started the ranks, else on rank 0. `done` gets the records'
    directory and the launcher's exit code, and returns the exit code of this process."""
    world = guarded(lambda: start.joined_world(os.environ, ranks))
    directory = Path(options.directory)
    if world is not None and options.threads:
        refuse(CaseError("--one-process starts its ranks as threads: start it alone, not under a launcher."))
    if world is not None and (options.launches > 1 or options.mpis):
        refuse(
            CaseError("--launches and --mpi start the ranks: start the bench alone, not under a launcher.")
        )
    guarded(lambda: options.check_ranks(world.size) if world is not None else None)
    if world is None:
        wanted = FABRIC_RANKS if options.fabric and ranks is None else ranks
        count = guarded(lambda: start.ranks_to_start(wanted, options.device, usable_cores()))
        guarded(lambda: options.check_ranks(count))
        one = options.launches == 1 and not options.mpis
        run = start.start if one else partial(launches.run, say=console().print)
        code = guarded(lambda: run(options, count))
        raise typer.Exit(done(directory, code))
    from unisono.bench import rank, session

    try:
        session.run(options)
    except UsageError as error:
        refuse(error)
    except BaseException as error:
        rank.leave(error)
        raise typer.Exit(FAILED) from None
    # Another code of another rank would make the launcher end rank 0 during the report.
    raise typer.Exit(done(directory, 0) if world.rank == 0 else OK)


def check_ranks(ranks: int | None) -> None:
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        refuse(CaseError(f"--ranks {ranks}: at least one rank is needed, and {MAX_RANKS} are the most."))
