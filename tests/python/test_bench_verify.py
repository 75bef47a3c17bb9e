"""The checks of the bench: a right result passes, and every planted error is seen."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quantised
from unisono import traits
from unisono.bench import verify
from unisono.bench.buffers import Placed, Pools, plain_region
from unisono.bench.cases import make_case
from unisono.records import Case, vocabulary
from unisono.records.vocabulary import DTYPES, INTEGERS

FLOATS = [name for name in DTYPES if name not in INTEGERS]


class Heap:
    """A stand-in for a communicator, whose symmetric memory is plain memory, in pages too."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        assert dtype == "u8"
        return plain_region(*shape).memory


def place(case: Case) -> list[Placed]:
    """Returns every rank's buffers, all in this process."""
    pools = [Pools([case], rank) for rank in range(case.ranks)]
    for pool in pools:
        pool.add_symmetric(1 << 16, Heap())
    return [pool.place(case) for pool in pools]


def perform(case: Case, placed: list[Placed]) -> None:
    """Performs the collective as a loop over the ranks' buffers, without the code under test."""
    n, root = case.ranks, case.root or 0
    x = [None if p.buffers.x is None else p.buffers.x.copy() for p in placed]
    out = [p.buffers.out for p in placed]
    kind = DTYPES[case.dtype]

    def total() -> Any:
        wide = np.float64 if case.dtype == "f64" else np.float32
        if case.dtype in INTEGERS:
            wide = np.int64 if case.op == "avg" else kind
        step = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
        step |= {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
        result = reduce(step[str(case.op)], [part.astype(wide) for part in x if part is not None])
        if case.op == "avg":
            result = np.trunc(result / n) if case.dtype in INTEGERS else result / wide(n)
        return result.astype(kind)

    behind = [np.cumsum([0, *p.buffers.send_counts]) for p in placed]
    for rank, target in enumerate(out):
        if target is None:
            continue
        match case.collective:
            case "all_reduce" | "reduce":
                target[...] = total()
            case "reduce_scatter":
                target[...] = total()[rank]
            case "broadcast":
                target[...] = x[root]
            case "all_gather" | "gather":
                for source in range(n):
                    target[source] = x[source]
            case "scatter":
                target[...] = x[root][rank]
            case "all_to_all":
                for source in range(n):
                    target[source] = x[source][rank]
            case "all_to_all_v":
                target[...] = np.concatenate([x[s][behind[s][rank] : behind[s][rank + 1]] for s in range(n)])
            case "send_recv":
                target[...] = x[(rank - 1) % n]


def checked(case: Case, placed: list[Placed], seed: int = 1, exact: bool = True) -> Iterator[str | None]:
    for rank, mine in enumerate(placed):
        yield verify.inspect(case, mine, verify.expectation(case, rank, seed, exact))


def arrange(case: Case, placed: list[Placed], seed: int = 1, exact: bool = True) -> None:
    for rank, mine in enumerate(placed):
        verify.arrange(mine, verify.expectation(case, rank, seed, exact))


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from([n for n in vocabulary.COLLECTIVES if n != "barrier"]))
    dtype = draw(st.sampled_from(list(DTYPES)))
    return make_case(
        name,
        draw(st.integers(1, 3000)),
        dtype,
        draw(st.integers(1, 5)),
        draw(st.sampled_from([op for op in vocabulary.OPS if traits.has_op(dtype, op)])),
        draw(st.sampled_from(vocabulary.PLACEMENTS)),
        draw(st.sampled_from(vocabulary.MEMORIES)),
    )


@given(any_case(), st.integers(0, 2**40))
def test_a_right_result_passes(case: Case, seed: int) -> None:
    placed = place(case)
    arrange(case, placed, seed)
    perform(case, placed)
    assert list(checked(case, placed, seed)) == [None] * case.ranks


@given(any_case(), st.data())
def test_one_wrong_bit_in_an_output_is_seen_and_named(case: Case, data: st.DataObject) -> None:
    placed = place(case)
    arrange(case, placed)
    perform(case, placed)
    ranks = [rank for rank, p in enumerate(placed) if p.buffers.out is not None and p.buffers.out.size]
    rank = data.draw(st.sampled_from(ranks))
    out = placed[rank].buffers.out
    assert out is not None
    flat = out.reshape(-1)
    element = data.draw(st.integers(0, flat.size - 1))
    before = flat[element].copy()
    raw = flat.view(np.uint8)
    raw[element * flat.itemsize + data.draw(st.integers(0, flat.itemsize - 1))] ^= np.uint8(
        1 << data.draw(st.integers(0, 7))
    )
    message = list(checked(case, placed))[rank]
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        both_nan = np.isnan(np.float64(before)) and np.isnan(np.float64(flat[element]))
    if not both_nan:
        assert message is not None
        assert f"element {element} is" in message


