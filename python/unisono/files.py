"""Writes files that other processes may be reading, and says where the user's cache is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from unisono.errors import ResourceError


def write(path: Path, content: bytes) -> Path:
    """Writes `content` to `path` as a whole. Returns `path`. Raises ResourceError, which names the file, if
    the system refuses; the old content then stays."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ResourceError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def cache() -> Path | None:
    """Returns Unisono's folder of the user's cache; None if the user has no home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "unisono"
    except RuntimeError:  # a user without a name, as in containers
        return None
