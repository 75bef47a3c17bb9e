"""Fused norms of GPUs in the bench, as far as they can be tested without one: on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from unisono.bench import norm, verify, verify_norm  # noqa: E402
from unisono.bench.backends import norms  # noqa: E402
from unisono.bench.buffers import Placed, Pools  # noqa: E402
from unisono.bench.cuda import memory  # noqa: E402
from unisono.bench.cuda import verify as cuda_verify  # noqa: E402
from unisono.cli.asked import Asked  # noqa: E402
from unisono.cli.resolve import options_of  # noqa: E402
from unisono.records import Case  # noqa: E402

pytestmark = pytest.mark.torch
HERE = cuda_verify.arithmetic("cpu")


def a_case(ranks: int, dtype: str) -> Case:
    return norm.case(ranks, 300 * norm.KIB, 520, dtype, mode="graph", device="cuda")


def placed(case: Case) -> Placed:
    pools = Pools([case], 0, lambda size: memory.TensorRegion(torch.empty(size, dtype=torch.uint8)))
    return pools.place(case)


@pytest.mark.parametrize("dtype", ["u8", "i64", "f32", "f16", "bf16", "f8e4m3"])
def test_an_array_is_a_tensor_and_an_array_again(dtype: str) -> None:
    array = np.arange(64, dtype=np.uint8).view(memory.DTYPES[dtype])
    tensor = memory.tensor_of(array, "cpu")
    assert tensor.dtype == memory.torch_dtype(dtype)
    assert memory.numpy_of(tensor, dtype).tobytes() == array.tobytes()


@pytest.mark.parametrize("bit_exact", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_reference_on_tensors_has_the_bits_of_that_of_numpy(dtype: str, bit_exact: bool) -> None:
    case = a_case(3, dtype)
    on_host = replace(
        verify.NUMPY, random_block=lambda *what: memory.numpy_of(HERE.random_block(*what), dtype)
    )
    one, other = (verify_norm.expectation(case, 1, 5, bit_exact, kind) for kind in (HERE, on_host))
    for tensor, wanted in zip((*one.x, *one.out), (*other.x, *other.out), strict=True):
        assert (tensor.start, tensor.count) == (wanted.start, wanted.count)
        assert memory.numpy_of(tensor.block, dtype).tobytes() == wanted.block.tobytes()
        for got, bound in zip(tensor.allowed or (), wanted.allowed or (), strict=True):
            np.testing.assert_array_equal(got.numpy(), bound)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_torch_after_a_sum_is_right_and_a_wrong_element_is_noticed(dtype: str) -> None:
    case = a_case(2, dtype)
    where, expected = placed(case), verify_norm.expectation(case, 0, 3, False, HERE)
    other = torch.empty_like(where.buffers.x)
    HERE.write(other.reshape(-1), verify_norm.expectation(case, 1, 3, False, HERE).x)
    verify.arrange(where, expected, HERE)
    rows = norm.shape(case).rows

    def summed(tensor: Any) -> Any:
        return partial(tensor.add_, other[:rows].reshape(-1))

    call = norms.by_torch(case, where.buffers, lambda tensor, _: tensor.reshape(-1), summed)
    call()
    call.result()
    assert verify.inspect(case, where, expected, HERE) is None
    where.buffers.out[rows // 2, 7] *= 1.5
    assert "1 wrong element(s) of the output" in str(verify.inspect(case, where, expected, HERE))


def test_cases_are_of_graphs_and_not_quantised_unless_asked() -> None:
    found = options_of(Asked(norm=True, device="cuda", hidden="7168", sizes="14K", dtypes="bf16"), [])
    assert found.backends == ["unisono", "nccl", "unisono:apart"]
    cases = found.grid(2)
    assert {(case.device, case.collective) for case in cases} == {("cuda", "all_reduce_rms_norm")}
    assert [norm.shape(case).quant for case in cases] == ["none"] * len(cases)
    assert {case.mode for case in cases} >= {"graph"}
