"""unisono.torch.moe: results and gradients against a mixture of experts in plain torch, and the errors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

import threads
import unisono

pytestmark = pytest.mark.torch
if find_spec("torch") is not None:
    import torch

    import torch_moe
    import unisono.torch

TOKENS = (5, 0, 7)  # of each rank
EXPERTS, TOP_K = 6, 3


def make(comm: unisono.Communicator, layout: str, **more: Any) -> Any:
    bytes_ = unisono.torch.moe.place_bytes(TOP_K) + 8
    options = unisono.MoeOptions(layout=layout, more_bytes=bytes_, **more)
    return comm.moe(EXPERTS, TOP_K, torch_moe.HIDDEN, max(TOKENS), dtype="float32", options=options)


def inputs(rank: int, masked: bool) -> tuple[Any, Any, Any]:
    x, idx, weights = torch_moe.batch(TOKENS[rank], EXPERTS, TOP_K, 10 + rank, masked)
    return x.requires_grad_(), idx, weights.requires_grad_()


def layer(moe: Any, rank: int, x: Any, idx: Any, weights: Any, bias: Any = None) -> tuple[Any, Any]:
    """Returns a layer's output, and its experts."""
    experts = torch_moe.Experts(EXPERTS)
    received = unisono.torch.moe.dispatch(moe, x, idx, weights)
    run = torch_moe.by_experts if moe.options.layout == "expert_major" else torch_moe.by_rows
    y = run(experts, rank * moe.local_experts, received)
    return unisono.torch.moe.combine(y, received, bias=bias), experts


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("layout", "more"),
    [("flat", {}), ("rank_major", {}), ("expert_major", {}), ("expert_major", {"alignment": 4})],
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients(n: int, layout: str, more: dict[str, Any], masked: bool) -> None:
    """Gradients of x, weights, bias and experts, with a rank that has no token."""

    def body(comm: unisono.Communicator) -> Any:
        x, idx, weights = inputs(comm.rank, masked)
        bias = torch.ones(len(x), torch_moe.HIDDEN, requires_grad=True)
        out, experts = layer(make(comm, layout, **more), comm.rank, x, idx, weights, bias)
        of = [x, weights, bias, experts.first, experts.second]
        return out, torch_moe.gradients((out * torch.cos(out)).sum(), of)

    came = threads.with_threads(n, body)
    together = torch_moe.Experts(EXPERTS)
    sums = [torch.zeros_like(together.first), torch.zeros_like(together.second)]
    for rank, (out, (x_grad, weights_grad, bias_grad, *experts_grad)) in enumerate(came):
        x, idx, weights = inputs(rank, masked)
        bias = torch.ones(len(x), torch_moe.HIDDEN, requires_grad=True)
        expected = torch_moe.reference(together, x, idx, weights) + bias
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        of = [x, weights, bias, together.first, together.second]
        expected_grads = torch_moe.gradients((expected * torch.cos(expected)).sum(), of)
        for mine, theirs in zip((x_grad, weights_grad, bias_grad), expected_grads[:3], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        for i, one in enumerate(experts_grad):
            sums[i] += one - expected_grads[3 + i]
    for one in sums:  # an expert's gradient comes from the tokens of all ranks
        torch.testing.assert_close(one, torch.zeros_like(one), rtol=0, atol=1e-3)


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_ranks_without_rows(layout: str) -> None:
    """Backward is collective also for a rank whose y has left the graph, and if no rank has a token."""

    def body(comm: unisono.Communicator) -> Any:
        moe = make(comm, layout)
        of_first_rank = EXPERTS // comm.size
        found = []
        for tokens in (4, 0):
            x, idx, weights = torch_moe.batch(tokens, of_first_rank, TOP_K, comm.rank, False)
            of = [x.requires_grad_(), weights.requires_grad_()]
            out, _ = layer(moe, comm.rank, x, idx, weights)
            found.append(torch_moe.gradients(out.square().sum(), of))
        return found

    for rank, (some, none) in enumerate(threads.with_threads(3, body)):
        x, idx, weights = torch_moe.batch(4, EXPERTS // 3, TOP_K, rank, False)
        of = [x.requires_grad_(), weights.requires_grad_()]
        out = torch_moe.reference(torch_moe.Experts(EXPERTS), x, idx, weights)
        for mine, theirs in zip(some, torch_moe.gradients(out.square().sum(), of), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert [tuple(one.shape) for one in none] == [(0, torch_moe.HIDDEN), (0, TOP_K)]


@pytest.mark.parametrize("layout", ["flat", "rank_major", "expert_major"])
def test_a_dispatch_alone(layout: str) -> None:
    """The gradient of sums of received rows and weights: how often x has gone out, and each weight once."""

    def body(comm: unisono.Communicator) -> None:
        moe = make(comm, layout)
        x, idx, weights = inputs(comm.rank, True)
        received = unisono.torch.moe.dispatch(moe, x, idx, weights)
        grads = torch_moe.gradients(received.x.sum() + received.topk_weights.sum(), [x, weights])
        owners = idx // moe.local_experts  # masked: -1
        if layout == "expert_major":
            times = (owners >= 0).sum(1)
        else:
            times = torch.stack([(owners == rank).any(1) for rank in range(comm.size)]).sum(0)
        assert torch.equal(grads[0], times[:, None].expand_as(x).float())
        assert torch.equal(grads[1], (idx >= 0).float())

    threads.with_threads(2, body)


def test_layers_that_share_a_moe() -> None:
    """Backward of several layers by routings that are all kept, with received rows long overwritten."""
    layers = 4

    def body(comm: unisono.Communicator) -> Any:
        moe = make(comm, "flat", handles=layers)
        x, idx, weights = inputs(comm.rank, False)
        h = x
        for _ in range(layers):
            out, _ = layer(moe, comm.rank, h, idx, weights)
            h = h + 0.1 * out
        return torch_moe.gradients(h.square().sum(), [x, weights])

    came = threads.with_threads(2, body)
    for rank, grads in enumerate(came):
        x, idx, weights = inputs(rank, False)
        h = x
        for _ in range(layers):
            h = h + 0.1 * torch_moe.reference(torch_moe.Experts(EXPERTS), h, idx, weights)
        for mine, theirs in zip(grads, torch_moe.gradients(h.square().sum(), [x, weights]), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_routing_that_is_no_longer_kept() -> None:
    def body(comm: unisono.Communicator) -> None:
        moe = make(comm, "flat", handles=1)
        x, idx, weights = inputs(comm.rank, False)
        out, _ = layer(moe, comm.rank, x, idx, weights)
        layer(moe, comm.rank, x, idx, weights)
        with pytest.raises(unisono.UsageError, match=r"no longer kept.*make the moe with more handles"):
            out.sum().backward()

    threads.with_threads(2, body)


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_quantised_rows(layout: str) -> None:
    """Weights have a gradient, though x has none, and the experts' rows are of another dtype than x."""

    def body(comm: unisono.Communicator) -> None:
        x, idx, weights = inputs(comm.rank, True)
        small, factors = (4 * x.detach()).to(torch.float8_e4m3fn), torch.full((len(x), 1), 0.25)
        moe, experts = make(comm, layout), torch_moe.Experts(EXPERTS)
        received = unisono.torch.moe.dispatch(moe, (small, factors), idx, weights)
        assert received.x.dtype == torch.float8_e4m3fn
        restored = replace(received, x=received.x.float() * received.more[0])
        run = torch_moe.by_experts if layout == "expert_major" else torch_moe.by_rows
        y = run(experts, comm.rank * moe.local_experts, restored)
        out = unisono.torch.moe.combine(y, received)
        again = weights.detach().requires_grad_()
        expected = torch_moe.reference(experts, small.float() / 4, idx, again)
        torch.testing.assert_close(out, expected)
        (got,) = torch_moe.gradients((out * out).sum(), [weights])
        (wanted,) = torch_moe.gradients((expected * expected).sum(), [again])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)

    threads.with_threads(2, body)


def test_received_tensors_are_the_callers_own() -> None:
    """Later dispatches leave x, payloads and weights as they are."""

    def body(comm: unisono.Communicator) -> None:
        moe = make(comm, "expert_major")
        x, idx, weights = inputs(comm.rank, False)
        marks = torch.arange(len(x), dtype=torch.int64) + 100 * comm.rank
        received = unisono.torch.moe.dispatch(moe, (x, marks), idx, weights)
        assert received.x.shape == (int(received.rows), torch_moe.HIDDEN)
        (came,) = received.more
        before = [one.detach().clone() for one in (received.x, came, received.topk_weights)]
        for _ in range(3):
            unisono.torch.moe.dispatch(moe, -x, idx.flip(0), weights)
        for mine, kept in zip(before, (received.x, came, received.topk_weights), strict=True):
            assert torch.equal(mine, kept.detach())
        sources = torch.stack([inputs(rank, False)[0][token] for rank, token in _pairs(came)])
        assert torch.equal(received.x, sources)

    threads.with_threads(3, body)


def _pairs(marks: Any) -> list[tuple[int, int]]:
    return [(mark // 100, mark % 100) for mark in marks.tolist()]


def test_only_what_needs_a_gradient_has_one() -> None:
    def body(comm: unisono.Communicator) -> None:
        moe = make(comm, "flat")
        x, idx, weights = inputs(comm.rank, False)
        received = unisono.torch.moe.dispatch(moe, x, idx, weights.detach())
        assert received.x.requires_grad and not received.topk_weights.requires_grad
        received = unisono.torch.moe.dispatch(moe, x.detach(), idx, weights)
        assert received.topk_weights.requires_grad and not received.x.requires_grad
        with torch.no_grad():
            out, _ = layer(moe, comm.rank, x, idx, weights)
        assert not out.requires_grad

    threads.with_threads(2, body)


def test_what_has_no_gradient() -> None:
    def body(comm: unisono.Communicator) -> None:
        x, idx, weights = inputs(comm.rank, False)
        scaled = make(comm, "flat", scales="mx")
        with pytest.raises(
            unisono.UsageError, match='scales="mx" has no gradient: make the Moe without scales'
        ):
            unisono.torch.moe.dispatch(scaled, x, idx, weights)
        received = unisono.torch.moe.dispatch(scaled, x.detach(), idx, weights.detach())
        assert received.x.dtype == torch.float8_e4m3fn and len(received.scales) == len(received.x)
        moe = make(comm, "flat")
        received = unisono.torch.moe.dispatch(moe, x, idx, weights)
        with pytest.raises(
            unisono.UsageError, match=r"y has rows of 12 torch.float16.*give rows of 12 torch.float32"
        ):
            unisono.torch.moe.combine(received.x.half(), received)
        unplaced = comm.moe(
            EXPERTS,
            TOP_K,
            torch_moe.HIDDEN,
            max(TOKENS),
            dtype="float32",
            options=unisono.MoeOptions(layout="expert_major"),
        )
        with pytest.raises(unisono.UsageError, match="more_bytes=16"):
            unisono.torch.moe.dispatch(unplaced, x, idx, weights)
        assert unisono.torch.moe.place_bytes(TOP_K) == 16

    threads.with_threads(2, body)


def test_import_without_torch() -> None:
    """unisono needs no torch, and unisono.torch says what is missing."""
    program = (
        "import sys; sys.modules['torch'] = None; import unisono\n"
        "try:\n import unisono.torch\nexcept ImportError as error: print(error)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert "pip install torch" in ended.stdout
