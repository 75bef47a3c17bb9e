"""Runs of the command `unisono bench`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "unisono"]


def leave_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables of a launcher around the tests."""
    for name in os.environ:
        if name.startswith(("PMI", "OMPI_", "SLURM_", "MPI_LOCAL")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
        ):
            monkeypatch.delenv(name)


def bench(directory: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a short bench without a report in a process of its own. Returns its outcome."""
    small = ["--sizes", "8,5000", "-n", "4", "-O", str(directory), "--no-report"]
    return subprocess.run(
        [*COMMAND, "bench", *small, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        **options,
    )  # type: ignore[call-overload, no-any-return]
