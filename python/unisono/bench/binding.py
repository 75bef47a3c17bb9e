"""A core for each rank, or a share of them, so that no two use one by accident."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path


@cache
def siblings(cpu: int) -> str:
    """The hyperthreads of its physical core; of a CPU that does not tell, itself."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def by_core(cpus: Iterable[int]) -> list[list[int]]:
    """The CPUs of each physical core."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(siblings(cpu), []).append(cpu)
    return list(cores.values())


def spread(cpus: Iterable[int]) -> list[int]:
    """One CPU of each physical core, then a second of each, and so on."""
    return [cpu for turn in zip_longest(*by_core(cpus)) for cpu in turn if cpu is not None]


def parse_cpulist(text: str) -> frozenset[int]:
    """CPUs as the kernel lists them: "0-2,8" -> {0, 1, 2, 8}."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


class Binding:
    """Of the calling thread, which is to make the calls, to a core or several. None: it stays where it may
    run."""

    def __init__(self, core: int | frozenset[int] | None = None) -> None:
        self._all = os.sched_getaffinity(0)
        self._wanted = self._all if core is None else {core} if isinstance(core, int) else set(core)
        self._now = self._all

    @property
    def allowed(self) -> frozenset[int]:
        """The cores that the thread might run on before it was bound."""
        return frozenset(self._all)

    @staticmethod
    def core_of(local_rank: int, local_size: int, size: int) -> int | None:
        """Of one rank where all run here and each can have its own: hyperthreads of one core only where there
        are more ranks than cores."""
        cores = spread(os.sched_getaffinity(0))
        return cores[local_rank] if local_size == size <= len(cores) else None

    @staticmethod
    def share_of(
        local_rank: int, local_size: int, size: int, near: Sequence[frozenset[int]] = ()
    ) -> frozenset[int] | None:
        """An equal share of the cores for one rank, whole ones as far as there are, where all ranks run here
        and there is one for each. `near`: the CPUs close to each rank's GPU, among which its share lies where
        they are enough for all ranks that have the same."""
        usable = frozenset(os.sched_getaffinity(0))
        among = [usable & cpus for cpus in near]
        enough = all(len(cpus) >= among.count(cpus) for cpus in among)
        distinct = sum(map(len, set(among))) == len(frozenset().union(*among))
        if len(among) != size or not enough or not distinct:
            among = [usable] * size
        if local_size != size or len(usable) < size:
            return None
        cpus = among[local_rank]
        share = len(cpus) // among.count(cpus)
        begin = among[:local_rank].count(cpus) * share
        return frozenset(list(chain(*by_core(cpus)))[begin : begin + share])

    def bind(self, own_threads: bool, alone: int | None = None) -> None:
        """For the calls of a library: to the rank's core, or to none where the library has threads of its
        own, which the caller would only be in the way of. `alone`: the rank's number among the few that work
        while all others sleep; these can have a core each where not all can."""
        wanted = self._all if own_threads else self._wanted
        if alone is not None and not own_threads and wanted == self._all and alone < len(wanted):
            wanted = {spread(wanted)[alone]}
        if wanted != self._now:
            os.sched_setaffinity(0, wanted)
            self._now = wanted
