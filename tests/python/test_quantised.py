"""all_reduce(wire=): the bits of the definition on every rank, within the stated bound; else refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import quantised
import ranks
import threads
import unisono
from reference import DTYPES, difference

RANKS = (1, 2, 3, 4, 5, 8)
COUNTS = (0, 1, 31, 32, 33, 1000, 65_537)  # the last is more than a round of chunks
F32 = np.float32


def numbers(rng: np.random.Generator, count: int, dtype: str) -> Any:
    """Returns numbers of many magnitudes, with zeros, denormals and blocks of zeros. Sums stay finite."""
    spread = (-4, 3) if dtype == "f16" else (-30, 30)
    x = rng.standard_normal(count) * 10.0 ** np.repeat(rng.uniform(*spread, count // 16 + 1), 16)[:count]
    x[rng.random(count) < 0.1] = 0.0
    x[rng.random(count) < 0.05] *= np.finfo(DTYPES[dtype]).tiny if dtype == "f16" else 1e-40
    x[count // 3 : count // 3 + 100] = 0.0
    return x.astype(DTYPES[dtype])


@pytest.mark.parametrize("wire", quantised.WIRES)
@pytest.mark.parametrize("n", RANKS)
def test_the_bits_and_the_bound(n: int, wire: str) -> None:
    rng = np.random.default_rng([n, len(wire)])
    with threads.team(n) as comms:
        for dtype in quantised.DTYPES:
            for op in ("sum", "avg"):
                for count in COUNTS:
                    xs = [numbers(rng, count, dtype) for _ in range(n)]
                    kept = [x.copy() for x in xs]
                    outs = threads.together(
                        comms, lambda c, xs=xs, op=op: c.all_reduce(xs[c.rank], op, wire=wire)
                    )
                    wanted = quantised.all_reduce(xs, op, wire)
                    assert all(difference(out, wanted) is None for out in outs), (dtype, op, count)
                    assert all(difference(x, was) is None for x, was in zip(xs, kept, strict=True))
                    exact, allowed = quantised.bound(xs, op, wire)
                    assert (np.abs(outs[0].astype(np.float64) - exact) <= allowed).all(), (dtype, op, count)


@pytest.mark.parametrize("wire", quantised.WIRES)
@pytest.mark.parametrize("n", [2, 3])
def test_any_bits_in_place_and_unaligned(n: int, wire: str) -> None:
    """Infinities and NaN make their block NaN on every rank; so do sums that overflow."""
    rng = np.random.default_rng(n)
    with threads.team(n) as comms:
        for dtype in quantised.DTYPES:
            size = DTYPES[dtype].itemsize
            xs = [rng.integers(0, 256, 5001 * size, np.uint8).view(DTYPES[dtype])[1:] for _ in range(n)]
            wanted = quantised.all_reduce(xs, "sum", wire)
            assert np.isnan(wanted.astype(F32)).any()
            if dtype != "f16":  # 1 in 32 patterns of f16 is not finite, so that hardly a block is left
                assert not np.isnan(wanted.astype(F32)).all()
            threads.together(comms, lambda c, xs=xs: c.all_reduce(xs[c.rank], out=xs[c.rank], wire=wire))
            assert all(difference(x, wanted) is None for x in xs), dtype


@pytest.mark.parametrize("wire", quantised.WIRES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite(wire: str, bad: float) -> None:
    def body(comm: unisono.Communicator) -> Any:
        x = np.ones(96, F32)
        if comm.rank == 1:
            x[40] = bad
        return comm.all_reduce(x, wire=wire)

    for out in threads.with_threads(3, body):
        assert (out[:32] == 3).all() and np.isnan(out[32:64]).all() and (out[64:] == 3).all()


@pytest.mark.parametrize("wire", quantised.WIRES)
def test_numbers_of_the_format_are_exact(wire: str) -> None:
    """Small integers stay exact, between ranks and in the sum."""
    rng = np.random.default_rng(1)
    xs = [rng.integers(-4, 5, 1000).astype(F32) for _ in range(3)]
    outs = threads.with_threads(3, lambda c: c.all_reduce(xs[c.rank], wire=wire))
    assert all((out == sum(xs)).all() for out in outs)


def test_across_processes_and_instruction_sets() -> None:
    """Every kernel gives the same bits, also over shared memory."""
    digests = set()
    for name, chunk in (("", "0"), ("", "4096"), ("baseline", "1")):
        env = {"UNISONO_ISA": name, "UNISONO_CHUNK_BYTES": chunk}
        digests |= {answer["result"] for answer in ranks.play(3, "basic_programs:quantised", env=env).ranks}
    assert len(digests) == 1


def test_usage_errors() -> None:
    x = np.ones(8, F32)
    with unisono.init() as comm:
        for arguments, words in (
            ({"wire": "fp4"}, "no wire 'fp4': use fp8 or int8"),
            ({"wire": "exact"}, "no wire 'exact'"),
            ({"wire": "fp8", "op": "max"}, "for sum and avg, not max"),
            ({"wire": "int8", "op": "prod"}, "for sum and avg, not prod"),
            ({"wire": "int8", "algorithm": "one_shot"}, "not by one_shot"),
        ):
            with pytest.raises(unisono.UsageError, match=words):
                comm.all_reduce(x, **arguments)
        for dtype in set(DTYPES) - set(quantised.DTYPES):
            with pytest.raises(unisono.UsageError, match=f"for f32, f16 and bf16, not {dtype}"):
                comm.all_reduce(x.astype(DTYPES[dtype]), wire="fp8")
        assert (comm.all_reduce(x * 1.001, wire="fp8", algorithm="two_shot") == x * F32(1.001)).all()
        assert comm.plan("all_reduce", 64, wire="int8") == "two_shot"
        with pytest.raises(unisono.UsageError, match="all_gather cannot quantise"):
            comm.plan("all_gather", 64, wire="int8")
