"""`unisono bench`: every collective on every backend."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from typing import Any, get_type_hints

from . import finish
from .asked import Asked
from .common import check_ranks, console, guarded, run_bench
from .resolve import options_of


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


def _signature() -> inspect.Signature:
    """Returns a signature with a parameter for each field of Asked. Typer makes the command line from it."""
    hints = get_type_hints(Asked, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(Asked)]
    )


bench.__signature__ = _signature()  # type: ignore[attr-defined]
