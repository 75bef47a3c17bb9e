"""Writes files that other processes may be reading."""

from __future__ import annotations

import contextlib
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
