"""The fused matmuls as custom ops of PyTorch: what torch.compile traces, and their gradients.

An op knows a communicator by its id. Gradients are those of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...communicator import with_id
from . import run
from .chunk import torch_mm

Grads = Sequence[torch.Tensor | None]


def _custom_op(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"unisono::{name}", mutates_args=(), schema=schema)


def _backward_chunks(chunks: int) -> int:
    """Returns 1 for the naive form, which stays naive, else 0."""
    return 1 if chunks == 1 else 0


# comm: its id(). dim: the axis that is gathered or shared out, of `extent` in all. chunks: 0: as planned.
@_custom_op(
    "all_gather_matmul",
    "(Tensor a, Tensor[] bs, int comm, int dim, SymInt? extent, int chunks) -> (Tensor, Tensor[])",
)  # type: ignore[untyped-decorator]
def all_gather_matmul(
    a: torch.Tensor, bs: Sequence[torch.Tensor], comm: int, dim: int, extent: int | None, chunks: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    of = with_id(comm)
    extent = a.shape[dim] * of.size if extent is None else extent
    whole, products = run.all_gather_matmul(of, a, bs, dim, extent, chunks, torch_mm)
    assert whole is not None
    return (a.clone() if of.size == 1 else whole), products  # an op's output is none of its inputs


@all_gather_matmul.register_fake  # type: ignore[untyped-decorator]
def _(
    a: torch.Tensor, bs: Sequence[torch.Tensor], comm: int, dim: int, extent: int | None, chunks: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    of = with_id(comm)
    extent = a.shape[dim] * of.size if extent is None else extent
    rest = a.movedim(dim, 0).shape[1:-1]
    whole = torch.empty_like(a) if of.size == 1 else a.new_empty(extent, *rest, a.shape[-1]).movedim(0, dim)
    return whole, [a.new_empty(extent, *rest, b.shape[1]).movedim(0, dim) for b in bs]


def _keep_of_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, bs, ctx.comm, ctx.dim, _, ctx.chunks = inputs
    ctx.save_for_backward(output[0] if any(b.requires_grad for b in bs) else None, *bs)
    ctx.set_materialize_grads(False)


def _backward_of_gather(ctx: Any, whole_grad: torch.Tensor | None, grads: Grads | None) -> tuple[Any, ...]:
    whole, *bs = ctx.saved_tensors
    grads = [None] * len(bs) if grads is None else grads
    pairs = [(grad, b) for grad, b in zip(grads, bs, strict=True) if grad is not None]
    a_grad = None
    if ctx.needs_input_grad[0]:
        if pairs:  # of several: two matrices whose product is the sum of grad @ B.T
            grad, b = (
                pairs[0] if len(pairs) == 1 else (torch.cat(one, -1) for one in zip(*pairs, strict=True))
            )
            chunks = _backward_chunks(ctx.chunks)
            a_grad = matmul_reduce_scatter(grad, b.t(), ctx.comm, ctx.dim, "sum", chunks)
        if whole_grad is not None:
            shared = reduce_scatter(whole_grad, ctx.comm, ctx.dim)
            a_grad = shared if a_grad is None else a_grad + shared
    bs_grads = [
        _transposed_product(whole, grad) if grad is not None and needs else None
        for grad, needs in zip(grads, ctx.needs_input_grad[1], strict=True)
    ]
    return a_grad, bs_grads, None, None, None, None


def _transposed_product(a: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of B from the gradient of A @ B."""
    return a.reshape(-1, a.shape[-1]).t() @ grad.reshape(-1, grad.shape[-1])


all_gather_matmul.register_autograd(_backward_of_gather, setup_context=_keep_of_gather)


@_custom_op("matmul_reduce_scatter", "(Tensor a, Tensor b, int comm, int dim, str op, int chunks) -> Tensor")  # type: ignore[untyped-decorator]
def matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, comm: int, dim: int, op: str, chunks: int
) -> torch.Tensor:
    return run.matmul_reduce_scatter(with_id(comm), a, b, dim, op, chunks, torch_mm)


@matmul_reduce_scatter.register_fake  # type: ignore[untyped-decorator]
def _(a: torch.Tensor, b: torch.Tensor, comm: int, dim: int, op: str, chunks: int) -> torch.Tensor:
    rest = a.movedim(dim, 0).shape[1:-1]
    return a.new_empty(run.share(a.shape[dim], with_id(comm)), *rest, b.shape[1]).movedim(0, dim)


def _keep_of_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.comm, ctx.dim, ctx.op, ctx.chunks = inputs
    ctx.save_for_backward(a, b)


def _backward_of_scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    if ctx.op == "avg":
        grad = grad / with_id(ctx.comm).size
    needs_a, needs_b, *_ = ctx.needs_input_grad
    chunks = _backward_chunks(ctx.chunks)
    bs = [b.t()] if needs_a else []
    whole, products = all_gather_matmul(grad, bs, ctx.comm, ctx.dim, a.shape[ctx.dim], chunks)
    a_grad = products[0] if needs_a else None
    return a_grad, _transposed_product(a, whole) if needs_b else None, None, None, None, None


matmul_reduce_scatter.register_autograd(_backward_of_scatter, setup_context=_keep_of_scatter)


@_custom_op("reduce_scatter", "(Tensor x, int comm, int dim) -> Tensor")  # type: ignore[untyped-decorator]
def reduce_scatter(x: torch.Tensor, comm: int, dim: int) -> torch.Tensor:
    of = with_id(comm)
    return x.clone() if of.size == 1 else run.reduce_scatter(of, x, dim)


@reduce_scatter.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, comm: int, dim: int) -> torch.Tensor:
    of = with_id(comm)
    if of.size == 1:
        return torch.empty_like(x)
    rest = x.movedim(dim, 0).shape[1:-1]
    return x.new_empty(run.share(x.shape[dim], of), *rest, x.shape[-1]).movedim(0, dim)


def _keep_of_shares(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.comm, ctx.dim = inputs
    ctx.extent = x.shape[ctx.dim]


def _backward_of_shares(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return all_gather_matmul(grad, [], ctx.comm, ctx.dim, ctx.extent, 1)[0], None, None


reduce_scatter.register_autograd(_backward_of_shares, setup_context=_keep_of_shares)


@_custom_op("all_reduce", "(Tensor x, int comm) -> Tensor")  # type: ignore[untyped-decorator]
def all_reduce(x: torch.Tensor, comm: int) -> torch.Tensor:
    return with_id(comm).all_reduce(x.contiguous())


@all_reduce.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, comm: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep_of_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.comm = inputs[1]


all_reduce.register_autograd(lambda ctx, grad: (all_reduce(grad, ctx.comm), None), setup_context=_keep_of_sum)


# split: m, n, or empty: as planned.
@_custom_op("matmul_all_reduce", "(Tensor a, Tensor b, int comm, str split, int chunks) -> Tensor")  # type: ignore[untyped-decorator]
def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, comm: int, split: str, chunks: int) -> torch.Tensor:
    of = with_id(comm)
    return run.matmul_all_reduce(of, a.contiguous(), b, split, chunks, None, torch_mm)[0]


@matmul_all_reduce.register_fake  # type: ignore[untyped-decorator]
def _(a: torch.Tensor, b: torch.Tensor, comm: int, split: str, chunks: int) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _keep_of_product(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, ctx.comm, *_ = inputs
    ctx.save_for_backward(a, b)


def _backward_of_product(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    return *_grads_of_product(ctx, a, b, grad), None, None, None


def _grads_of_product(
    ctx: Any, a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of A and B. grad: of this rank's copy of the sum."""
    whole = all_reduce(grad, ctx.comm)
    needs_a, needs_b, *_ = ctx.needs_input_grad
    return whole @ b.t() if needs_a else None, a.t() @ whole if needs_b else None


matmul_all_reduce.register_autograd(_backward_of_product, setup_context=_keep_of_product)


@_custom_op(
    "matmul_all_reduce_rms_norm",
    "(Tensor a, Tensor b, Tensor residual, Tensor weight, float eps, "
    "int comm, str split, int chunks) -> (Tensor, Tensor)",
)  # type: ignore[untyped-decorator]
def matmul_all_reduce_rms_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    comm: int,
    split: str,
    chunks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    of = with_id(comm)
    norm = (residual.contiguous(), weight.contiguous(), eps)
    out, residual_out = run.matmul_all_reduce(of, a.contiguous(), b, split, chunks, norm, torch_mm)
    assert residual_out is not None
    return out, residual_out


@matmul_all_reduce_rms_norm.register_fake  # type: ignore[untyped-decorator]
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    comm: int,
    split: str,
    chunks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return a.new_empty(a.shape[0], b.shape[1]), a.new_empty(a.shape[0], b.shape[1])


def _keep_of_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b, _, weight, ctx.eps, ctx.comm, *_ = inputs
    ctx.save_for_backward(a, b, weight, output[1])


def _backward_of_norm(ctx: Any, grad: torch.Tensor, residual_grad: torch.Tensor) -> tuple[Any, ...]:
    """Each rank's residual and weight have the gradient of this rank's own outputs."""
    a, b, weight, rows = ctx.saved_tensors
    v, g = rows.float(), grad.float()
    inverse = (v.square().mean(1, keepdim=True) + ctx.eps).rsqrt()
    unit = v * inverse
    weighted = g * weight.float()
    total = inverse * (weighted - unit * (weighted * unit).mean(1, keepdim=True)) + residual_grad.float()
    own = total.to(rows.dtype)
    weight_grad = (g * unit).sum(0).to(weight.dtype)
    return *_grads_of_product(ctx, a, b, own), own, weight_grad, None, None, None, None


matmul_all_reduce_rms_norm.register_autograd(_backward_of_norm, setup_context=_keep_of_norm)
