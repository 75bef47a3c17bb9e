"""One rank of `ranks.play`: `python rank_main.py MODULE:FUNCTION FOLDER ARGS` writes the result to FOLDER."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

RANKS = ("UNISONO_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")


def describe(error: BaseException) -> dict[str, Any]:
    """Returns an error as JSON: its class, its text, and the classes that catch it."""
    return {
        "type": type(error).__name__,
        "text": str(error),
        "bases": [base.__name__ for base in type(error).__mro__],
    }


def main(program: str, folder: str, args: str) -> int:
    module, _, function = program.partition(":")
    outcome: dict[str, Any]
    try:
        outcome = {"result": getattr(importlib.import_module(module), function)(*json.loads(args))}
    except BaseException as error:
        outcome = {"error": describe(error)}
    path = Path(folder) / next((os.environ[name] for name in RANKS if name in os.environ), "0")
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(outcome))
    unfinished.rename(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
