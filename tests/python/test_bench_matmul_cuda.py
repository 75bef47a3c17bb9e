"""Matmuls with their collective of GPUs in the bench, as far as they can be tested without one: on CPU
tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from unisono.bench import matmul, verify, verify_matmul  # noqa: E402
from unisono.bench.backends import matmuls  # noqa: E402
from unisono.bench.backends.base import load  # noqa: E402
from unisono.bench.buffers import Placed, Pools  # noqa: E402
from unisono.bench.cuda import memory  # noqa: E402
from unisono.bench.cuda import verify as cuda_verify  # noqa: E402
from unisono.cli.asked import Asked  # noqa: E402
from unisono.cli.resolve import options_of  # noqa: E402
from unisono.records import Case  # noqa: E402
from unisono.records.vocabulary import MATMUL, MATMULS, alone  # noqa: E402

pytestmark = pytest.mark.torch
HERE = cuda_verify.arithmetic("cpu")
RANKS = 2


def a_case(name: str, dtype: str = "bf16") -> Case:
    return matmul.case(name, RANKS, 260, 70, 300, dtype, "graph", "cuda")


def placed(case: Case, rank: int = 0) -> Placed:
    pools = Pools([case], rank, lambda size: memory.TensorRegion(torch.empty(size, dtype=torch.uint8)))
    return pools.place(case)


@pytest.mark.parametrize("bit_exact", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", [*MATMULS, MATMUL])
def test_the_reference_on_tensors_has_the_bits_of_that_of_numpy(
    name: str, dtype: str, bit_exact: bool
) -> None:
    case = a_case(name, dtype)
    one, other = (verify_matmul.expectation(case, 1, 5, bit_exact, kind) for kind in (HERE, verify.NUMPY))
    for tensor, wanted in zip((*one.x, *one.out), (*other.x, *other.out), strict=True):
        assert (tensor.start, tensor.count, tensor.offset) == (wanted.start, wanted.count, wanted.offset)
        assert memory.numpy_of(tensor.block, dtype).tobytes() == wanted.block.tobytes()
        for got, bound in zip(tensor.allowed or (), wanted.allowed or (), strict=True):
            np.testing.assert_array_equal(got.numpy(), bound)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", [*MATMULS, MATMUL])
def test_torch_mm_and_a_collective_are_right_and_a_wrong_element_is_noticed(name: str, dtype: str) -> None:
    """The collectives of two ranks are made of both ranks' tensors, in place of a library."""
    case = a_case(name, dtype)
    places = [placed(case, rank) for rank in range(RANKS)]
    expected = [verify_matmul.expectation(case, rank, 3, False, HERE) for rank in range(RANKS)]
    for where, one in zip(places, expected, strict=True):
        verify.arrange(where, one, HERE)
    of = [matmuls.tensors(case, r, one.buffers, lambda tensor, _: tensor) for r, one in enumerate(places)]
    products = [one.a @ one.b for one in of]

    def gathered(whole: Any, part: Any) -> Any:
        return lambda: whole.copy_(torch.cat([one.a for one in of]))

    def scattered(rank: int, part: Any, whole: Any) -> Any:
        return lambda: part.copy_(sum(products).chunk(RANKS)[rank])

    def summed(tensor: Any) -> Any:
        return lambda: tensor.copy_(sum(products))

    for rank, where in enumerate(places):
        library = matmuls.Collectives(gathered, partial(scattered, rank), summed)
        matmuls.by_torch(case, of[rank], library)()
        assert verify.inspect(case, where, expected[rank], HERE) is None
        where.buffers.out[7] += 3
        assert "1 wrong element(s) of the output" in str(verify.inspect(case, where, expected[rank], HERE))


def test_a_result_of_its_own_is_copied_for_the_checks_and_only_the_last_is_kept() -> None:
    results = [torch.full((2, 3), float(number)) for number in range(3)]
    out, left = torch.zeros(2, 3), iter(results)
    call = matmuls.returned(lambda: next(left), out)
    call()
    call()
    assert torch.equal(out, torch.zeros(2, 3))
    assert call.result() is None and torch.equal(out, results[1])


def test_a_timed_matmul_has_random_numbers_and_a_collective_ones() -> None:
    case = a_case("all_gather_matmul")
    where = placed(case)
    where.prime()
    numbers = where.buffers.x.float()
    assert abs(float(numbers.std()) - 1) < 0.1 and abs(float(numbers.mean())) < 0.1
    other = replace(where, random=False)
    other.prime()
    assert bool((where.buffers.x == 1).all())
    assert not placed(alone(case)[1]).random


def test_cases_are_those_of_llama_in_graphs_beside_nccl_and_torch() -> None:
    found = options_of(Asked(matmul=True, device="cuda", modes="graph"), [])
    assert found.backends == ["unisono", "nccl", "torch-async-tp", "unisono:apart"]
    cases = found.grid(2)
    assert {(case.device, case.dtype, case.mode) for case in cases} == {("cuda", "bf16", "graph")}
    fused = [case for case in cases if case.collective in MATMULS]
    assert len(fused) == 3 * (3 + 3 + 3)
    assert {case.matmul.m for case in fused if case.matmul} == {2048, 8192, 16384}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("matmul_all_reduce", "torch has no matmul fused with an all_reduce."),
        (MATMUL, "a matmul alone is torch.mm, which others measure."),
        ("all_gather_matmul", None),
    ],
)
def test_what_torch_has_no_form_of_is_left_out(name: str, why: str | None) -> None:
    assert load("torch-async-tp").supports(a_case(name)) == why
    uneven = matmul.case("matmul_reduce_scatter", RANKS, 261, 70, 300, "bf16", "graph", "cuda")
    assert "its reduce_scatter has equal shares" in str(load("torch-async-tp").supports(uneven))
