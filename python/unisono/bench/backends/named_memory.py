"""Shared memory that a library finds by name, for ranks on one machine."""

from __future__ import annotations

import uuid
from pathlib import Path

from unisono.bench.backends.base import Ranks

_FOLDER = Path("/dev/shm")


def new_name(ranks: Ranks) -> str:
    """Returns a name that is new, and the same on all ranks. Collective. Raises RuntimeError if the ranks are
    on several nodes."""
    if len(ranks.communicator.nodes) > 1:
        raise RuntimeError("its ranks must be on one machine.")
    return ranks.all_gather(uuid.uuid4().hex.encode())[0].decode()


def forget(ranks: Ranks, name: str) -> None:
    """Removes all names with `name` in them, once every rank has mapped the memory. Collective.

    Nothing then stays behind when a rank is killed. The memory itself lasts as long as its mappings."""
    ranks.all_gather(b"")
    for file in _FOLDER.glob(f"*{name}*"):
        file.unlink(missing_ok=True)