def test_a_signalling_nan_is_a_wrong_element_like_any() -> None:
    dtype = np.dtype(ml_dtypes.bfloat16)
    got, want = np.array([0x7F81], np.uint16).view(dtype), np.ones(1, dtype)
    assert verify.differences(got, [verify.Piece(0, 1, want)])[0] == 1
    assert verify.differences(got, [verify.Piece(0, 1, np.array([np.nan], dtype))])[0] == 0


@pytest.mark.parametrize("name", [n for n in vocabulary.COLLECTIVES if n != "barrier"])
def test_an_output_that_is_not_written_is_seen(name: str) -> None:
    case = make_case(name, 4096, "f32", 3)
    placed = place(case)
    arrange(case, placed)
    messages = list(checked(case, placed))
    assert [m is not None for m in messages] == [p.buffers.out is not None for p in placed]


def test_a_stale_result_is_seen() -> None:
    case = make_case("all_reduce", 4096, "i8", 2)
    placed = place(case)
    arrange(case, placed, seed=1)
    perform(case, placed)
    stale = [p.buffers.out.copy() for p in placed if p.buffers.out is not None]
    arrange(case, placed, seed=2)
    for mine, old in zip(placed, stale, strict=True):
        assert mine.buffers.out is not None
        mine.buffers.out[...] = old
    assert None not in list(checked(case, placed, seed=2))


def test_a_changed_input_is_seen() -> None:
    case = make_case("all_gather", 4096, "f32", 2)
    placed = place(case)
    arrange(case, placed)
    perform(case, placed)
    x = placed[1].buffers.x
    assert x is not None
    x[7] += 1
    assert [m and "changed 1 element" in m for m in checked(case, placed)] == [None, True]


@pytest.mark.parametrize("placement", vocabulary.PLACEMENTS)
def test_a_write_past_the_end_is_seen(placement: str) -> None:
    case = make_case("all_reduce", 1000, "f32", 2, placement=placement)
    placed = place(case)
    arrange(case, placed)
    perform(case, placed)
    placed[0].guards[0][3] = 0
    assert "wrote past" in str(next(checked(case, placed)))


@pytest.mark.parametrize("memory", vocabulary.MEMORIES)
@pytest.mark.parametrize("offset", [0, 4, 16, 4092])
def test_buffers_lie_where_the_case_says(offset: int, memory: str) -> None:
    for name in vocabulary.COLLECTIVES:
        case = make_case(name, 1000, "f32", 2, memory=memory, offset=offset)
        for one in place(case):
            found = [one.buffers.x, one.buffers.out, one.buffers.spare]
            starts = {array.ctypes.data % 4096 for array in found if array is not None}
            assert starts <= {offset if name != "barrier" else 0}
            one.prime()  # up to the end of the input
            assert one.buffers.x is None or (one.buffers.x == 1).all()


@pytest.mark.parametrize("placement", vocabulary.PLACEMENTS)
def test_an_input_that_is_written_anew_has_its_bytes(placement: str) -> None:
    for name in vocabulary.COLLECTIVES:
        case = make_case(name, 1000, "f32", 2, placement=placement, offset=4)
        placed = place(case)
        arrange(case, placed)
        for one in placed:
            region, _ = one.read
            before = region.memory.copy()
            one.rewrite()
            assert (region.memory == before).all()
            region.memory.flags.writeable = False
            with pytest.raises(ValueError, match="read-only"):
                one.rewrite()  # it does write
            region.memory.flags.writeable = True


@pytest.mark.parametrize("placement", vocabulary.PLACEMENTS)
def test_a_write_before_a_buffer_is_seen(placement: str) -> None:
    case = make_case("all_reduce", 1000, "f32", 2, placement=placement, offset=16)
    placed = place(case)
    arrange(case, placed)
    perform(case, placed)
    assert list(checked(case, placed)) == [None, None]
    region, _ = placed[1].written
    region.memory[15] = 0
    assert "wrote past" in str(list(checked(case, placed))[1])


