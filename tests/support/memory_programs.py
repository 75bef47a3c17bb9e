"""The programs of ranks in test_memory.py: symmetric memory, limits, and leaks."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import tempfile
from collections.abc import Callable
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


def dozens(count: int) -> dict[str, float]:
    """Returns the KiB that each of many communicators takes here: when made, and what it then maps of any
    memory; after a small call, a message to the next rank, and a large call."""
    whole = unisono.init(timeout_s=50)
    warm = whole.split(0)  # what the process takes once
    before, mapped = _taken_bytes(), _mapped_kib()
    parts = [whole.split(0) for _ in range(count)]
    whole.barrier()
    answer = {"mapped": (_mapped_kib() - mapped) / count}

    def taken(name: str, call: Callable[[unisono.Communicator], Any]) -> None:
        for one in parts:
            assert one is not None
            call(one)
        whole.barrier()
        answer[name] = (_taken_bytes() - before) / count / 1024
        whole.barrier()

    def sum_of(elements: int, algorithm: str) -> Callable[[unisono.Communicator], None]:
        def call(one: unisono.Communicator) -> None:
            total = one.all_reduce(np.ones(elements, F32), algorithm=algorithm)
            assert (total == whole.size).all()

        return call

    taken("made", lambda one: None)
    taken("small", sum_of(3, "one_shot_packets"))
    taken("message", _message_around)
    taken("large", sum_of(100_000, "two_shot"))
    del warm
    return answer


def _message_around(comm: unisono.Communicator) -> None:
    """Sends a message with a tag to the next rank."""
    x, got = np.array([comm.rank], F32), np.empty(1, F32)
    sent = comm.send(x, (comm.rank + 1) % comm.size, tag=3, asynchronous=True)
    comm.recv(got, (comm.rank - 1) % comm.size, tag=3)
    sent.wait()
    assert got[0] == (comm.rank - 1) % comm.size


def _mapped_kib() -> int:
    """Returns what this process has mapped, where a page of several processes counts by its share."""
    return int(Path("/proc/self/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])


def first_calls() -> list[str]:
    """Makes each call, of three sizes, as the first one of a communicator. Returns those that went wrong."""
    whole = unisono.init(timeout_s=50)
    me, n = whole.rank, whole.size
    right, left = (me + 1) % n, (me - 1) % n
    wrong = []
    for count in (2, 3_000, 100_000):
        every = np.stack([np.random.default_rng(r).integers(0, 1000, (n, count), np.int32) for r in range(n)])
        x, total = every[me], every.sum(axis=0, dtype=np.int32)
        parts = [count] * n

        def pair(comm: unisono.Communicator, x: Any = x) -> Any:
            return comm.send_recv(x[0], right, np.empty_like(x[0]), left)

        def batch(comm: unisono.Communicator, x: Any = x) -> Any:
            got = np.empty_like(x[0])
            comm.batch_send_recv([(x[0], right)], [(got, left)])
            return got

        def message(comm: unisono.Communicator, x: Any = x) -> Any:
            got = np.empty_like(x[0])
            sent = comm.send(x[0], right, tag=3, asynchronous=True)
            comm.recv(got, left, tag=3)
            sent.wait()
            return got

        calls: dict[str, tuple[Callable[[unisono.Communicator], Any], Any]] = {
            "all_reduce": (lambda comm, x=x: comm.all_reduce(x), total),
            "reduce": (lambda comm, x=x: comm.reduce(x, root=n - 1), total if me == n - 1 else None),
            "broadcast": (
                lambda comm, x=x: comm.broadcast(x, root=n - 1, out=np.empty_like(x)),
                every[n - 1],
            ),
            "all_gather": (lambda comm, x=x: comm.all_gather(x), every),
            "gather": (lambda comm, x=x: comm.gather(x, root=0), every if me == 0 else None),
            "reduce_scatter": (lambda comm, x=x: comm.reduce_scatter(x), total[me]),
            "scatter": (lambda comm, x=x: comm.scatter(x, root=0), every[0][me]),
            "all_to_all": (lambda comm, x=x: comm.all_to_all(x), every[:, me]),
            "all_to_all_v": (lambda comm, x=x, p=parts: comm.all_to_all_v(x.ravel(), p, p), every[:, me]),
            "send_recv": (pair, every[left][0]),
            "batch_send_recv": (batch, every[left][0]),
            "message": (message, every[left][0]),
        }
        for name, (call, expected) in calls.items():
            comm = whole.split(0)
            assert comm is not None
            for which in ("first", "second"):
                got = call(comm)
                same = got is None if expected is None else np.array_equal(np.ravel(got), np.ravel(expected))
                if not same:
                    wrong.append(f"{which} {name} of {count}")
    return wrong


def no_room_for_rings() -> dict[str, Any]:
    """Makes the first large calls while the machine says that it has no memory left, and after that."""
    whole = unisono.init(timeout_s=20)
    comm, other = whole.split(0), whole.split(0)
    assert comm is not None and other is not None
    small, large = np.ones(2, F32), np.ones(1 << 18, F32)
    got, peer = np.empty_like(large), 1 - whole.rank
    libc = ctypes.CDLL(None, use_errno=True)
    meminfo = b"/proc/meminfo"
    whole.barrier()
    if whole.rank == 0:
        with tempfile.NamedTemporaryFile() as full:
            full.write(b"MemAvailable: 10 kB\n")
            full.flush()
            bind = 4096
            assert libc.mount(full.name.encode(), meminfo, None, bind, None) == 0, ctypes.get_errno()
    whole.barrier()
    answer = {
        "first": attempt(lambda: comm.all_reduce(large, algorithm="two_shot")),
        "small": float(comm.all_reduce(small)[0]),
        "pair": attempt(lambda: other.send_recv(large, peer, got, peer, algorithm="push")),
        "after": attempt(other.barrier),
    }
    whole.barrier()
    if whole.rank == 0:
        assert libc.umount(meminfo) == 0, ctypes.get_errno()
    whole.barrier()
    answer["large"] = float(comm.all_reduce(large, algorithm="two_shot")[-1])
    return answer


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
