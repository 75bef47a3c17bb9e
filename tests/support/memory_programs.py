"""The programs of ranks in test_memory.py: symmetric memory, limits, and leaks."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np

import unisono
from fault_programs import Meeting, attempt

F32 = np.float32


def _fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped_bytes() -> int:
    """Returns the bytes of Unisono's memory files that are mapped here."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:unisono" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            total += end - begin
    return total


def _taken_bytes() -> int:
    """Returns the bytes that this process's own memory files have taken of the machine's memory."""
    files = [one for one in Path("/proc/self/fd").iterdir() if "memfd:unisono" in os.path.realpath(one)]
    return sum(os.stat(one).st_blocks * 512 for one in files)


def limited(limit: str) -> dict[str, Any]:
    """Limits the memory of rank 1 alone. Every rank gets an error, and goes on."""
    comm = unisono.init(timeout_s=20)
    x = np.ones(4, F32)
    before = resource.getrlimit(getattr(resource, limit))
    if comm.rank == 1:
        lowest = {"RLIMIT_FSIZE": 1 << 20, "RLIMIT_NOFILE": 3, "RLIMIT_AS": _vm_bytes() + (32 << 20)}
        resource.setrlimit(getattr(resource, limit), (lowest[limit], before[1]))
    first = attempt(lambda: comm.empty(64 << 20, "u8"))
    if comm.rank == 1:
        resource.setrlimit(getattr(resource, limit), before)
    total = float(comm.all_reduce(x)[0])
    later = comm.empty(64 << 10, F32)
    later[:] = 1
    return {"first": first, "sum": total, "later": float(comm.all_reduce(later)[-1])}


def _vm_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def init_limited(limit: str) -> dict[str, Any]:
    """Calls init with a limit that leaves no room: an error at once, not at the deadline."""
    before = resource.getrlimit(getattr(resource, limit))
    resource.setrlimit(
        getattr(resource, limit), ({"RLIMIT_FSIZE": 4096, "RLIMIT_NOFILE": 3}[limit], before[1])
    )
    try:
        return attempt(lambda: unisono.init(timeout_s=20))
    finally:
        resource.setrlimit(getattr(resource, limit), before)


def too_much(shape: Any, dtype: str) -> dict[str, Any]:
    """Asks for more memory than there is, on every rank, and goes on."""
    comm = unisono.init(timeout_s=20)
    first = attempt(lambda: comm.empty(shape, dtype))
    return {"first": first, "sum": float(comm.all_reduce(np.ones(4, F32))[0])}


def too_much_together() -> dict[str, Any]:
    """Asks for three quarters of the available memory on every rank. Files may not be that long, so that no
    memory is used."""
    comm = unisono.init(timeout_s=20)
    available = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
    mib = Meeting().tell(available * 3 // 4 >> 10)[0]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    first = attempt(lambda: comm.empty(mib << 20, "u8"))
    return {"first": first, "mib": mib, "sum": float(comm.all_reduce(np.ones(4, F32))[0])}


def opens_and_closes(rounds: int) -> dict[str, Any]:
    """Makes and drops communicators and symmetric memory. Returns the process's open files and mapped bytes,
    which must not grow."""
    seen = []
    for _ in range(rounds):
        with unisono.init(timeout_s=20) as comm:
            x, y = comm.empty(10_000, F32), comm.empty((3, 5), "bf16")
            x[:] = comm.rank
            comm.all_reduce(x, out=x)
            y[:] = x[0]
            del x, y
        del comm
        gc.collect()
        seen.append((_fds(), mapped_bytes()))
    return {"first": seen[1], "last": seen[-1]}


def descriptors() -> float:
    """Returns the open files for each symmetric array."""
    comm = unisono.init(timeout_s=20)
    before = _fds()
    arrays = [comm.empty(1, "u8") for _ in range(10)]
    return (_fds() - before) / len(arrays)


def dozens(count: int) -> int:
    """Returns the bytes that each of many communicators takes here."""
    whole = unisono.init(timeout_s=50)
    before = _taken_bytes()
    parts = [whole.split(0) for _ in range(count)]
    for one in parts:
        assert one is not None and one.all_reduce(np.ones(3, F32)).tolist() == [whole.size] * 3
    return (_taken_bytes() - before) // count


def drops() -> dict[str, Any]:
    """Drops symmetric memory in a different order on each rank. Memory is freed once every rank has dropped
    it, and not before.
    """
    comm = unisono.init(timeout_s=20)
    start = mapped_bytes()
    large = [comm.empty(4 << 20, "u8") for _ in range(4)]
    held = mapped_bytes()
    for index in range(4) if comm.rank == 0 else range(3, -1, -1):  # in another order
        large[index] = None
    comm.barrier()
    comm.barrier()  # any call frees dropped memory
    after = mapped_bytes()
    kept = comm.empty(1 << 20, F32)
    kept[:] = comm.rank + 1
    if comm.rank == 0:
        view = kept[10:20]
        del kept
        comm.all_reduce(view, out=view)
        return {"start": start, "held": held, "after": after, "value": float(view[0])}
    view = kept[100:110].copy()
    comm.all_reduce(view, out=view)
    return {"start": start, "held": held, "after": after, "value": float(view[0])}


def outlives() -> float:
    """Uses symmetric memory after its communicator is closed and gone."""
    comm = unisono.init(timeout_s=20)
    x = comm.empty(1 << 20, F32)
    x[:] = comm.rank + 1
    comm.all_reduce(x, out=x)
    comm.close()
    del comm
    gc.collect()
    Meeting().tell()  # the other has closed too
    x += 1
    return float(x.sum()) / x.size


def without_shared_memory_files() -> dict[str, Any]:
    """Returns the free bytes in /dev/shm, and a sum over more symmetric memory than that."""
    comm = unisono.init(timeout_s=20)
    x = comm.empty(8 << 20, F32)
    x[:] = 1
    comm.all_reduce(x, out=x)
    stat = os.statvfs("/dev/shm")
    return {"free": stat.f_bavail * stat.f_frsize, "sum": float(x[-1]), "files": os.listdir("/dev/shm")}
