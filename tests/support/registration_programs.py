"""The programs of test_registration.py: arrays that ranks register, on every lane."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono
from body import Bytes, Report, UnisonoSubject, _plain, run
from cases import Work
from fault_programs import Meeting, attempt, wait_for_end
from unisono import traits
from worker import _works

F32 = np.float32


class RegisteredSubject(UnisonoSubject):
    """Unisono of whose memory the contract's symmetric part is registered instead."""

    def __init__(self, unchecked: Any, checked: Any) -> None:
        super().__init__(unchecked, checked)
        self._registered = _plain()
        for comm in (unchecked, checked):
            for region in self._registered:
                comm.register(region)

    def memory(self, work: Work) -> tuple[Bytes, Bytes]:
        return self._registered


def _runs(work: Work, lane: str) -> bool:
    """Whether a call of symmetric memory runs on registered memory."""
    if work.case.memory != "symmetric" or work.algorithm is None or lane in ("host", "nodes"):
        return work.case.memory == "symmetric"
    how = traits.algorithm(work.algorithm)
    if lane == "host-staged":
        return not how.direct
    stores = work.algorithm == "direct" and traits.collective(work.case.collective).stores_only
    return how.pieces == "chunks" and (stores or not how.direct)


def contract(lane: str, step: int) -> dict[str, Any]:
    """Every `step`-th call of the contract's matrix on symmetric memory, on registered memory instead."""
    unchecked = unisono.init(timeout_s=60, check=False)
    checked = unisono.init(timeout_s=60, check=True)
    report = Report()
    works = [work for work in _works(unchecked) if _runs(work, lane)][::step]
    run(works, RegisteredSubject(unchecked, checked), report)
    return {"calls": sum(report.done.values()), "words": report.words}


class Owned(np.ndarray):
    """An array that tells of its end by a weak reference."""


def owned(count: int, value: float) -> Any:
    return np.full(count, value, F32).view(Owned)


def life() -> list[dict[str, Any]]:
    """Registrations from begin to end, and again: what calls on them gave, and whether the arrays lived."""
    return [_life(unisono.init(timeout_s=20, check=check)) for check in (False, True)]


def _life(comm: unisono.Communicator) -> dict[str, Any]:
    n, me = comm.size, comm.rank
    told: dict[str, Any] = {"wrong": [], "alive": [], "gone": []}
    for times in range(3):
        x = owned(n * 50_000, me + times)
        kept = weakref.ref(x)
        if times == 1:
            x.flags.writeable = False
        registration = comm.register(x)
        out = comm.all_to_all(x[: 40 * n].reshape(n, 40))
        expected = np.repeat(np.arange(n, dtype=F32) + times, 40).reshape(n, 40)
        if not np.array_equal(out, expected):
            told["wrong"].append(times)
        total = comm.all_reduce(x[7:])
        if not (total == sum(range(n)) + n * times).all():
            told["wrong"].append(times)
        del x
        gc.collect()
        told["alive"].append(kept() is not None)
        told["bytes"] = registration.nbytes
        registration.close()
        registration.close()
        gc.collect()
        told["gone"].append(kept() is None and registration.closed)
    return told


def ends(ways: list[str]) -> dict[str, Any]:
    """An array is kept although the handle is dropped, until the communicator is gone, which the handle of a
    registration that has ended does not keep."""
    return {how: _ends(how, unisono.init(timeout_s=20)) for how in ways}


def _ends(how: str, comm: unisono.Communicator) -> dict[str, bool]:
    ended = comm.register(owned(10, 1))
    ended.close()
    x = owned(1000, 1)
    kept = weakref.ref(x)
    registration = comm.register(x)
    del x
    if how == "dropped":
        del registration
    gc.collect()
    alive = kept() is not None
    comm.all_reduce(np.ones(3, F32))
    comm.close()
    if how == "closed late":
        assert registration.closed
        registration.close()
        registration.close()
        gc.collect()
        return {"alive": alive, "gone": kept() is None}
    if how == "handle last":
        del comm
        gc.collect()
        alive = alive and kept() is not None and registration.closed
        del registration
    else:
        del comm
    gc.collect()
    return {"alive": alive, "gone": kept() is None}


def one_is_wrong(check: bool) -> dict[str, Any]:
    """The last rank registers what cannot be; every rank hears why, and goes on."""
    comm = unisono.init(timeout_s=20, check=check)
    last = comm.rank == comm.size - 1
    good = np.ones(64, F32)
    bad = {
        "strides": good.reshape(8, 8)[:, :4],
        "nothing": None,
        "complex": good.astype(np.complex128),
        "shorter": good[:-1],
        "empty": good[:0],
    }
    said = {}
    for name, wrong in bad.items():
        said[name] = attempt(lambda wrong=wrong: comm.register(wrong if last else good)).get("error")
        with comm.register(good):
            said[name]["sum"] = float(comm.all_reduce(good)[0])
    return said


