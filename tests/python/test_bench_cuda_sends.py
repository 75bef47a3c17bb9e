"""Calls that the backends for GPUs build of sends and receives: the ranks' calls must match each other.

Tensors are the CPU's, and a stand-in for the library notes its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from unisono import nccl as api  # noqa: E402
from unisono.bench import cases  # noqa: E402
from unisono.bench.backends import nccl  # noqa: E402
from unisono.bench.backends.base import Buffers, Ranks  # noqa: E402
from unisono.bench.backends.unisono import UnisonoBackend  # noqa: E402
from unisono.bench.cuda import streams  # noqa: E402
from unisono.records import Case, vocabulary  # noqa: E402

pytestmark = pytest.mark.torch


def a_case(collective: str, ranks: int, **changes: Any) -> Case:
    case = cases.make_case(collective, 4096, "f32", ranks, mode="graph", device="cuda")
    return msgspec.structs.replace(case, **changes)


def buffers(case: Case, rank: int) -> Buffers:
    shapes = cases.layout(case, rank)
    x, out = (None if shape is None else torch.zeros(shape) for shape in (shapes.x, shapes.out))
    return Buffers(x, out)


# ---- a stream per peer


class Stream:
    def __init__(self, log: list[tuple[str, int]], number: int) -> None:
        self.log, self.cuda_stream = log, number

    def wait_event(self, event: Event) -> None:
        self.log.append(("wait", self.cuda_stream))
        assert event.recorded_on is not None  # else the wait would return at once
        self.waited = event.recorded_on


class Event:
    recorded_on: int | None = None

    def record(self, stream: Stream) -> None:
        stream.log.append(("record", stream.cuda_stream))
        self.recorded_on = stream.cuda_stream


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Returns a list of (event, stream); stream 0 is the one that is timed."""
    found: list[tuple[str, int]] = []
    made = [Stream(found, 0)]

    def stream() -> Stream:
        made.append(Stream(found, len(made)))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made[0])
    return found


def test_streams_fork_from_the_timed_one_and_join_it(log: list[tuple[str, int]]) -> None:
    fork = streams.Fork(2)
    assert fork.handles == [1, 2]
    fork.bound([partial(log.append, ("work", 1)), partial(log.append, ("work", 2))])()
    assert log[0] == ("record", 0)
    for number in (1, 2):
        own = [what for what, where in log if where == number]
        assert own == ["wait", "work", "record"]
    assert log[-2:] == [("wait", 0)] * 2


# ---- NCCL


