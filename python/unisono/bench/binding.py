"""Binds each rank to a core, or to a share of the cores, so that no two ranks share one by accident."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path


@cache
def siblings(cpu: int) -> str:
    """Returns the hyperthreads of the CPU's physical core; the CPU itself if the system does not say."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def by_core(cpus: Iterable[int]) -> list[list[int]]:
    """Returns the CPUs of each physical core."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(siblings(cpu), []).append(cpu)
    return list(cores.values())


def spread(cpus: Iterable[int]) -> list[int]:
    """Returns one CPU of each physical core, then a second of each, and so on."""
    return [cpu for turn in zip_longest(*by_core(cpus)) for cpu in turn if cpu is not None]


def parse_cpulist(text: str) -> frozenset[int]:
    """Returns the CPUs of the kernel's list format: "0-2,8" -> {0, 1, 2, 8}."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


class Binding:
    """Binds the calling thread, which makes the calls, to one or several cores. None: no binding."""

    def __init__(self, core: int | frozenset[int] | None = None) -> None:
        self._all = os.sched_getaffinity(0)
        self._wanted = self._all if core is None else {core} if isinstance(core, int) else set(core)
        self._now = self._all

    @property
    def allowed(self) -> frozenset[int]:
        """Returns the cores on which the thread could run before it was bound."""
        return frozenset(self._all)

    @staticmethod
    def core_of(local_rank: int, local_size: int, size: int) -> int | None:
        """Returns the core of one rank, or None if not all ranks run here or there are too few CPUs. Ranks
        share a physical core, by its hyperthreads, only if there are more ranks than cores."""
        cores = spread(os.sched_getaffinity(0))
        return cores[local_rank] if local_size == size <= len(cores) else None

    @staticmethod
    def share_of(
        local_rank: int, local_size: int, size: int, near: Sequence[frozenset[int]] = ()
    ) -> frozenset[int] | None:
        """Returns one rank's equal share of the CPUs, or None if not all ranks run here or CPUs are too few.

        Shares are whole cores as far as possible. `near`: the CPUs close to each rank's GPU. A share lies
        among those if they are enough for all ranks that have the same."""
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
        """Binds the thread to the rank's core, or to none if the library's own threads need the core.

        `alone`: the rank's number among the few that work while all others sleep. These get a core each even
        if there are too few cores for all ranks."""
        wanted = self._all if own_threads else self._wanted
        if alone is not None and not own_threads and wanted == self._all and alone < len(wanted):
            wanted = {spread(wanted)[alone]}
        if wanted != self._now:
            os.sched_setaffinity(0, wanted)
            self._now = wanted
