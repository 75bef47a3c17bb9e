"""Records over sockets: strangers, records that a socket does not take at once, and peers that leave."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from unisono.sockets import RecordSockets

WITHIN_S = 60.0


class Told:
    """Keeps the words of the sockets on their records."""

    def __init__(self) -> None:
        self.words: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def arrived(self, source: int, record: bytes) -> None:
        self.words.put(("arrived", source, record))

    def sent(self, to: int) -> None:
        self.words.put(("sent", to))

    def fail(self, peer: int, why: str) -> None:
        self.words.put(("fail", peer, why))

    def next(self) -> tuple[Any, ...]:
        return self.words.get(timeout=WITHIN_S)


def connect(
    n: int, at_places: Callable[[bytes], None] = lambda place: None
) -> list[tuple[RecordSockets, Told]]:
    """Connects `n` ranks. at_places: gets rank 0's place before the others do."""
    barrier = threading.Barrier(n)
    given = [b""] * n

    def rank(r: int) -> tuple[RecordSockets, Told]:
        rounds = iter(range(2))

        def all_gather(mine: bytes) -> list[bytes]:
            given[r] = mine
            barrier.wait(WITHIN_S)
            if next(rounds) == 1 and r == 0:
                at_places(given[0])
            everyones = list(given)
            barrier.wait(WITHIN_S)
            return everyones

        made, told = RecordSockets(r, n, all_gather, "127.0.0.1", WITHIN_S), Told()
        made.carry(cast(Any, told))
        return made, told

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(rank, range(n)))


def test_records_that_a_socket_does_not_take_at_once() -> None:
    (first, told), (second, heard) = connect(2)
    records = [bytes([i]) * (1 << 19) for i in range(16)]
    for record in records:
        first.send_record(1, record)
    assert [heard.next() for _ in records] == [("arrived", 0, record) for record in records]
    assert [told.next() for _ in records] == [("sent", 1)] * len(records)
    second.send_record(0, b"x")
    assert told.next() == ("arrived", 1, b"x")
    for one in (first, second):
        one.close()
        one.close()


def test_a_stranger_is_no_rank() -> None:
    strangers = []

    def come(place: bytes) -> None:
        host, port = place.decode().split()
        for hello in (b"?" * 20, b""):
            strangers.append(socket.create_connection((host, int(port))))
            strangers[-1].sendall(hello)
            strangers[-1].shutdown(socket.SHUT_WR)

    (first, _), (second, heard) = connect(2, come)
    first.send_record(1, b"a record")
    assert heard.next() == ("arrived", 0, b"a record")
    for one in (*strangers, first, second):
        one.close()


def test_a_peer_that_leaves_and_one_that_is_lost() -> None:
    (first, told), (second, heard), (third, _) = connect(3)
    second.close()
    third._links[0].socket.shutdown(socket.SHUT_RDWR)  # as its process ends
    assert told.next()[:2] == ("fail", 2)
    first.send_record(1, b"too late")
    while (word := told.next())[0] == "sent":  # the kernel has taken it
        first.send_record(1, b"too late")
    assert word[:2] == ("fail", 1)
    assert heard.words.empty()  # a rank that leaves hears of nothing
    first.close()
    third.close()
