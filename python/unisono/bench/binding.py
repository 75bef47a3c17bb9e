"""A core for each rank, or a share of them, so that no two use one by accident."""

from __future__ import annotations

import os


class Binding:
    """Of the calling thread, which is to make the calls, to a core or several. None: it stays where it may
    run."""

    def __init__(self, core: int | frozenset[int] | None = None) -> None:
        self._all = os.sched_getaffinity(0)
        self._wanted = self._all if core is None else {core} if isinstance(core, int) else set(core)
        self._now = self._all

    @staticmethod
    def core_of(local_rank: int, local_size: int, size: int) -> int | None:
        """Of one rank where all run here and each can have its own."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[local_rank] if local_size == size <= len(cores) else None

    @staticmethod
    def share_of(local_rank: int, local_size: int, size: int) -> frozenset[int] | None:
        """An equal share of the cores for one rank, where all run here and there is one for each."""
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // size
        if local_size != size or share == 0:
            return None
        return frozenset(cores[local_rank * share : (local_rank + 1) * share])

    def bind(self, own_threads: bool, alone: int | None = None) -> None:
        """For the calls of a library: to the rank's core, or to none where the library has threads of its
        own, which the caller would only be in the way of. `alone`: the rank's number among the few that work
        while all others sleep; these can have a core each where not all can."""
        wanted = self._all if own_threads else self._wanted
        if alone is not None and not own_threads and wanted == self._all and alone < len(wanted):
            wanted = {sorted(wanted)[alone]}
        if wanted != self._now:
            os.sched_setaffinity(0, wanted)
            self._now = wanted
