"""The programs of ranks in test_communicator.py, test_arrays.py and test_soak.py."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import unisono
from fault_programs import Meeting, attempt
from repeating import Repeating
from soak import Soak
from unisono import launch, traits
from unisono.bench import tune
from unisono.bench.backends import base
from unisono.bench.cases import make_case
from unisono.records.vocabulary import COLLECTIVES

F32 = np.float32


def who() -> list[Any]:
    """Returns this rank's place, and the sum of all ranks."""
    with unisono.init() as comm:
        total = comm.all_reduce(np.array([comm.rank, 1], np.int64))
        return [comm.rank, comm.size, total.tolist(), comm.closed]


def supported(reach: bool) -> list[str]:
    """Returns where the bench's backend or the plan contradicts `reach`: whether ranks reach plain memory."""
    wrong = []
    with unisono.init() as comm:
        for name in tune.variants(tune.tunable()):
            backend = base.load(name)
            backend.setup(base.Ranks(comm.rank, comm.size, lambda data: [data], comm))
            algorithm = name.partition(":")[2]
            direct = bool(algorithm) and traits.algorithm(algorithm).direct
            for collective, memory in itertools.product(COLLECTIVES, ("plain", "symmetric")):
                why = backend.supports(make_case(collective, 64, "f32", 2, memory=memory))
                runs = algorithm in comm.algorithms(collective) and (
                    reach or memory == "symmetric" or not direct
                )
                wrong += [f"{name}, {collective}, {memory}: {why}"] if (why is None) != runs else []
        for collective in ("all_reduce", "all_gather", "send_recv"):
            planned = traits.algorithm(comm.plan(collective, 1 << 30))
            wrong += [f"{collective} is planned by {planned.name}"] if planned.direct != reach else []
    return wrong


def quantised() -> str:
    """Returns a digest of quantised sums."""
    digest = hashlib.sha256()
    with unisono.init(timeout_s=20, check=True) as comm:
        rng = np.random.default_rng(comm.rank)
        for dtype in (F32, np.float16, ml_dtypes.bfloat16):
            x = (rng.standard_normal(40_001) * 100).astype(dtype)
            for wire in ("fp8", "int8"):
                for op in ("sum", "avg"):
                    digest.update(comm.all_reduce(x, op, wire=wire).tobytes())
    return digest.hexdigest()


def several() -> list[float]:
    """Uses several communicators in turn, and closes them in another order."""
    comms = [unisono.init(timeout_s=20) for _ in range(4)]
    sums = [0.0] * 4
    for turn in range(40):
        index = turn * 3 % 4
        x = np.full(1000 * index + 1, turn + index, F32)
        sums[index] += float(comms[index].all_reduce(x)[-1])
    comms[2].close()
    sums[3] += float(comms[3].all_reduce(np.ones(1, F32))[0])
    comms[0].close()
    sums[1] += float(comms[1].all_reduce(np.ones(1, F32))[0])
    return sums


def barrier_holds() -> list[bool]:
    """Returns, for each rank as the last to come, whether all left the barrier after it came."""
    comm = unisono.init(timeout_s=20)
    meeting, held = Meeting(), []
    for last in range(comm.size):
        meeting.tell()
        if comm.rank == last:
            time.sleep(0.05)
            came = time.monotonic()
        else:
            came = 0.0
        comm.barrier()
        left = time.monotonic()
        everyone = meeting.tell([came, left])
        held.append(all(one[1] >= everyone[last][0] for one in everyone))
    return held


def other_threads_run() -> float:
    """Waits in small calls of rank 0 for rank 1, which comes once another thread of rank 0 has run."""
    comm = unisono.init(timeout_s=20)
    meeting = Meeting()
    x, out = np.ones(2, F32), np.zeros(2, F32)

    def meet(zero: Callable[[], Any], one: Callable[[], Any]) -> None:
        if comm.rank == 1:
            meeting.tell()
            one()
            return
        enters = threading.Event()

        def tell() -> None:
            enters.wait()
            meeting.tell()

        other = threading.Thread(target=tell)
        other.start()
        enters.set()
        zero()
        other.join()

    def add() -> Any:
        return comm.all_reduce(x, out=out)

    def send_and_add() -> None:
        comm.send(x, 0)
        add()

    for call in (comm.barrier, add, comm.bind.all_reduce(x, out=out)):
        meet(call, call)
    meet(lambda: comm.recv(out, 1), lambda: comm.send(x, 0))
    begun = comm.recv(out, 1, asynchronous=True) if comm.rank == 0 else None
    meet(add, send_and_add)  # waits for its turn
    if begun:
        begun.wait()
    return float(out[0])


def deadline_of_the_environment() -> dict[str, Any]:
    """Waits with UNISONO_TIMEOUT_S as the deadline, since timeout_s is not passed."""
    meeting = Meeting()
    meeting.tell()  # waits for all to start, which the short deadline is not for
    comm = unisono.init()
    meeting.tell()
    began = time.monotonic()
    tried = attempt(comm.barrier) if comm.rank == 0 else None
    waited = time.monotonic() - began
    meeting.tell()
    return {"tried": tried, "waited": waited}


def sends_before_receives() -> bool:
    """Sends a small message, which returns before its receive, and others, which arrive in order."""
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    sizes = [0, 1, 13, 14, 15, 1000, 16384, 16385, 300_000, 3, 1_000_000, 7]
    if comm.rank == 0:
        comm.send(np.arange(100, dtype=F32), 1)
        meeting.tell()  # the receiver has not called yet
        for index, size in enumerate(sizes):
            comm.send(np.full(size, index, F32), 1)
        return True
    meeting.tell()
    fine = bool((comm.recv(np.zeros(100, F32), 0) == np.arange(100)).all())
    for index, size in enumerate(sizes):
        fine = fine and bool((comm.recv(np.zeros(size, F32), 0) == index).all())
    return fine


