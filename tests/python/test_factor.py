"""factor=: the sum of inputs that each rank has scaled by a factor of its own (a premultiplied sum)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import fabric
import ranks
import threads
import unisono
from factors import DTYPES, FACTORS, scaled
from quantised import all_reduce as quantised_sum
from reference import DTYPES as KINDS
from reference import combine, data, difference

F32 = np.float32
COUNTS = (0, 1, 3, 129, 1001, 20_011)


def inputs(dtype: str, n: int, count: int) -> list[Any]:
    """Returns every rank's data, infinities and NaNs among them."""
    return [data(dtype, rank, n, 17 * rank, count).copy() for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_bits_of_scaling_by_hand(n: int) -> None:
    with threads.team(n) as comms:
        turn = itertools.count()
        for dtype, count, in_place in itertools.product(DTYPES, COUNTS, (False, True)):
            first = next(turn)
            factors = [FACTORS[(first + rank) % len(FACTORS)] for rank in range(n)]
            check_all_reduce_and_reduce(comms, inputs(dtype, n, count), factors, in_place, first % n)
            check_reduce_scatter(comms, inputs(dtype, n, n * count), factors, in_place)


def check_all_reduce_and_reduce(
    comms: list[unisono.Communicator], xs: list[Any], factors: list[float], in_place: bool, root: int
) -> None:
    wanted = combine([scaled(x, factor) for x, factor in zip(xs, factors, strict=True)], "sum")
    kept = [x.copy() for x in xs]

    def all_reduce(comm: unisono.Communicator) -> Any:
        x = xs[comm.rank].copy() if in_place else xs[comm.rank]
        return comm.all_reduce(x, out=x if in_place else None, factor=factors[comm.rank])

    def reduce(comm: unisono.Communicator) -> Any:
        mine = in_place and comm.rank == root
        x = xs[comm.rank].copy() if mine else xs[comm.rank]
        return comm.reduce(x, root, out=x if mine else None, factor=factors[comm.rank])

    what = (xs[0].dtype, xs[0].size, factors, in_place)
    assert all(difference(out, wanted) is None for out in threads.together(comms, all_reduce)), what
    outs = threads.together(comms, reduce)
    assert difference(outs.pop(root), wanted) is None, what
    assert all(out is None for out in outs)
    assert all(difference(x, was) is None for x, was in zip(xs, kept, strict=True)), what


def check_reduce_scatter(
    comms: list[unisono.Communicator], xs: list[Any], factors: list[float], in_place: bool
) -> None:
    """In place the output lies within the input. The rest of the input stays as it was."""
    n = len(comms)
    wanted = combine([scaled(x, factor) for x, factor in zip(xs, factors, strict=True)], "sum").reshape(n, -1)
    kept = [x.copy().reshape(n, -1) for x in xs]

    def call(comm: unisono.Communicator) -> Any:
        x = xs[comm.rank].reshape(n, -1)
        return comm.reduce_scatter(
            x, out=x[comm.rank] if in_place else None, factor=factors[comm.rank]
        ).copy()

    outs = threads.together(comms, call)
    for rank in range(n):
        assert difference(outs[rank], wanted[rank]) is None, (xs[0].dtype, xs[0].size, factors, in_place)
        if in_place:
            kept[rank][rank] = wanted[rank]
        assert difference(xs[rank], kept[rank]) is None


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_each_product_is_rounded_once(dtype: str) -> None:
    """The factor is f32, and is not rounded to the array's dtype: a third of bf16's 1 is another number."""
    x = np.arange(-1000, 1000).astype(KINDS[dtype])
    wanted = (x.astype(F32) * F32(1 / 3)).astype(x.dtype)
    assert (wanted != (x * x.dtype.type(1 / 3)).astype(x.dtype)).any()
    with threads.team(1) as (comm,):
        assert difference(comm.all_reduce(x, factor=1 / 3), wanted) is None


@pytest.mark.parametrize("factor", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, 5e-324])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_float_is_a_factor(dtype: str, factor: float) -> None:
    xs = inputs(dtype, 2, 1001)
    wanted = combine([scaled(xs[0], factor), xs[1]], "sum")
    outs = threads.with_threads(2, lambda c: c.all_reduce(xs[c.rank], factor=factor if c.rank == 0 else 1))
    assert all(difference(out, wanted) is None for out in outs)


