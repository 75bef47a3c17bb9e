"""unisono.torch's fused matmuls on GPUs: bits, graphs, gradients, peer access off, and a rank that dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

import ranks
import unisono
from faults import assert_lost, assert_nothing_left
from gpus import Gpus, devices_for
from reference import difference

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
if find_spec("torch") is not None:
    import torch

    import unisono.torch as ut
    from torch_matmul import numbers, random, share_of, summed
    from unisono.torch.matmul import plan

SEVERAL = [1, 2, 3, 4, 8]
DEPTH, WIDTH = 256, 520
FREE_SMS = 32  # that a matmul leaves to the kernels of ranks which share a GPU


@contextmanager
def room(n: int, **options: Any) -> Iterator[Gpus]:
    """Makes ranks whose kernels all fit beside a matmul."""
    team = Gpus(n, max_sms=max(FREE_SMS // n // 2, 1), **options)
    try:
        torch._C._set_sm_carveout_experimental(FREE_SMS)
        yield team
    finally:
        torch._C._set_sm_carveout_experimental(None)
        team.close()


class Data:
    """A rank's matrices of a call, and the call."""

    def __init__(self, team: Gpus, rank: int, call: str, rows: int, chunks: int, split: str = "m") -> None:
        def put(seed: int, *shape: int) -> Any:
            return random(seed, *shape, dtype=torch.bfloat16).to(team.devices[rank])

        self.name, self.n, self.rank, self.chunks, self.split = call, team.n, rank, chunks, split
        self.shares = [share_of(rows, r, team.n) for r in range(team.n)]
        self.whole = put(9 if call == "all_gather" else rank, rows, DEPTH)
        self.a = self.whole[self.shares[rank]] if call == "all_gather" else self.whole
        self.b = put(20 + rank, DEPTH, WIDTH)
        self.norm = {"residual": put(7, rows, WIDTH), "weight": put(8, WIDTH)} if call == "norm" else {}

    def product(self) -> Any:
        """Returns the product by torch.mm of each chunk."""
        rows = self.whole.shape[0]
        out = self.whole.new_empty(rows, WIDTH)
        if self.split == "n":
            for part in plan.evenly(range(WIDTH), self.chunks, plan.TILE_COLUMNS):
                columns = slice(part.start, part.stop)
                out[:, columns] = torch.mm(self.whole, self.b[:, columns])
            return out
        for part in plan.by_shares(plan.shares(rows, self.n), self.chunks):
            chunk = slice(part.start, part.stop)
            torch.mm(self.whole[chunk], self.b, out=out[chunk])
        return out

    def call(self, comm: Any, _: int = 0, stream: Any = None) -> Any:
        with torch.cuda.stream(stream):
            if self.name == "all_gather":
                rows = self.whole.shape[0]
                return ut.fused_all_gather_matmul(comm, self.a, [self.b], chunks=self.chunks, gathered=rows)
            if self.name == "reduce_scatter":
                return ut.fused_matmul_reduce_scatter(comm, self.a, self.b, chunks=self.chunks)
            return ut.matmul_all_reduce(
                comm, self.a, self.b, split=self.split, chunks=self.chunks, **self.norm
            )


def check(datas: list[Data], results: list[Any], products: list[Any], team: Gpus) -> None:
    """Compares every rank's result, bit by bit, with sums of the products in rank order."""
    name = datas[0].name
    if name == "norm":
        expected = team.run(
            lambda comm, r, stream: comm.all_reduce_rms_norm(
                products[r], *datas[r].norm.values(), stream=stream
            )
        )
    for rank, (data, result) in enumerate(zip(datas, results, strict=True)):
        if name == "all_gather":
            gathered, (product,) = result
            pairs = [(gathered, numbers(data.whole)), (product, numbers(products[rank]))]
        elif name == "norm":
            pairs = [(mine, numbers(one)) for mine, one in zip(result, expected[rank], strict=True)]
        else:
            part = data.shares[rank] if name == "reduce_scatter" else slice(None)
            pairs = [(result, summed([one[part] for one in products]))]
        for got, wanted in pairs:
            wrong = difference(numbers(got), wanted)
            assert wrong is None, f"{name}, rank {rank}: {wrong}"


def reserve(team: Gpus) -> None:
    team.comms.each(lambda comm: ut.matmul.reserve(comm, 1 << 24))


def prepared(datas: list[Data], team: Gpus) -> list[Any]:
    """Returns everyone's product. Loads all kernels of the call: the first launch of one waits for those of
    other ranks, of which this one thread has yet to make calls.
    """
    products = [data.product() for data in datas]
    reserve(team)
    for comm, data, product in zip(team.comms, datas, products, strict=True):
        unisono._core.combine_arrays([product] * team.n)
        alone = ut.matmul.run.alone(comm)
        if data.norm:
            alone.all_reduce_rms_norm(product, *data.norm.values())
    return products


def bits(team: Gpus, call: str, rows: int, chunks: int, split: str = "m") -> None:
    datas = [Data(team, r, call, rows, chunks, split) for r in range(team.n)]
    products = prepared(datas, team)
    for _ in range(2):  # the same bits each time
        results = team.run(lambda comm, r, stream: datas[r].call(comm, r, stream))
        check(datas, results, products, team)


@pytest.mark.parametrize("n", SEVERAL)
def test_bits(n: int) -> None:
    with room(n) as team:
        for rows, chunks in ((128 * n, n), (160 * n - 5, 2), (96 * n, 1), (512 * n, 2 * n)):
            bits(team, "all_gather", rows, chunks)
            bits(team, "reduce_scatter", rows, chunks)
            bits(team, "all_reduce", rows, chunks)
            bits(team, "norm", rows, chunks)
        bits(team, "all_reduce", 40, 2, "n")
        bits(team, "norm", 40, 2, "n")


def test_without_peer_access() -> None:
    with room(2, peer_access=False) as team:
        for call in ("all_gather", "reduce_scatter", "all_reduce"):
            bits(team, call, 300, 2)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "norm"])
def test_replays(n: int, call: str) -> None:
    """1,000 replays of a graph, whose ranks share a GPU, without a deadlock."""
    with room(n) as team:
        datas = [Data(team, r, call, 256 * n, n) for r in range(n)]
        products = prepared(datas, team)
        team.run(lambda comm, r, stream: datas[r].call(comm, r, stream))
        results: list[Any] = [None] * n

        def capture(comm: Any, r: int) -> None:
            results[r] = datas[r].call(comm, r, torch.cuda.current_stream())

        graphs = team.capture(capture)
        for _ in range(1000):
            for graph, stream in zip(graphs, team.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        for comm, stream in zip(team.comms, team.streams, strict=True):
            comm.synchronize(stream)
        check(datas, results, products, team)


def test_gradients() -> None:
    """Those of plain torch, of two ranks that share their losses."""
    with room(2) as team:

        def leaves(seed: int, *shape: int) -> list[Any]:
            """Returns a matrix of each rank, on its GPU."""
            made = [random(seed + r, *shape, dtype=torch.float32) for r in range(2)]
            return [one.to(device).requires_grad_() for one, device in zip(made, team.devices, strict=True)]

        xs, ws, vs = leaves(0, 128, 64), leaves(4, 64, 96), leaves(8, 96, 64)

        def plain() -> Any:
            whole = torch.cat([x.cpu() for x in xs])
            rows = sum(torch.relu(whole @ w.cpu()) @ v.cpu() for w, v in zip(ws, vs, strict=True))
            return torch.autograd.grad(rows.square().sum(), [*xs, *ws, *vs])

        expected = plain()

        def layer(comm: Any, x: Any, w: Any, v: Any) -> Any:
            _, (h,) = ut.fused_all_gather_matmul(comm, x, [w], return_A=False, chunks=2)
            y = ut.fused_matmul_reduce_scatter(comm, torch.relu(h), v, chunks=2)
            return y.square().sum()

        def forward(comm: Any, r: int, stream: Any) -> Any:
            with torch.cuda.stream(stream):
                return layer(comm, xs[r], ws[r], vs[r])

        # as `prepared` does
        reserve(team)
        for comm, x, w, v in zip(team.comms, xs, ws, vs, strict=True):
            unisono._core.combine_arrays([torch.cat([x, x])] * 2)
            own = [torch.cat([x, x]).detach().requires_grad_(), w, v]
            torch.autograd.grad(layer(ut.matmul.run.alone(comm), *own), own)
        for _ in range(2):
            losses = team.run(forward)

            def backward(_: Any, r: int, stream: Any) -> Any:
                with torch.cuda.stream(stream):  # it is made to wait for this rank's part of backward
                    return torch.autograd.grad(losses[r], [xs[r], ws[r], vs[r]])  # noqa: B023

            grads = team.run(backward)
        for r, mine in enumerate(grads):
            for got, wanted in zip(mine, expected[r::2], strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-2)


def test_compiled() -> None:
    with room(1) as team:
        comm = team.comms[0]
        x, w = (random(3, *s, dtype=torch.bfloat16).cuda() for s in ((256, DEPTH), (DEPTH, WIDTH)))

        def block(comm: Any, x: Any, w: Any) -> Any:
            return ut.matmul_all_reduce(comm, torch.relu(x), w, chunks=2)

        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(comm, x, w), block(comm, x, w))


@pytest.mark.parametrize("call", ["all_gather", "norm"])
def test_rank_that_dies_behind_a_matmul(call: str) -> None:
    """The survivor's stream comes back, and its next call says who has died."""
    devices_for(2)
    marker = ranks.new_marker()
    program = "torch_matmul_programs:killed_on_gpu"
    outcome = ranks.play(2, program, call, env=marker, timeout_s=120)
    assert_lost(outcome, victim=1)
    assert_nothing_left(outcome, marker["UNISONO_TEST"])
