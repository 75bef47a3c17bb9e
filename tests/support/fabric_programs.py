"""The programs of ranks in test_fabric.py, as in fault_programs.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono
from fault_programs import FLOATS, Meeting, attempt, last_is_killed
from unisono import bootstrap, launch


def _calls(comm: unisono.Communicator, count: int, seed: int) -> dict[str, Callable[[], Any]]:
    """Returns, by name, calls of every collective on random data of about `count` elements. Each call returns
    this rank's result."""
    n, me = comm.size, comm.rank
    data = np.random.default_rng([seed, me])
    x = data.standard_normal(count).astype(FLOATS)
    blocks = data.standard_normal((n, count)).astype(FLOATS)
    root = seed % n
    sends = [(me * 3 + p * 5 + seed) % 4 * count // 3 for p in range(n)]
    receives = [(p * 3 + me * 5 + seed) % 4 * count // 3 for p in range(n)]
    parts = data.standard_normal(sum(sends)).astype(FLOATS)

    def in_place(name: str, array: Any) -> Any:
        copy = array.copy()
        getattr(comm, name)(copy, out=copy)
        return copy

    def batch() -> Any:
        outs = [np.zeros(1 + 1000 * (p + 2 * me), np.uint8) for p in range(n)]
        messages = [(np.full(1 + 1000 * (me + 2 * p), 7 * me + p, np.uint8), p) for p in range(n)]
        comm.batch_send_recv(messages, [(out, p) for p, out in enumerate(outs)])
        return np.concatenate(outs)

    return {
        "batch_send_recv": batch,
        "all_reduce": lambda: comm.all_reduce(x, "avg"),
        "all_reduce in place": lambda: in_place("all_reduce", x),
        "reduce": lambda: comm.reduce(x, root, "max"),
        "broadcast": lambda: comm.broadcast(x.copy(), root),
        "all_gather": lambda: comm.all_gather(x),
        "gather": lambda: comm.gather(x, root),
        "reduce_scatter": lambda: comm.reduce_scatter(blocks, "prod"),
        "scatter": lambda: comm.scatter(blocks, root),
        "all_to_all": lambda: comm.all_to_all(blocks),
        "all_to_all in place": lambda: in_place("all_to_all", blocks),
        "all_to_all_v": lambda: comm.all_to_all_v(parts, sends, receives),
        "send_recv": lambda: comm.send_recv(x, (me + 1) % n, None, (me - 1) % n),
    }


def rest(provider: str, calls: int) -> list[int]:
    """Makes calls with a pause of the fabric between them. Returns those with a wrong result."""
    meet = lambda: bootstrap.make(launch.from_env(os.environ), timeout_s=60)  # noqa: E731
    host = unisono.init(bootstrap=meet(), timeout_s=60, lane="host")
    lane = unisono.Fabric(provider, channels=3)
    wrong = []
    with unisono.init(bootstrap=meet(), timeout_s=10, lane=lane) as comm:
        blocks, out = (comm.empty((comm.size, 1 << 18), "u8") for _ in range(2))
        for call in range(calls):
            bytes_ = 1 << (10 + call * 7 % 9)
            x, y = (
                buffer.reshape(-1)[: comm.size * bytes_].reshape(comm.size, -1) for buffer in (blocks, out)
            )
            x[:] = np.arange(comm.size)[:, None] + comm.size * comm.rank + call
            comm.all_to_all(x, out=y)
            expected = (comm.rank + comm.size * np.arange(comm.size)[:, None] + call).astype(np.uint8)
            if not np.array_equal(y, np.broadcast_to(expected, y.shape)):
                wrong.append(call)
            host.barrier()
    return wrong


def slow_root() -> None:
    """The other ranks leave before the root hears that its credit has reached them. The root cannot wait for
    their leaving, since their writes arrive only by its calls. The root is late instead, and any delay
    passes.
    """
    comm = unisono.init(timeout_s=20, lane="fabric")
    for value in range(8):
        if comm.rank == 0 and value % 2 == 0:
            time.sleep(0.2)
        got = comm.gather(np.full(100, value, np.uint8))
        assert comm.rank or (got == value).all()


def allocations(calls: int) -> list[int]:
    """Makes all_to_alls, each on new memory. Returns those with a wrong result."""
    comm, wrong = unisono.init(timeout_s=30), []
    for call in range(calls):
        x, out = (comm.empty((comm.size, 64), FLOATS) for _ in range(2))
        x[:] = comm.rank + call
        comm.all_to_all(x, out=out)
        if not (out == np.arange(comm.size)[:, None] + call).all():
            wrong.append(call)
    return wrong


def same_bits(provider: str) -> dict[str, Any]:
    """Makes every collective on both lanes, by every policy. Returns the calls whose bytes differ."""
    meet = lambda: bootstrap.make(launch.from_env(os.environ), timeout_s=60)  # noqa: E731
    host = unisono.init(bootstrap=meet(), timeout_s=60, lane="host")
    different, calls = [], 0
    slow = provider not in ("shm", "tcp")
    for policy, channels in (("single", 1), ("multi", 3), ("round-robin", 2)):
        lane = unisono.Fabric(provider, channels=channels, policy=policy)
        comm = unisono.init(bootstrap=meet(), timeout_s=60, lane=lane)
        for seed, count in enumerate((1, 3, 1000, 16385, *(() if slow else (300_001,)))):
            theirs = _calls(host, count, seed)
            for name, call in _calls(comm, count, seed).items():
                calls += 1
                mine, expected = call(), theirs[name]()
                if (mine is None) != (expected is None) or (
                    mine is not None and mine.tobytes() != expected.tobytes()
                ):
                    different.append(f"{name} of {count}, {policy}")
        comm.close()
    return {"different": different, "calls": calls}


def killed_in_writes(seconds: float) -> dict[str, Any]:
    """Kills the last rank while all write to registered memory of all."""
    comm = unisono.init(timeout_s=30)
    meeting = Meeting()
    x = comm.empty((comm.size, 1 << 20), FLOATS)
    out = comm.empty((comm.size, 1 << 20), FLOATS)
    x[:] = 1
    death = last_is_killed(comm, meeting, seconds)

    def stream() -> None:
        while True:
            comm.all_to_all(x, out, algorithm="direct")

    return {**death, "first": attempt(stream), "again": [attempt(comm.barrier)]}


def other_channels(provider: str) -> None:
    """Begins a communicator for which rank 1 has another number of channels."""
    rank = launch.from_env(os.environ).rank
    unisono.init(timeout_s=20, lane=unisono.Fabric(provider, channels=1 + rank))
