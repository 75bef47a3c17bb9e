"""The programs of ranks in the bootstrap tests, as source for `python -c` or as a file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GATHER = Path(__file__).with_name("rank_gathers.py")
AGAIN = Path(__file__).with_name("rank_again.py")
MAKE = """
import os, sys
from unisono import bootstrap, errors, launch
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
world = launch.from_env(os.environ)
"""
MEET = MAKE + "b = bootstrap.make(world, timeout_s=20); rank = b.rank\n"


def shell(argv: list[str], **env: str) -> tuple[int, list[str], str]:
    """Runs a command. Returns its exit status, the sorted lines of standard output, and standard error."""
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr
