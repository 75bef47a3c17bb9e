"""The arrays of mixture of experts: views of the layer's memory, in the library of x, which keep it alive."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import threads
import unisono
from moe_reference import quantised

F32 = np.float32
HIDDEN, MOST = 160, 4
IDX = np.array([[0, 1], [1, 0], [1, -1]])
X = np.linspace(-3, 3, 3 * HIDDEN, dtype=F32).reshape(3, HIDDEN)
FIELDS = (
    "x more scales topk_idx topk_weights counts offsets source_rows expert_rows row_expert rows dropped"
    " handle"
).split()


@pytest.fixture
def alone() -> Any:
    with threads.team(1) as comms:
        yield comms[0]


def test_what_a_layer_tells(alone: unisono.Communicator) -> None:
    options = unisono.MoeOptions("expert_major", 4, "mx", capacity=9, drop=True, more_bytes=5, handles=2)
    moe = alone.moe(2, 1, HIDDEN, MOST, ml_dtypes.bfloat16, options)
    assert (moe.num_experts, moe.top_k, moe.hidden, moe.max_tokens) == (2, 1, HIDDEN, MOST)
    assert (moe.local_experts, moe.rows_held, moe.dtype) == (2, 9, "bfloat16")
    told = moe.options
    assert (told.layout, told.alignment, told.scales, told.capacity) == ("expert_major", 4, "mx", 9)
    assert (told.drop, told.more_bytes, told.handles, told.host_counts) == (True, 5, 2, False)
    assert told.device is None
    default = alone.moe(2, 1, HIDDEN, MOST).options
    assert (default.layout, default.scales, default.capacity) == ("flat", None, None)


@pytest.mark.parametrize("layout", ["flat", "rank_major", "expert_major"])
def test_arrays_that_a_layout_has(alone: unisono.Communicator, layout: str) -> None:
    moe = alone.moe(2, 2, HIDDEN, MOST, "float32", unisono.MoeOptions(layout=layout))
    d = moe.dispatch(X, IDX)
    there = {name for name in FIELDS if getattr(d, name) is not None}
    absent = {"row_expert"} if layout != "expert_major" else {"topk_idx", "expert_rows"}
    assert there == {*FIELDS} - absent - {"scales", "topk_weights"}
    assert d.x is d.x and d.counts is d.counts
    assert d.more == () and d.rows.shape == () and int(d.rows) == d.rows_now


def test_arrays_are_views_without_a_copy(alone: unisono.Communicator) -> None:
    """The second dispatch after one overwrites its x."""
    moe = alone.moe(2, 2, HIDDEN, MOST, "float32")
    places = [moe.dispatch(X, IDX).x.ctypes.data for _ in range(4)]
    assert places[:2] == places[2:] and places[0] != places[1]
    first = moe.dispatch(X, IDX).x
    moe.dispatch(X, IDX)
    np.testing.assert_array_equal(first[:3], X)
    moe.dispatch(-X, IDX)
    np.testing.assert_array_equal(first[:3], -X)


def test_change_of_a_shape_stays_with_its_array(alone: unisono.Communicator) -> None:
    moe = alone.moe(2, 2, HIDDEN, MOST, "float32")
    for _ in range(3):
        x = moe.dispatch(X, IDX).x
        assert x.shape == (MOST, HIDDEN)
        x.resize(HIDDEN, MOST, refcheck=False)


def test_arrays_keep_the_layer_and_the_communicator() -> None:
    comm = unisono.init_threads(1)[0]
    moe = comm.moe(2, 2, HIDDEN, MOST, "float32")
    x = moe.dispatch(X, IDX).x
    alive = weakref.ref(comm), weakref.ref(moe)
    del comm, moe
    gc.collect()
    assert alive[0]() is not None and alive[1]() is None
    np.testing.assert_array_equal(x[:3], X)
    del x
    gc.collect()
    assert alive[0]() is None


def test_inputs_live_until_the_end(alone: unisono.Communicator) -> None:
    """A phase that has begun keeps the arrays, also if the caller drops them."""
    moe = alone.moe(2, 2, HIDDEN, MOST, "float32", unisono.MoeOptions(more_bytes=8))
    arrays = [X.copy(), np.arange(3), IDX.copy(), np.ones((3, 2), F32)]
    counts = [sys.getrefcount(one) for one in arrays]
    moe.dispatch_begin(tuple(arrays[:2]), *arrays[2:])
    during = [sys.getrefcount(one) for one in arrays]
    d = moe.dispatch_end()
    assert [sys.getrefcount(one) for one in arrays] == counts
    assert all(now > before for now, before in zip(during, counts, strict=True))
    y, bias = d.x.copy(), X.copy()
    counts = [sys.getrefcount(y), sys.getrefcount(bias)]
    moe.combine_begin(y, d.handle, bias=bias)
    assert sys.getrefcount(y) > counts[0] and sys.getrefcount(bias) > counts[1]
    np.testing.assert_array_equal(moe.combine_end(), X + X)
    assert [sys.getrefcount(y), sys.getrefcount(bias)] == counts


def test_rows_of_other_elements(alone: unisono.Communicator) -> None:
    """Any dtype and width comes as it went, also by a kept routing."""
    moe = alone.moe(2, 2, HIDDEN, MOST, ml_dtypes.bfloat16)
    handle = None
    for dtype, width in (
        ("u1", 7),
        (ml_dtypes.float8_e4m3fn, HIDDEN),
        ("f4", HIDDEN // 2),
        ("u1", 2 * HIDDEN),
    ):
        x = X.view(np.uint8)[:, : width * np.dtype(dtype).itemsize].copy().view(dtype)
        out = None if handle is None else np.zeros((MOST, width), dtype)
        d = moe.dispatch(x, IDX, handle=handle, out=out)
        handle = d.handle
        assert (d.x.dtype, d.x.shape) == (x.dtype, (MOST, width)) and (out is None or d.x is out)
        assert d.x[:3].tobytes() == x.tobytes()
    y = X.astype(ml_dtypes.bfloat16)
    assert moe.combine(y, handle).tobytes() == y.tobytes()


@pytest.mark.torch
def test_torch_rows_of_other_elements(alone: unisono.Communicator) -> None:
    import torch

    moe = alone.moe(2, 2, HIDDEN, MOST, torch.bfloat16, unisono.MoeOptions(more_bytes=8))
    values, scales = torch.from_numpy(X), torch.arange(6.0).reshape(3, 2)
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int8):
        x = values.to(dtype)
        d = moe.dispatch((x, scales), torch.from_numpy(IDX))
        assert d.x.dtype == dtype and d.x.shape == (MOST, HIDDEN)
        assert torch.equal(d.x[:3].view(torch.uint8), x.view(torch.uint8))
        assert torch.equal(d.more[0][:3], scales)


@pytest.mark.torch
@pytest.mark.parametrize("scales", [None, "e4m3_128", "mx"])
def test_torch_tensors(alone: unisono.Communicator, scales: str | None) -> None:
    import torch

    options = unisono.MoeOptions(scales=scales, more_bytes=8)
    moe = alone.moe(2, 2, HIDDEN, MOST, torch.bfloat16, options)
    x = torch.from_numpy(X).bfloat16()
    weights, payload = torch.ones(3, 2), torch.arange(3)
    d = moe.dispatch((x, payload), torch.from_numpy(IDX), weights)
    for name in FIELDS:
        if name not in ("more", "handle", "row_expert") and (scales or name != "scales"):
            assert isinstance(getattr(d, name), torch.Tensor), name
    assert torch.equal(d.more[0][:3], payload) and d.more[0].dtype == torch.int64
    assert torch.equal(d.topk_idx[: d.rows], torch.from_numpy(IDX).int())
    assert d.counts.tolist() == [2, 3] and int(d.rows) == 3
    if scales is None:
        assert d.x.dtype == torch.bfloat16 and torch.equal(d.x[:3], x)
    else:
        small, kept = quantised(X.astype(ml_dtypes.bfloat16), scales)
        assert d.x.dtype == torch.float8_e4m3fn
        np.testing.assert_array_equal(d.x[:3].view(torch.uint8).numpy(), small.view(np.uint8))
        np.testing.assert_array_equal(d.scales[:3].numpy(), kept)
    y = torch.ones(MOST, HIDDEN, dtype=torch.bfloat16)
    out = moe.combine(y, d.handle, bias=x)
    assert out.dtype == torch.bfloat16 and torch.equal(out, (x.float() + 1).bfloat16())
    d.x.requires_grad_(scales is None)
    assert not moe.dispatch((x, payload), torch.from_numpy(IDX)).x.requires_grad
