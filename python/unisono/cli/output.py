"""Chooses the directory of a run, and sees that it can be written."""

from __future__ import annotations

import secrets
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from unisono.bench.cases import CaseError
from unisono.records import FILES


def directory_of(named: Path | None, kind: str = "bench") -> Path:
    """Returns the directory `named` by the user, or a new one in the current directory. Raises CaseError if
    it cannot be used."""
    if named is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        named = Path.cwd() / f"unisono-{kind}-{stamp}-{secrets.token_hex(4)}"
    if named.exists() and not named.is_dir():
        raise CaseError(f"{named} is not a directory: name another with --output.")
    check_writable(named)
    if any(named.rglob(FILES)):  # at any depth, since the report merges them
        raise CaseError(f"{named} holds the records of another run: name another directory with --output.")
    return named.absolute()


def check_writable(path: Path) -> None:
    """Raises CaseError if no file can be made in `path`, or in the nearest parent that exists. Leaves nothing
    there, since each rank of a launcher calls this."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise CaseError(f"{path} cannot be written ({error.strerror}): name another with --output.") from None
