"""Tests that all_reduce(wire=) on GPUs has the bits of the CPU lane and of the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import quantised
import threads
import unisono
from gpus import Gpus, gpus, numbers, random_bits
from reference import DTYPES, difference

pytestmark = pytest.mark.gpu
RANKS = (1, 2, 3, 4, 5, 8)
COUNTS = (0, 1, 15, 33, 1000, 12_289, 300_007)


@pytest.fixture(scope="module", params=RANKS)
def ranks(request: pytest.FixtureRequest) -> Any:
    with gpus(request.param) as made:
        yield made


def reals(rng: np.random.Generator, count: int, dtype: str) -> Any:
    values = rng.standard_normal(count) * np.exp2(rng.integers(-10, 4, count))
    values[rng.random(count) < 0.1] = 0.0
    return values.astype(DTYPES[dtype])


def reduced(
    ranks: Gpus,
    tensors: list[Any],
    wire: str,
    op: str = "sum",
    outs: Any = None,
    algorithm: str | None = None,
) -> list[Any]:
    return ranks.run(
        lambda comm, r, stream: comm.all_reduce(
            tensors[r], op, out=outs[r] if outs else None, stream=stream, wire=wire, algorithm=algorithm
        )
    )


def algorithms(ranks: Gpus) -> tuple[str, ...]:
    return ("two_shot", "two_shot_ll128") if ranks.comms[0].nvlink else ("two_shot",)


@pytest.mark.parametrize("wire", quantised.WIRES)
@pytest.mark.parametrize("dtype", quantised.DTYPES)
def test_the_bits_of_the_cpu(ranks: Gpus, dtype: str, wire: str) -> None:
    rng, n = np.random.default_rng(ranks.n), ranks.n
    with threads.team(n) as comms:
        for count in COUNTS:
            for make in (reals, lambda rng, count, dtype: random_bits(rng, (count,), dtype)):
                for op in ("sum", "avg"):
                    xs = [make(rng, count, dtype) for _ in range(n)]
                    on_cpu = threads.together(
                        comms, lambda c, xs=xs, op=op: c.all_reduce(xs[c.rank], op, wire=wire)
                    )
                    tensors = [ranks.put(x, r) for r, x in enumerate(xs)]
                    wanted = quantised.all_reduce(xs, op, wire)
                    for how in algorithms(ranks):
                        outs = reduced(ranks, tensors, wire, op, algorithm=how)
                        for r in range(n):
                            got, what = numbers(outs[r], dtype), f"{how} {count} {dtype} {op}, {r} of {n}"
                            assert difference(got, on_cpu[0]) is None, what
                            assert difference(got, wanted) is None, what
                    if make is reals:
                        exact, allowed = quantised.bound(xs, op, wire)
                        assert (np.abs(numbers(outs[0], dtype).astype(np.float64) - exact) <= allowed).all()


@pytest.mark.parametrize("wire", quantised.WIRES)
def test_in_place_unaligned_and_in_any_shape(ranks: Gpus, wire: str) -> None:
    """No bit depends on the buffers' addresses, or on which block combines an element."""
    rng, n = np.random.default_rng(3), ranks.n
    for dtype in quantised.DTYPES:
        xs = [reals(rng, 70_001, dtype) for _ in range(n)]
        wanted = quantised.all_reduce([x[1:] for x in xs], "sum", wire)
        for shape in ({}, {"blocks": 1}, {"blocks": 3, "threads": 64, "piece_bytes": 1024}):
            for comm in ranks.comms:
                comm._set_shape(**shape)
            for how in algorithms(ranks):
                tensors = [ranks.put(x, r)[1:] for r, x in enumerate(xs)]
                reduced(ranks, tensors, wire, outs=tensors, algorithm=how)
                assert all(difference(numbers(t, dtype), wanted) is None for t in tensors), (
                    dtype,
                    shape,
                    how,
                )
    for comm in ranks.comms:
        comm._reset_shape()


def test_symmetric_memory_and_neighbours(ranks: Gpus) -> None:
    """Quantised calls run between other calls, with which they share rings."""
    import torch

    rng, n = np.random.default_rng(4), ranks.n
    pools = ranks.comms.empty(100_000, torch.float32)
    for count in (100, 99_999):
        xs = [reals(rng, count, "f32") for _ in range(n)]
        for _ in range(3):
            for wire in quantised.WIRES:
                for r in range(n):
                    pools[r][:count].copy_(ranks.put(xs[r], r))
                tensors = [pool[:count] for pool in pools]
                reduced(ranks, tensors, wire, outs=tensors)
                wanted = quantised.all_reduce(xs, "sum", wire)
                assert all(difference(numbers(t, "f32"), wanted) is None for t in tensors)
                ones = [torch.ones(50_000, device=device) for device in ranks.devices]
                for how in ("two_shot", "one_shot_packets"):
                    outs = ranks.run(
                        lambda comm, r, stream, x=ones, how=how: comm.all_reduce(
                            x[r], algorithm=how, stream=stream
                        )
                    )
                    assert all(bool((out == n).all()) for out in outs)


def test_an_automatic_call_takes_lines_over_nvlink(ranks: Gpus) -> None:
    comm = ranks.comms[0]
    found = {comm.plan("all_reduce", size, wire=wire) for size in (64, 1 << 30) for wire in quantised.WIRES}
    assert found == {algorithms(ranks)[-1]}


def test_graph_replays_with_fresh_data(ranks: Gpus) -> None:
    import torch

    n, count = ranks.n, 20_003
    xs = [torch.zeros(count, dtype=torch.bfloat16, device=device) for device in ranks.devices]
    outs = [torch.empty_like(x) for x in xs]
    reduced(ranks, xs, "fp8", outs=outs)

    def three(comm: unisono.Communicator, r: int) -> None:
        for _ in range(3):
            comm.all_reduce(xs[r], out=outs[r], wire="fp8")

    graphs = ranks.capture(three)
    rng = np.random.default_rng(5)
    for _ in range(50):
        fresh = [reals(rng, count, "bf16") for _ in range(n)]
        ranks.replay(graphs, xs, fresh)
        wanted = quantised.all_reduce(fresh, "sum", "fp8")
        assert all(difference(numbers(out, "bf16"), wanted) is None for out in outs)