def test_symmetric_memory_bound_and_begun_calls() -> None:
    def body(comm: unisono.Communicator) -> None:
        factor = 0.5 * (comm.rank + 1)
        x, y = comm.empty(5001), comm.empty(5001)
        step = comm.bind.all_reduce(x, out=y, factor=factor)
        alone = comm.bind.reduce(x, root=1, factor=factor)
        parts = comm.bind.reduce_scatter(np.ones((3, 7)), factor=factor)
        for value in (2, 8):
            x[:] = value
            assert (step() == 3 * value).all() and (x == value).all()
            total = alone()
            assert (total is None) if comm.rank != 1 else (total == 3 * value).all()
            assert (parts() == 3).all()
        works = [
            comm.all_reduce(y, out=y, factor=value, asynchronous=True, timeout_s=20) for value in (0.5, 1 / 3)
        ]
        for work in works:
            work.wait()
        assert (y == F32(24 * 1.5 * F32(1 / 3) * 3)).all()

    for check in (False, True):
        threads.with_threads(3, body, check=check)


@pytest.mark.parametrize("wire", ["fp8", "int8"])
def test_scales_before_it_quantises(wire: str) -> None:
    rng = np.random.default_rng(3)
    xs = [rng.standard_normal(1001).astype(F32) for _ in range(3)]
    factors = (0.1, 1.0, -7.0)
    wanted = quantised_sum([scaled(x, factor) for x, factor in zip(xs, factors, strict=True)], "sum", wire)
    outs = threads.with_threads(3, lambda c: c.all_reduce(xs[c.rank], wire=wire, factor=factors[c.rank]))
    assert all(difference(out, wanted) is None for out in outs)


@pytest.mark.torch
def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        xs = [torch.arange(rank, rank + 77).to(dtype) for rank in range(2)]
        outs = threads.with_threads(2, lambda c, xs=xs: c.all_reduce(xs[c.rank], factor=(c.rank + 1) / 3))
        wanted = (xs[0] * (1 / 3)).to(torch.float64) + (xs[1] * (2 / 3)).to(torch.float64)
        assert all(torch.equal(out, wanted.to(dtype)) for out in outs), dtype


@pytest.mark.parametrize("isa", ["", "baseline"])
def test_processes(isa: str) -> None:
    env = {"UNISONO_ISA": isa}
    assert ranks.play(3, "factors:program", env=env).results() == [[]] * 3


def test_nodes() -> None:
    if reason := fabric.missing("tcp"):
        pytest.skip(reason)
    env = {"UNISONO_TRANSPORT": "fabric"}
    assert ranks.play(3, "factors:program", env=env, nodes=2).results() == [[]] * 3


def test_wrong_factors() -> None:
    x = np.ones((2, 8), F32)
    integers = x.astype(np.int32)
    with threads.team(2, timeout_s=10) as comms:
        for call, words in (
            (lambda c: c.all_reduce(x, op="max", factor=2), "factor is for sum, not max: leave it out"),
            (lambda c: c.reduce(x, op="avg", factor=0.5), "factor is for sum, not avg"),
            (lambda c: c.reduce_scatter(x, op="prod", factor=float("nan")), "factor is for sum, not prod"),
            (lambda c: c.all_reduce(integers, factor=2), "f32, f64, f16 and bf16, not i32: leave it out"),
            (lambda c: c.bind.reduce_scatter(integers, factor=2)(), "not i32"),
            (lambda c: c.all_reduce(integers, factor=2, asynchronous=True), "not i32"),
            (lambda c: c.all_reduce(x.astype(KINDS["f8e4m3"]), factor=2), "not f8e4m3"),
        ):
            for error in threads.attempt(comms, call):
                assert isinstance(error, unisono.UsageError) and words in str(error), repr(error)
        for wrong in ("2", None, [2], 1j):
            for error in threads.attempt(comms, lambda c, wrong=wrong: c.all_reduce(x, factor=wrong)):
                assert isinstance(error, TypeError), repr(error)
        assert all(
            (one == 4).all()
            for one in threads.together(comms, lambda c: c.all_reduce(integers, factor=1) * 2)
        )
