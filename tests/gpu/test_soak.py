"""Runs small mixed collectives back to back in CUDA graphs, and checks every element of results on the GPU.

UNISONO_SOAK is the number of calls: 10000000 is the full soak; the default keeps `make gpu-test` short.
Inputs are a pattern plus the number of the replay. Each element of a result is therefore a linear function of
that number, and one comparison checks a whole replay.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from gpu_cases import ALL, arguments, direct_algorithms, expected, plain_algorithms, shapes
from gpus import Array, Gpus, gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CALLS = int(os.environ.get("UNISONO_SOAK", "1000000"))
IN_A_GRAPH = 500
MOST = 2048  # elements of a block
PERIOD = 1024  # replays until the data repeats: sums stay whole numbers that f32 holds
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
AT_ONCE = 16  # replays queued on a GPU


class Soak:
    """The calls of one graph. Their buffers have the same offsets in every rank's symmetric memory."""

    def __init__(self, ranks: Gpus, seed: int) -> None:
        import torch

        self.ranks, self._rng = ranks, np.random.default_rng(seed)
        self._calls: list[tuple[str, dict[str, Any], slice, slice, Any, Any]] = []
        self._sent = self._got = 0
        for _ in range(IN_A_GRAPH):
            self._draw()
        n = ranks.n
        pattern = self._rng.integers(0, 997, (n, self._sent)).astype(np.float32)
        constant, slope = self._results(pattern)
        self.x = ranks.comms.empty(self._sent)
        self.out = ranks.comms.empty(self._got)
        put = lambda host: [torch.from_numpy(host[r]).to(ranks.devices[r]) for r in range(n)]  # noqa: E731
        self.pattern, self.constant, self.slope = put(pattern), put(constant), put(slope)
        zeros = lambda kind: [torch.zeros((), dtype=kind, device=device) for device in ranks.devices]  # noqa: E731
        self.replay, self.wrong = zeros(torch.float32), zeros(torch.int64)
        for out in self.out:
            out.zero_()

    def _draw(self) -> None:
        rng, n = self._rng, self.ranks.n
        collective = str(rng.choice([*ALL, "send_recv"]))
        count = int(MOST ** rng.random()) * n
        root = int(rng.integers(n))
        algorithms = plain_algorithms(collective, self.ranks.nvlink) + (
            direct_algorithms(collective, self.ranks.n) if self.ranks.reach else []
        )
        algorithms = [name for name in algorithms if name != "copy_engine"]  # for large messages
        how = {"algorithm": algorithms[rng.integers(len(algorithms))]}
        if collective == "send_recv":
            x_shape = out_shape = (count,)
        else:
            x_shape, out_shape = shapes(collective, count, n)
            how |= arguments(collective, "sum", root)
        sent, got = int(np.prod(x_shape)), int(np.prod(out_shape))
        # blocks begin at any element
        self._sent, self._got = self._sent + int(rng.integers(4)), self._got + int(rng.integers(4))
        x, out = slice(self._sent, self._sent + sent), slice(self._got, self._got + got)
        self._sent, self._got = x.stop, out.stop
        self._calls.append((collective, how, x, out, x_shape, out_shape))

    def _results(self, pattern: Array) -> tuple[Array, Array]:
        """Returns, for each rank and output element, the value in replay 0 and the increase a replay."""
        n = self.ranks.n
        constant, slope = np.zeros((2, n, self._got), np.float32)
        for collective, how, x, out, x_shape, _ in self._calls:
            xs = [pattern[r, x].reshape(x_shape) for r in range(n)]
            if collective == "send_recv":
                wanted: list[Array | None] = [xs[(r - 1) % n] for r in range(n)]
            else:
                wanted = expected(collective, xs, how.get("root", 0), "sum")
            for r, one in enumerate(wanted):
                if one is not None:
                    constant[r, out] = one.reshape(-1)
                    slope[r, out] = n if collective in REDUCING else 1
        return constant, slope

    def fill(self, r: int) -> None:
        import torch

        torch.add(self.pattern[r], self.replay[r], out=self.x[r])

    def call(self, r: int, part: slice = slice(None)) -> None:
        comm, n = self.ranks.comms[r], self.ranks.n
        for collective, how, x, out, x_shape, out_shape in self._calls[part]:
            source, to = self.x[r][x].view(x_shape), self.out[r][out].view(out_shape)
            if collective == "send_recv":
                comm.send_recv(source, (r + 1) % n, to, (r - 1) % n, **how)
            else:
                getattr(comm, collective)(source, out=to, **how)

    def check(self, r: int) -> None:
        import torch

        wanted = torch.addcmul(self.constant[r], self.slope[r], self.replay[r])
        self.wrong[r].add_((self.out[r] != wanted).sum())
        self.replay[r].add_(1).remainder_(PERIOD)


def queue(ranks: Gpus, part: Any) -> None:
    import torch

    for r in range(ranks.n):
        with torch.cuda.device(ranks.devices[r]), torch.cuda.stream(ranks.streams[r]):
            part(r)


def wait(ranks: Gpus) -> None:
    for comm, stream in zip(ranks.comms, ranks.streams, strict=True):
        comm.synchronize(stream)


@pytest.mark.timeout(120 + CALLS / 20_000)
@pytest.mark.parametrize(("n", "peer_access"), [(2, True), (4, True), (8, True), (2, False), (4, False)])
def test_back_to_back(n: int, peer_access: bool) -> None:
    import torch

    with gpus(n, peer_access=peer_access, timeout_s=60) as ranks:
        soak = Soak(ranks, seed=n)
        for part in (soak.fill, soak.check):  # torch loads its kernels before any GPU waits for another
            queue(ranks, part)
            wait(ranks)
        for begin in range(0, IN_A_GRAPH, 20):  # few enough to be queued on one GPU before the next
            queue(ranks, lambda r, part=slice(begin, begin + 20): soak.call(r, part))
            wait(ranks)
        graphs = [torch.cuda.CUDAGraph() for _ in range(n)]
        for r, graph in enumerate(graphs):
            with (
                torch.cuda.device(ranks.devices[r]),
                torch.cuda.graph(graph, stream=ranks.streams[r], capture_error_mode="thread_local"),
            ):
                soak.fill(r)
                soak.call(r)
                soak.check(r)
        for r in range(n):
            soak.wrong[r].zero_()
            soak.replay[r].zero_()
            torch.cuda.synchronize(ranks.devices[r])

        replays = CALLS // IN_A_GRAPH
        for number in range(replays):
            queue(ranks, lambda r: graphs[r].replay())
            if number % AT_ONCE == AT_ONCE - 1:
                wait(ranks)
        wait(ranks)
        assert [int(wrong) for wrong in soak.wrong] == [0] * n
        assert [int(replay) for replay in soak.replay] == [replays % PERIOD] * n

        soak.constant[0][soak.constant[0].nonzero()[0]] += 1  # the check sees a single wrong element
        torch.cuda.synchronize(ranks.devices[0])
        queue(ranks, lambda r: graphs[r].replay())
        wait(ranks)
        assert [int(wrong) for wrong in soak.wrong] == [1] + [0] * (n - 1)
