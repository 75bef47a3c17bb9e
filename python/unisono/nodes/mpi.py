"""Messages between nodes by MPI."""

from __future__ import annotations

from .. import _core
from ..bootstrap.mpi import abandon
from .engine import Setting

__all__ = ["MpiEngine"]


class MpiEngine:
    """Over the bootstrap's own copy of the communicator, on which nothing else sends."""

    def __init__(self, setting: Setting) -> None:
        place = setting.topology
        names = [setting.who(rank) for rank in range(place.size)]
        self.core = _core.MpiEngine(
            setting.bootstrap.communicator, place.rank, names, setting.timeout_s, place.crowded, setting.look
        )
        self.exchange = self.core.exchange

    def close(self) -> None:
        """The communicator is the bootstrap's. What is still under way keeps its buffers."""
        if self.core.close():
            abandon()