class Comm:
    """Notes calls: (function, peer, elements, address), a list for each group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.library = rank, size, self
        self.noted: list[list[tuple[str, int, int, int]]] = []

    def has(self, name: str) -> bool:
        return True

    def bound(self, name: str, address: int, count: int, dtype: int, peer: int) -> Callable[[], object]:
        assert name in api.REQUIRED
        assert dtype == api.DTYPES["f32"]
        return lambda: self.noted.append([(name, peer, count, address)])

    def grouped(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        def group() -> None:
            before, self.noted = self.noted, []
            for call in calls:
                call()
            self.noted = [*before, [one for noted in self.noted for one in noted]]

        return group


def nccl_rank(rank: int, size: int, made: dict[str, Comm]) -> nccl.NcclBackend:
    backend = nccl.NcclBackend()
    backend._ranks = Ranks(rank, size, lambda data: [data] * size, None, device=0)
    backend._comms = made  # type: ignore[assignment]
    made["pairs"] = Comm(rank, size)

    def add(name: str, stream: int) -> Comm:
        made[name] = Comm(rank, size)
        return made[name]

    backend._add = add  # type: ignore[method-assign,assignment]
    return backend


@pytest.mark.parametrize("pattern", vocabulary.PATTERNS)
def test_a_pingpong_of_nccl(pattern: str) -> None:
    case = a_case(vocabulary.PINGPONG, 3, pattern=pattern, pair=(2, 0))
    noted = {}
    for rank in (2, 0):
        made: dict[str, Comm] = {}
        mine = buffers(case, rank)
        nccl_rank(rank, 3, made).prepare(case, mine)()
        noted[rank] = [
            [(name, peer, count) for name, peer, count, _ in group] for group in made["pairs"].noted
        ]
        places = {name: at for group in made["pairs"].noted for name, _, _, at in group}
        for name, tensor in (("ncclSend", mine.x), ("ncclRecv", mine.out)):
            assert places.get(name) == (None if tensor is None else tensor.data_ptr())
    send, recv = ("ncclSend", 0, 1024), ("ncclRecv", 0, 1024)
    back, take = ("ncclSend", 2, 1024), ("ncclRecv", 2, 1024)
    expected = {
        "half_round_trip": ([[send], [recv]], [[take], [back]]),
        "one_way": ([[send]], [[take]]),
        "bidirectional": ([[send, recv]], [[back, take]]),
    }
    assert (noted[2], noted[0]) == expected[pattern]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", ["one", "per-peer"])
def test_every_block_of_an_all_to_all_has_a_sender_and_a_receiver(
    ranks: int, way: str, log: list[tuple[str, int]]
) -> None:
    case = a_case("all_to_all", ranks, streams=way)
    sent, received = set(), set()
    for rank in range(ranks):
        made: dict[str, Comm] = {}
        backend, mine = nccl_rank(rank, ranks, made), buffers(case, rank)
        mine.x.fill_(rank + 1)
        backend.prepare(case, mine)()
        for name, comm in made.items():
            assert len(comm.noted) <= 1  # at most one group, since no order within a group can lock up
            for function, peer, count, address in (one for group in comm.noted for one in group):
                assert count == 1024 // ranks
                own = mine.x if function == "ncclSend" else mine.out
                assert address == own[peer].data_ptr()
                (sent if function == "ncclSend" else received).add(
                    (name, rank, peer) if function == "ncclSend" else (name, peer, rank)
                )
        if way == "per-peer":  # the own block is copied without NCCL
            assert bool((mine.out[rank] == rank + 1).all())
    assert sent == received  # on the same communicator
    wanted = {(a, b) for a in range(ranks) for b in range(ranks) if way == "one" or a != b}
    assert {(a, b) for _, a, b in sent} == wanted
    if way == "per-peer":
        assert len({name for name, _, _ in sent}) == ranks - 1


# ---- Unisono


class Sends:
    """A communicator that notes its exchanges."""

    def __init__(self, rank: int, size: int, noted: list[Any]) -> None:
        self.rank, self.size, self.noted = rank, size, noted

    def send_recv(self, x: Any, to: int, out: Any, source: int, **options: Any) -> None:
        self.noted.append((id(self), x.data_ptr(), to, out.data_ptr(), source, options["stream"]))

    def batch_send_recv(self, sends: Any, recvs: Any, **options: Any) -> None:
        places = ([(x.data_ptr(), peer) for x, peer in messages] for messages in (sends, recvs))
        self.noted.append((*places, options["stream"]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_unisono_on_one_stream_has_one_batch(ranks: int) -> None:
    case = a_case("all_to_all", ranks, streams="one")
    for rank in range(ranks):
        noted: list[Any] = []
        backend = UnisonoBackend()
        backend._comm, backend._device, backend._queued = Sends(rank, ranks, noted), "cuda", {"stream": 5}
        mine = buffers(case, rank)
        backend.prepare(case, mine)()
        sends, recvs = (
            [(array[peer].data_ptr(), peer) for peer in range(ranks)] for array in (mine.x, mine.out)
        )
        assert noted == [(sends, recvs, 5)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_unisono_on_a_stream_per_peer_has_a_communicator_each(ranks: int, log: list[tuple[str, int]]) -> None:
    case = a_case("all_to_all", ranks, streams="per-peer")
    for rank in range(ranks):
        noted: list[Any] = []
        backend = UnisonoBackend()
        backend._comm, backend._device, backend._queued = Sends(rank, ranks, noted), "cuda", {"stream": 0}
        fork = streams.Fork(ranks - 1)
        backend._peers = fork, [Sends(rank, ranks, noted) for _ in fork.handles]
        mine = buffers(case, rank)
        mine.x.fill_(7)
        backend.prepare(case, mine)()
        assert len({comm for comm, *_ in noted}) == ranks - 1
        assert [stream for *_, stream in noted] == fork.handles
        assert {to for _, _, to, *_ in noted} == set(range(ranks)) - {rank}
        for _, x, to, out, source, _ in noted:
            assert (x, out) == (mine.x[to].data_ptr(), mine.out[source].data_ptr())
        assert bool((mine.out[rank] == 7).all())


def test_windows_belong_to_one_communicator() -> None:
    case = a_case("all_to_all", 4, streams="per-peer", memory="symmetric")
    assert "not to one per peer" in str(nccl.NcclWindowsBackend().supports(case))
    assert nccl.NcclWindowsBackend().supports(msgspec.structs.replace(case, streams="one")) is None
