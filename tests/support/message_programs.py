"""Programs of ranks with messages with tags, and with communicators of some ranks, for `ranks.play`."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

import unisono
from fault_programs import Meeting, attempt
from node_programs import layout


def messages(nodes: str = "") -> list[object]:
    """A ring of messages of all sizes, received in the reverse order of their tags. Returns what is wrong."""
    layout(nodes)
    wrong: list[object] = []
    with unisono.init() as comm:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        counts = (0, 1, 5000, 300_001)
        sends = [
            comm.send(np.full(n, comm.rank + tag, np.float64), right, tag=tag, asynchronous=True)
            for tag, n in enumerate(counts)
        ]
        total = comm.all_reduce(np.ones(3))  # passes by them
        for tag, n in reversed(list(enumerate(counts))):
            out = np.zeros(n + 1)
            received = comm.recv(out, left, tag=tag)
            if not (received.array is out and (received.source, received.nbytes) == (left, 8 * n)):
                wrong.append((tag, repr(received)))
            if (out[:n] != left + tag).any() or out[n] != 0 or total[0] != comm.size:
                wrong.append((tag, out))
        for work in sends:
            work.wait()
        comm.barrier(timeout_s=50)
        anyone = unisono.ANY_SOURCE
        rounds = 30
        both = [comm.send(np.full(i + 1, i), right, tag=5 + i % 2, asynchronous=True) for i in range(rounds)]
        for tag in (6, 5):  # each in the order of its sends
            for i in range(tag - 5, rounds, 2):
                received = comm.recv(np.zeros(rounds, np.int64), anyone, tag=tag)
                if (received.source, received.nbytes, received.array[i]) != (left, 8 * (i + 1), i):
                    wrong.append((tag, i, repr(received)))
        for work in both:
            work.wait()
        receives = [comm.recv(np.zeros(1), anyone, tag=9, asynchronous=True) for _ in range(comm.size)]
        for r in range(comm.size):
            comm.send(np.zeros(1), r, tag=9)
        sources = sorted(work.wait().source for work in receives)
        if sources != list(range(comm.size)):
            wrong.append(sources)
        comm.barrier()
    return wrong


def large(nodes: str = "") -> list[object]:
    """A ring of large messages from memory of every kind, of one source and of any. Returns what is wrong."""
    layout(nodes)
    n = 3_000_001
    wrong: list[object] = []
    with unisono.init() as comm:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        memory = {
            "small pages": np.frombuffer(mmap.mmap(-1, n), np.uint8),
            "huge pages": np.empty(8 << 20, np.uint8)[1 : n + 1],
            "symmetric": comm.empty(n, np.uint8),
        }
        for tag, (kind, x) in enumerate(memory.items()):
            x[:] = np.random.default_rng((comm.rank, tag)).integers(0, 256, n)
            expected = np.random.default_rng((left, tag)).integers(0, 256, n)
            for source in (left, unisono.ANY_SOURCE):
                out = np.zeros(n + 1, np.uint8)
                sent = comm.send(x, right, tag=tag, asynchronous=True)
                received = comm.recv(out, source, tag=tag)
                sent.wait()
                if received.source != left or (out[:n] != expected).any() or out[n]:
                    wrong.append((kind, source, repr(received)))
            comm.barrier()
    return wrong


def borders(nodes: str = "") -> list[object]:
    """Messages around the most that travels at once by any transport, and longer, all of every pair of ranks
    under way at once, with crossing tags. Returns what is wrong."""
    layout(nodes)
    sizes = (4000, 4001, 16_312, 16_313, 65_536, 65_537, 131_000, 131_001, (1 << 20) + 7, 5_000_003)
    wrong: list[object] = []
    with unisono.init() as comm:
        others = [r for r in range(comm.size) if r != comm.rank]

        def content(source: int, to: int, number: int) -> np.ndarray[Any, Any]:
            return np.random.default_rng((source, to, number)).integers(0, 256, sizes[number], np.uint8)

        def send() -> list[unisono.Work]:
            return [
                comm.send(content(comm.rank, r, i), r, tag=i // 2, asynchronous=True)
                for r in others
                for i in range(len(sizes))
            ]

        for source in (None, unisono.ANY_SOURCE):
            works = send() if comm.rank % 2 else []  # the others have receives first
            receives = [
                (tag, comm.recv(np.zeros(sizes[2 * tag + 1] + 1, np.uint8), one, tag=tag, asynchronous=True))
                for tag in reversed(range(len(sizes) // 2))
                for one in (others if source is None else [source] * len(others))
                for _ in range(2)
            ]
            works += [] if comm.rank % 2 else send()
            come: Counter[tuple[int, int]] = Counter()
            for tag, work in receives:
                received = work.wait()
                number = 2 * tag + come[received.source, tag]  # in the order of that rank's sends
                come[received.source, tag] += 1
                n, data = sizes[number], content(received.source, comm.rank, number)
                if received.nbytes != n or (received.array[:n] != data).any() or received.array[n:].any():
                    wrong.append((source, number, repr(received)))
            for work in works:
                work.wait()
            comm.barrier()
    return wrong


def in_turn() -> list[object]:
    """Calls that wait, around a ring of ranks, from two threads each: of sizes around what goes in a line, in
    a piece, at once and by an offer, often enough for ranks to try every way. Returns what is wrong."""
    sizes = (0, 1, 36, 37, 256, 257, 4096, 16_384, 16_385, 32_769, 65_536, 70_001, 190_464, 190_465, 262_157)
    wrong: list[object] = []
    with unisono.init() as comm:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        random = np.random.default_rng(3).integers(0, 256, max(sizes) + 64, np.uint8)

        def content(source: int, tag: int, call: int, n: int) -> np.ndarray[Any, Any]:
            begin = (7 * source + 3 * tag + call) % 64
            return random[begin : begin + n]

        def calls(tag: int) -> None:
            for n in sizes:
                for call in range(24):
                    x, out = content(comm.rank, tag, call, n).copy(), np.zeros(n + 1, np.uint8)
                    if comm.rank == 0:
                        comm.send(x, right, tag=tag)
                    received = comm.recv(out, left if call % 5 else unisono.ANY_SOURCE, tag=tag)
                    if comm.rank != 0:
                        comm.send(x, right, tag=tag)
                    expected = content(left, tag, call, n)
                    if received.nbytes != n or (out[:n] != expected).any() or out[n]:
                        wrong.append((tag, n, call, repr(received)))

        threads = [threading.Thread(target=calls, args=(tag,)) for tag in (4, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        comm.barrier()
    return wrong


def ends_with_messages(nodes: str) -> float:
    """Sends messages, of which none is long, and leaves before they are received. Returns what has come."""
    layout(nodes)
    with unisono.init() as comm:
        if comm.rank == 0:
            for tag in range(40):
                comm.send(np.full(100, tag, np.float64), 1, tag=tag)
            return 0
        time.sleep(0.2)
        got = np.zeros((40, 100))
        for tag in reversed(range(40)):
            comm.recv(got[tag], unisono.ANY_SOURCE, tag=tag)
        return float(got.sum())


def lost(nodes: str) -> dict[str, Any]:
    """Rank 1 dies while rank 0 waits for its message, and rank 2 for any."""
    layout(nodes)
    comm = unisono.init(timeout_s=30)
    comm.barrier()
    Meeting().tell()  # a rank that dies as it leaves a barrier may leave others in it
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    source = 1 if comm.rank == 0 else unisono.ANY_SOURCE
    return attempt(lambda: comm.recv(np.zeros(1), source, tag=3))


def lost_midway(nodes: str) -> dict[str, Any]:
    """Rank 1 dies while a long message of rank 0 comes to it, and one of its own goes to rank 2."""
    layout(nodes)
    comm = unisono.init(timeout_s=30)
    data = np.zeros(20_000_000, np.uint8)
    if comm.rank == 1:
        for i in range(3):
            both = (
                comm.send(data, 2, tag=3, asynchronous=True),
                comm.recv(np.empty_like(data), 0, tag=4, asynchronous=True),
            )
            if i == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            for work in both:
                work.wait()

    def go_on() -> None:
        while True:
            if comm.rank == 0:
                comm.send(data, 1, tag=4)
            else:
                comm.recv(data, 1, tag=3)

    return attempt(go_on)


def late_send(nodes: str) -> dict[str, Any]:
    """Rank 1 does not receive a long message of rank 0."""
    layout(nodes)
    comm = unisono.init(timeout_s=30)
    comm.barrier()
    if comm.rank == 1:
        return attempt(comm.barrier)
    return attempt(lambda: comm.send(np.zeros(5_000_000), 1, tag=3, timeout_s=1))


def late(nodes: str) -> dict[str, Any]:
    """Rank 1 sends by another tag than rank 0 receives by."""
    layout(nodes)
    comm = unisono.init(timeout_s=30)
    comm.barrier()
    if comm.rank == 1:
        comm.send(np.zeros(3), 0, tag=4)
        return attempt(comm.barrier)
    return attempt(lambda: comm.recv(np.zeros(3), 1, tag=3, timeout_s=1))


def across_nodes() -> list[str]:
    """`split` refuses ranks of several nodes, and takes those of one. Every node has two ranks."""
    with unisono.init() as comm:
        said = [attempt(lambda: comm.split(0))["error"]["text"]]
        node = comm.split(comm.rank // 2, -comm.rank)
        assert node is not None
        with node:
            said.append(str(node.all_gather(np.array([comm.rank])).ravel().tolist()))
        assert comm.split(-1) is None
        return said