def overlaps() -> list[str]:
    """What is said of memory that overlaps, and of memory that is symmetric anyway."""
    comm = unisono.init(timeout_s=20)
    x = np.ones(100, F32)
    symmetric = comm.empty(100, F32, device="cpu")
    said = []
    with comm.register(x[20:40]), comm.register(x[40:60]):
        for other in (x, x[39:41], x[20:40], x[:21], symmetric, symmetric[50:]):
            said.append(attempt(lambda other=other: comm.register(other))["error"]["text"])
        with comm.register(x[:20]), comm.register(x[60:]), comm.register(x[30:30]):
            comm.barrier()
    return said


def other_calls(whats: list[str], check: bool) -> list[dict[str, Any]]:
    """Rank 0 registers, or closes, while the others make another call."""
    return [_other_calls(what, unisono.init(timeout_s=10, check=check)) for what in whats]


def _other_calls(what: str, comm: unisono.Communicator) -> dict[str, Any]:
    x, y = np.ones(1000, F32), np.ones(1000, F32)
    first, second = comm.register(x), comm.register(y)
    Meeting().tell(0)  # a rank that is still registering would fail there
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "empty": (lambda: comm.register(np.ones(10, F32)), lambda: comm.empty(10, F32)),
        "barrier": (lambda: comm.register(np.ones(10, F32)), comm.barrier),
        "other": (first.close, second.close),
        "close": (first.close, lambda: comm.all_reduce(x[:4])),
    }
    call = attempt(calls[what][0 if comm.rank == 0 else 1])
    return {"first": call, "again": attempt(lambda: comm.all_reduce(x))}


def peer_dies() -> dict[str, Any]:
    """The last rank dies before it closes: the others' close says so, and has ended the registration here."""
    comm = unisono.init(timeout_s=20)
    meeting = Meeting()
    x = owned(1000, 1)
    kept = weakref.ref(x)
    registration = comm.register(x)
    del x
    pids = meeting.tell(os.getpid())
    if comm.rank == comm.size - 1:
        os._exit(0)
    wait_for_end(pids[-1])
    first = attempt(registration.close)
    gc.collect()
    return {"first": first, "gone": kept() is None, "again": attempt(registration.close)}


def block_raises() -> dict[str, Any]:
    """One rank leaves a block by an exception: it waits for nobody, and the other learns that it has left."""
    comm = unisono.init(timeout_s=20)

    def block() -> None:
        with comm, comm.register(np.ones(10, F32)):
            if comm.rank == 0:
                raise KeyError("mine")

    return attempt(block)


def child() -> dict[str, Any]:
    """A forked child is none of the ranks; the parent goes on."""
    comm = unisono.init(timeout_s=20)
    x = np.ones(1000, F32)
    registration = comm.register(x)
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        said = [attempt(lambda: comm.register(np.ones(3, F32))), attempt(registration.close)]
        os.write(write, "\n".join(one["error"]["text"] for one in said).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(read, 4000).decode()
    total = float(comm.all_reduce(x)[0])
    registration.close()
    return {"child": text, "sum": total}


def direct() -> dict[str, Any]:
    """On the fabric: calls that write straight into registered arrays, before, during and after."""
    comm = unisono.init(timeout_s=20)
    n, me = comm.size, comm.rank
    pool, y = np.zeros((3, n, 30_000), F32), np.zeros((n, 30_000), F32)
    x, out = pool[1], pool[2]
    x[:] = 10 * me + np.arange(n)[:, None]

    def call() -> None:
        comm.all_to_all(x, out=out, algorithm="direct")
        assert (out[:, :] == 10 * np.arange(n)[:, None] + me).all()
        comm.all_gather(x[0], out=out, algorithm="direct")
        assert (out[:, :] == 10 * np.arange(n)[:, None]).all()
        comm.gather(x[0], 0, out=out, algorithm="direct")

    told = {"before": attempt(call)}
    with comm.register(pool), comm.register(y):
        told["during"] = attempt(call)
        told["mixed"] = attempt(lambda: comm.all_to_all(x, out=comm.empty(x.shape, F32), algorithm="direct"))
        told["across"] = attempt(lambda: comm.all_to_all(x, out=y, algorithm="direct"))
    told["after"] = attempt(call)
    pool[0] = 5  # it may be freed, and registered again
    with comm.register(pool[1:]):
        told["again"] = attempt(call)
    return told


def many(rounds: int) -> int:
    """Arrays that come and go, at addresses that others had: how many exchanges were wrong."""
    comm = unisono.init(timeout_s=20)
    n, me = comm.size, comm.rank
    rng = np.random.default_rng(5)
    held: list[tuple[Any, Any]] = []
    wrong = 0
    for step in range(rounds):
        if held and rng.random() < 0.5:
            array, registration = held.pop(rng.integers(len(held)))
            registration.close()
            del array, registration
        size = int(rng.integers(1, 30_000))
        pair = np.zeros((2, n, size), F32)
        held.append((pair, comm.register(pair)))
        pair = held[int(rng.integers(len(held)))][0]
        pair[0] = n * me + np.arange(n)[:, None] + step
        comm.all_to_all(pair[0], out=pair[1])
        wrong += not (pair[1] == n * np.arange(n)[:, None] + me + step).all()
    return wrong