def rings(algorithm: str | None) -> bool:
    """Sends rings in both directions, between pairs and to the rank itself, with every size that matters."""
    comm = unisono.init(timeout_s=30)
    n, rank, fine = comm.size, comm.rank, True
    for size in (0, 1, 13, 14, 15, 1791, 1792, 1793, 4096, 16383, 16384, 16385, 200_001):
        for step in (1, n - 1, n // 2):
            x = np.arange(size, dtype=np.int32) + 1000 * rank
            to, source = (rank + step) % n, (rank - step) % n
            got = comm.send_recv(x, to, None, source, algorithm=algorithm)
            fine = fine and bool((got == np.arange(size, dtype=np.int32) + 1000 * source).all())
    if n % 2 == 0:
        partner = rank ^ 1
        out = np.zeros((2, 50_000))
        comm.send_recv(np.full((2, 50_000), rank, np.float64), partner, out, partner, algorithm=algorithm)
        fine = fine and bool((out == partner).all())
    return fine


def batches() -> list[str]:
    """Sends messages of many sizes to every rank, to some, and between two ranks. Returns the wrong ones."""
    wrong = []
    sizes = (0, 1, 13, 1792, 1793, 16384, 16385, 70_000, 300_001)
    with unisono.init(timeout_s=30) as comm:
        n, me = comm.size, comm.rank
        choices = (lambda a, b: True, lambda a, b: (a + 2 * b) % 3 == 0, lambda a, b: a + b == n - 1)
        for turn, goes in ((turn, goes) for turn in range(len(sizes)) for goes in choices):

            def message(source: int, to: int, turn: int = turn) -> Any:
                size = sizes[(3 * source + 5 * to + turn) % len(sizes)]
                return np.arange(size).astype(("u1", "f4", "f8")[(source + to) % 3]) + source

            sends = [(message(me, p), p) for p in range(n) if goes(me, p)]
            recvs = [(np.zeros_like(message(p, me)), p) for p in range(n) if goes(p, me)]
            comm.batch_send_recv(sends, recvs)
            wrong += [
                f"{p} to {me}, turn {turn}" for out, p in recvs if not np.array_equal(out, message(p, me))
            ]
    return wrong


def beyond_2_to_31(dtype: str) -> list[int]:
    """Makes an all_gather and a broadcast of 2^31 + 5 elements of one byte. Returns those at the ends, and
    those at which 32 bits would wrap.
    """
    comm = unisono.init(timeout_s=120)
    half = (1 << 30) + 3
    out = np.empty((2, half), dtype)
    out[comm.rank] = 0
    marks = [0, 1, (1 << 30) - 1, 1 << 30, half - 1]
    for mark in marks:
        out[comm.rank, mark] = 10 * (comm.rank + 1) + marks.index(mark)
    comm.all_gather(out[comm.rank], out=out)
    seen = [int(out[row, mark]) for row in (0, 1) for mark in marks]
    flat = out.reshape(-1)[: (1 << 31) + 5]
    if comm.rank == 0:
        flat[-1], flat[(1 << 31) - 1], flat[1 << 31] = 77, 78, 79
    comm.broadcast(flat)
    return [*seen, int(flat[-1]), int(flat[(1 << 31) - 1]), int(flat[1 << 31])]


def large_gathers() -> list[str]:
    """Gathers large blocks, which the root reads in part itself, also in place. Returns the wrong calls."""
    wrong = []
    with unisono.init(timeout_s=60) as comm:
        n, me, count = comm.size, comm.rank, (5 << 20) + 13
        whole = [np.random.default_rng(rank).integers(0, 256, count, np.uint8) for rank in range(n)]
        for root in range(n):
            for in_place in (False, True):
                out = np.zeros((n, count), np.uint8)
                x = out[me] if in_place and me == root else np.empty(count, np.uint8)
                x[:] = whole[me]
                got = comm.gather(x, root, out if me == root else None, algorithm="direct")
                if me == root and not all(np.array_equal(got[r], whole[r]) for r in range(n)):
                    wrong.append(f"to {root}, {in_place=}")
    return wrong


def soak(calls: int, seed: int) -> dict[str, Any]:
    """Makes `calls` mixed calls, and checks each."""
    with unisono.init(timeout_s=60, check=False) as comm:
        return Soak(comm, seed).run(calls)


def repeating(calls: int, seed: int) -> dict[str, Any]:
    """Makes `calls` calls, many of them repeated, and checks each."""
    with unisono.init(timeout_s=60) as comm:
        return Repeating(comm, seed).run(calls)


def kernel_copies() -> list[str]:
    """Returns what a communicator, and one split from it, say of the kernel's copies."""
    with unisono.init(timeout_s=20) as comm, comm.split(0) as some:
        return [comm.kernel_copies, some.kernel_copies]


def planned(table_of_rank: list[str] | None = None) -> str:
    """Returns the plan's algorithm for a small all_reduce. table_of_rank: each rank's own UNISONO_PLAN."""
    if table_of_rank:
        os.environ["UNISONO_PLAN"] = table_of_rank[launch.from_env(os.environ).rank]
    with unisono.init(timeout_s=20) as comm:
        return comm.plan("all_reduce", 8)
