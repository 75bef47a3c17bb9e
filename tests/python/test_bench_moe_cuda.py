"""Mixture of experts of GPUs, as far as it can be tested without one: the reference on tensors, and torch's
permutation, on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from unisono.bench import moe, routes, verify, verify_moe  # noqa: E402
from unisono.bench.backends.base import moe_call  # noqa: E402
from unisono.bench.backends.one_gpu import MoeOps, Permuted  # noqa: E402
from unisono.bench.buffers import Placed, Pools  # noqa: E402
from unisono.bench.cuda import memory  # noqa: E402
from unisono.bench.cuda import verify as cuda_verify  # noqa: E402
from unisono.records import Case  # noqa: E402
from unisono.records.vocabulary import LAYOUTS, MOES, ROUTINGS  # noqa: E402

pytestmark = pytest.mark.torch
HERE = cuda_verify.arithmetic("cpu")
HIDDEN = 24


def a_case(name: str, ranks: int = 1, **other: Any) -> Case:
    values: dict[str, Any] = {"tokens": 29, "hidden": HIDDEN, "experts": 12, "top_k": 3, "dtype": "bf16"}
    return moe.case(name, ranks, **(values | other), mode="graph", device="cuda")


def array(tensor: Any, dtype: str) -> np.ndarray:
    return memory.numpy_of(tensor.contiguous(), dtype)


@pytest.mark.parametrize("bit_exact", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", MOES)
def test_the_reference_on_tensors_has_the_bits_of_that_of_numpy(
    name: str, routing: str, layout: str, dtype: str, bit_exact: bool
) -> None:
    case = a_case(name, 3, routing=routing, layout=layout, dtype=dtype)
    on_host = replace(verify.NUMPY, random_block=lambda *what: array(HERE.random_block(*what), dtype))
    for rank in range(3):
        one, other = (verify_moe.expectation(case, rank, 5, bit_exact, kind) for kind in (HERE, on_host))
        for mine, theirs in ((one.x, other.x), (one.out, other.out)):
            pieces = list(zip(mine, theirs, strict=True))
            for tensor, wanted in pieces:
                assert (tensor.start, tensor.count) == (wanted.start, wanted.count)
                np.testing.assert_array_equal(
                    array(tensor.block, dtype).view(np.uint8), wanted.block.view(np.uint8)
                )
                for got, bound in zip(tensor.allowed or (), wanted.allowed or (), strict=True):
                    np.testing.assert_allclose(got.numpy(), bound, rtol=1e-14)


def placed(case: Case) -> Placed:
    pools = Pools([case], 0, lambda size: memory.TensorRegion(torch.empty(size, dtype=torch.uint8)))
    return pools.place(case)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 29, 300])
@pytest.mark.parametrize("name", MOES)
def test_torch_permutes_and_sums_and_a_lost_row_is_noticed(name: str, tokens: int, dtype: str) -> None:
    case = a_case(name, tokens=tokens, dtype=dtype)
    where, expected = placed(case), verify_moe.expectation(case, 0, 3, False, HERE)
    verify.arrange(where, expected, HERE)
    calls = Permuted(case, where.buffers)
    call = moe_call(case, calls)
    call()
    given, error = verify_moe.with_result(case, 0, where, call.result())
    assert error is None
    assert verify.inspect(case, given, expected, HERE) is None
    result = given.buffers.out
    result[tokens // 2] += 1
    assert "wrong element(s) of the output" in str(verify.inspect(case, given, expected, HERE))
    _, error = verify_moe.with_result(case, 0, where, result[:-1])
    assert "rows of 24 have come, not" in str(error)


def test_the_map_of_moe_ops_is_that_of_a_stable_sort() -> None:
    """A map made by hand gives the rows in order again, whatever order they lie in."""
    case = a_case("moe_dispatch")
    where, expected = placed(case), verify_moe.expectation(case, 0, 3, False, HERE)
    verify.arrange(where, expected, HERE)
    calls = object.__new__(MoeOps)
    Permuted.__init__(calls, case, where.buffers)
    calls.route()
    pairs = routes.of(case).experts[0]
    by_expert = [(e, t, k) for e in range(12) for t in range(29) for k in range(3) if pairs[t, k] == e]
    for row, (_, token, place) in enumerate(by_expert):
        assert int(calls.map[place * 29 + token]) == row
    order = torch.randperm(len(by_expert))  # row i lies at order[i]
    calls.rows = torch.empty(len(by_expert), HIDDEN, dtype=torch.bfloat16)
    calls.rows[order] = where.buffers.x[[token for _, token, _ in by_expert]]
    calls.map = order[calls.map.long()].int()
    given, error = verify_moe.with_result(case, 0, where, calls.received())
    assert error is None
    assert verify.inspect(case, given, expected, HERE) is None