def test_the_data_is_fresh_random_and_known_to_all() -> None:
    case = make_case("all_reduce", 4000, "f32", 2)
    one, again, other, later = (
        verify.random_block(case, rank, seed, 1000) for rank, seed in ((0, 1), (0, 1), (1, 1), (0, 2))
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, later)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_no_product_or_sum_leaves_the_range(dtype: str, ranks: int) -> None:
    for op in ("sum", "prod", "avg"):
        case = make_case("all_reduce", 8000, dtype, ranks, op=op)
        blocks = [verify.random_block(case, rank, 5, 1000) for rank in range(ranks)]
        values = verify.combine(blocks, op, dtype).astype(np.float64)
        assert np.all(np.isfinite(values))
        if op == "prod":
            assert np.all(np.abs(values) >= 1 / 32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_roundoffs_are_those_of_the_formats(dtype: str) -> None:
    assert verify.ROUNDOFF[dtype] == float(ml_dtypes.finfo(DTYPES[dtype]).eps) / 2


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
def test_the_bound_admits_every_order_of_combination(dtype: str, op: str) -> None:
    ranks, kind = 5, DTYPES[dtype]
    case = make_case("all_reduce", 2000 * kind.itemsize, dtype, ranks, op=op)
    placed = place(case)
    rng = np.random.default_rng(3)
    for _ in range(4):
        arrange(case, placed, exact=False)
        blocks = [p.buffers.x.copy() for p in placed if p.buffers.x is not None]
        total = blocks[order[0]] if (order := rng.permutation(ranks)).size else blocks[0]
        for rank in order[
            1:
        ]:  # rounded to the narrow type at every step, as a library without a wide sum would
            total = total * blocks[rank] if op == "prod" else total + blocks[rank]
        if op == "avg":
            total = (total / kind.type(ranks)).astype(kind)
        for mine in placed:
            assert mine.buffers.out is not None
            mine.buffers.out[...] = total
        assert list(checked(case, placed, exact=False)) == [None] * ranks


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_the_bound_refuses_larger_errors(op: str) -> None:
    case = make_case("all_reduce", 4000, "f32", 2, op=op)
    placed = place(case)
    arrange(case, placed, exact=False)
    perform(case, placed)
    out, x = placed[0].buffers.out, [p.buffers.x for p in placed]
    assert out is not None
    exact = [Fraction(float(part[11])) for part in x if part is not None]
    size = sum(map(abs, exact)) if op == "sum" else abs(exact[0] * exact[1])
    out[11] += np.float32(float(size) * 2.0**-22)
    message = next(checked(case, placed, exact=False))
    assert message is not None
    assert "element 11" in message


def test_buffers_longer_than_the_period_are_checked_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "PERIOD", 97)
    for name in vocabulary.COLLECTIVES:
        case = make_case(name, 4096, "i32", 3)
        placed = place(case)
        arrange(case, placed)
        perform(case, placed)
        assert list(checked(case, placed)) == [None] * 3
        out = placed[0].buffers.out
        if out is not None:
            out.reshape(-1)[-1] ^= 1
            assert f"element {out.size - 1} is" in str(next(checked(case, placed)))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("wire", quantised.WIRES)
@pytest.mark.parametrize("dtype", quantised.DTYPES)
def test_a_quantised_sum_is_held_to_its_bound(dtype: str, wire: str, op: str) -> None:
    """The exact result passes. A result off by twice the bound fails, as do the inputs of one rank."""
    case = make_case("all_reduce", 40_000, dtype, 4, op)
    expected = verify.expectation(case, 0, 7, False, wire=wire)
    blocks = [verify.expectation(case, r, 7, False, wire=wire).x[0].block for r in range(4)]
    (piece,) = expected.out
    good = quantised.all_reduce(blocks, op, wire)
    assert verify.differences(good, (piece,)) == (0, None)
    exact, allowed = piece.allowed or (None, None)
    share = verify.share_of_bound(good, (piece,), verify.NUMPY)
    assert 0.1 < share < 1 and share == np.max(np.abs(good.astype("f8") - exact) / allowed)
    assert verify.differences((exact + 2 * allowed).astype(good.dtype), (piece,))[0] == len(good)
    assert verify.differences(blocks[0], (piece,))[0] > len(good) // 2


def test_the_bound_is_stated() -> None:
    exact = make_case("all_reduce", 8, "f32", 4)
    assert verify.bound_text(exact, bit_exact=True) == "bit-exact"
    assert "n = 4 ranks, u = 6e-08" in verify.bound_text(exact, bit_exact=False)
    assert verify.bound_text(make_case("all_reduce", 8, "f32", 4, op="max"), bit_exact=False) == "bit-exact"
    assert verify.bound_text(make_case("all_gather", 8, "f32", 4), bit_exact=False) == "bit-exact"
    barrier = make_case("barrier", 8, "f32", 4)
    assert verify.bound_text(barrier, bit_exact=True) == "nobody left before all had entered"
    assert "1/127 of the largest" in verify.bound_text(exact, bit_exact=False, wire="int8")
