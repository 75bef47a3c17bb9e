"""`unisono bench`: every collective on every backend. `unisono ab`: this build beside another one."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.bench.backends.base import OTHER, load

from . import finish
from .asked import Asked, signature
from .common import check_ranks, console, guarded, readable, run_bench
from .resolve import options_of

AB_LAUNCHES = 11  # the interval of so many ratios misses 1 by chance in 1.2 % of the cases; of 10 in 2.1 %


def bench(**values: Any) -> None:
    """Measures every collective on every backend, checks the results and writes a report."""
    asked = Asked(**values)
    check_ranks(asked.ranks)
    options = guarded(lambda: options_of(asked, sys.argv[1:]))
    run_bench(
        options,
        asked.ranks,
        lambda found, code: finish.finish(found, code, console(), asked.report, asked.directory is not None),
    )


def ab(prefix: str, **values: Any) -> None:
    """Measures this build (A) and the one at PREFIX (B) in the same processes over several launches, and says
    for each case whether B is FASTER or SLOWER, the SAME, or UNCLEAR."""
    asked = Asked(**values)
    launches = asked.launches or AB_LAUNCHES
    asked = replace(asked, backends=f"unisono,{OTHER}{prefix}", launches=launches, workloads="none")
    check_ranks(asked.ranks)
    options = guarded(lambda: options_of(asked, sys.argv[1:]))
    other = guarded(lambda: load(options.backends[1]).name)

    def judge(directory: Path, code: int) -> int:
        from unisono.report import compare as comparing

        screen = console()
        ended = finish.ended(directory, code, screen)
        if ended is None:
            return finish.FAILED
        found = readable(lambda: comparing.ab(directory, "unisono", other))
        screen.print(comparing.render(found))
        screen.print(f"records: {finish.shown(directory)}", soft_wrap=True)
        return finish.exit_code(ended, code) or found.exit_code

    run_bench(options, asked.ranks, judge)


_PREFIX = Annotated[
    str, typer.Argument(metavar="PREFIX", help="Of another installation, as of pip install --target PREFIX.")
]
bench.__signature__ = signature()  # type: ignore[attr-defined]
ab.__signature__ = signature(  # type: ignore[attr-defined]
    inspect.Parameter("prefix", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_PREFIX),
    without=("backends", "mpis", "wires", "device", "fabric", "provider", "channels", "workloads", "report"),
)
