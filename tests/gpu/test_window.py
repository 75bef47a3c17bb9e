"""Windows on GPUs: what is put arrives, in rounds and in graphs; bad calls, and a peer that does not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import unisono
from gpus import Gpus, gpus

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
torch = pytest.importorskip("torch")

SIZES = (0, 1, 3, 4096, 100_003)  # of a put; the last is cut into several by copy engines


class Round:
    """Every rank puts random bytes of each size to every other, on a stream of its own."""

    def __init__(self, team: Gpus) -> None:
        self.team, self.n, self.slot = team, team.n, sum(SIZES)
        self.windows = team.comms.each(lambda comm: comm.window(self.n * self.slot))
        self.sent = [
            torch.randint(256, (self.n, self.slot), dtype=torch.uint8, device=device)
            for device in team.devices
        ]
        self.came = [torch.empty_like(self.sent[0], device=device) for device in team.devices]
        self.beside = [torch.cuda.Stream(device) for device in team.devices]

    def others(self, rank: int) -> list[int]:
        return [r for r in range(self.n) if r != rank]

    def call(self, _: Any, rank: int, stream: Any) -> None:
        window, beside = self.windows[rank], self.beside[rank]
        window.begin(stream=stream)
        beside.wait_stream(stream)
        for peer in self.others(rank):
            at = 0
            for size in SIZES:
                part = self.sent[rank][peer, at : at + size]
                window.put_signal(part, peer, rank * self.slot + at, stream=beside)
                at += size
        window.wait_signals(self.others(rank), len(SIZES), stream=stream)
        with torch.cuda.stream(stream):
            self.came[rank].copy_(window.array().view(self.n, self.slot))
        stream.wait_stream(beside)

    def check(self) -> None:
        for rank in range(self.n):
            for peer in self.others(rank):
                assert torch.equal(self.came[rank][peer].cpu(), self.sent[peer][rank].cpu()), (rank, peer)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_puts_arrive(n: int) -> None:
    with gpus(n) as team:
        now = Round(team)
        for _ in range(3):
            team.run(now.call)
            now.check()
            for sent in now.sent:
                sent.random_(256)
            torch.cuda.synchronize()


@pytest.mark.parametrize("n", [2, 4])
def test_replays(n: int) -> None:
    """A graph of two rounds, replayed with other data each time."""
    with gpus(n) as team:
        now = Round(team)
        team.run(now.call)

        def capture(comm: Any, rank: int) -> None:
            for _ in range(2):
                now.call(comm, rank, torch.cuda.current_stream())

        graphs = team.capture(capture)
        for turn in range(200):
            if turn % 50 == 0:
                for sent in now.sent:
                    sent.random_(256)
                torch.cuda.synchronize()
            for graph, stream in zip(graphs, team.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        for comm, stream in zip(team.comms, team.streams, strict=True):
            comm.synchronize(stream)
        now.check()


def test_bad_calls() -> None:
    """Nothing is put, and the window is of use after them."""
    with gpus(2) as team:
        now = Round(team)
        window, x = now.windows[0], now.sent[0]
        wrong: dict[str, Callable[[], object]] = {
            "peer 0 is no other rank": lambda: window.put_signal(x, 0, 0),
            "peer 2 is no other rank": lambda: window.wait_signals([1, 2], 1),
            "do not fit in a window": lambda: window.put_signal(x, 1, window.nbytes - 1),
            "offset": lambda: window.put_signal(x, 1, -1),
            "on the CPU": lambda: window.put_signal(x.cpu(), 1, 0),
        }
        for text, call in wrong.items():
            with pytest.raises(unisono.UsageError, match=text):
                call()
        team.run(now.call)
        now.check()


def test_peer_that_does_not_come() -> None:
    """The wait ends at the deadline, and the next call on every rank says for whom it was."""
    with gpus(2, timeout_s=1.0) as team:
        windows = team.comms.each(lambda comm: comm.window(64))
        team.run(lambda comm, rank, stream: windows[rank].begin(stream=stream))
        windows[0].wait_signals([1], 1, stream=team.streams[0])
        team.streams[0].synchronize()
        for comm in team.comms:
            with pytest.raises(
                unisono.TimeoutError, match=r"a window \(rank 0\) has waited 1 s .* for rank 1"
            ):
                comm.synchronize()


def test_a_window_does_not_keep_its_communicator() -> None:
    team = Gpus(2)
    windows = team.comms.each(lambda comm: comm.window(64))
    array = windows[0].array()
    team.close()
    team.comms.clear()
    with pytest.raises(unisono.UsageError, match="communicator is gone"):
        windows[0].begin()
    assert array.sum().item() == 0  # its memory lives on
