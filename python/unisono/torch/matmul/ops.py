"""The fused matmuls as custom ops of PyTorch: what torch.compile traces, and their gradients.

Ops know a communicator by a number. Matrices are 2-D. Gradients are those of the sum of all ranks' losses.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..._core import Communicator
from . import plan, run

_numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_next = itertools.count(1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def number_of(comm: Communicator) -> int:
    """Returns the communicator's number in this process."""
    number = _numbers.get(comm)
    if number is None:
        number = _numbers[comm] = next(_next)
        _communicators[number] = comm
    return number


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place_of(comm: Communicator) -> tuple[int, int]:
    """Returns rank and size."""
    return comm.rank, comm.size


def _custom_op(name: str) -> Any:
    return torch.library.custom_op(f"unisono::{name}", mutates_args=())


def _own_rows(rows: int, unit: int, comm: int) -> int:
    """Returns the length of this rank's share, also of a number of rows that is a symbol."""
    of = _communicators[comm]
    block = -(-(rows // max(unit, 1)) // of.size) * unit
    return min(block, max(rows - block * of.rank, 0))


def _chunks_of_backward(chunks: int) -> int:
    """Returns 1 for the naive form, which stays naive, else 0."""
    return 1 if chunks == 1 else 0


# unit: rows that stay with one rank. chunks: 0: as planned.
@_custom_op("all_gather_matmul")  # type: ignore[untyped-decorator]
def all_gather_matmul(
    a: torch.Tensor, bs: Sequence[torch.Tensor], comm: int, rows: int, unit: int, chunks: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    of = _communicators[comm]
    owned = plan.shares(rows, of.size, unit)
    return run.all_gather_matmul(of, a.contiguous(), bs, owned, chunks, run.torch_mm)


@all_gather_matmul.register_fake  # type: ignore[untyped-decorator]
def _(
    a: torch.Tensor, bs: Sequence[torch.Tensor], comm: int, rows: int, unit: int, chunks: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    products = [a.new_empty(rows, b.shape[1]) for b in bs]
    return a.new_empty(0 if _communicators[comm].size == 1 else rows, a.shape[1]), products


def _keep_of_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    a, bs, ctx.comm, ctx.rows, ctx.unit, ctx.chunks = inputs
    whole = a if _communicators[ctx.comm].size == 1 else output[0]
    ctx.save_for_backward(whole if any(b.requires_grad for b in bs) else None, *bs)
    ctx.set_materialize_grads(False)


def _backward_of_gather(ctx: Any, whole_grad: torch.Tensor | None, grads: Any) -> tuple[Any, ...]:
    whole, *bs = ctx.saved_tensors
    grads = [None] * len(bs) if grads is None else grads
    pairs = [(grad, b) for grad, b in zip(grads, bs, strict=True) if grad is not None]
    a_grad = None
    if ctx.needs_input_grad[0]:
        if pairs:
            left, right = (pairs[0][0], pairs[0][1].t()) if len(pairs) == 1 else _side_by_side(pairs)
            a_grad = matmul_reduce_scatter(
                left, right, ctx.comm, ctx.unit, "sum", _chunks_of_backward(ctx.chunks)
            )
        if whole_grad is not None and whole_grad.shape[0] == ctx.rows:
            shared = reduce_scatter(whole_grad, ctx.comm, ctx.unit)
            a_grad = shared if a_grad is None else a_grad + shared
    bs_grads = [
        whole.t() @ grad if grad is not None and needs else None
        for grad, needs in zip(grads, ctx.needs_input_grad[1], strict=True)
    ]
    return a_grad, bs_grads, None, None, None, None


def _side_by_side(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two matrices whose product is the sum of grad @ B.T."""
    return torch.cat([grad for grad, _ in pairs], 1), torch.cat([b for _, b in pairs], 1).t()


all_gather_matmul.register_autograd(_backward_of_gather, setup_context=_keep_of_gather)


@_custom_op("matmul_reduce_scatter")  # type: ignore[untyped-decorator]
def matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, comm: int, unit: int, op: str, chunks: int
) -> torch.Tensor:
    of = _communicators[comm]
    owned = plan.shares(a.shape[0], of.size, unit)
    return run.matmul_reduce_scatter(of, a.contiguous(), b, owned, op, chunks, run.torch_mm)


@matmul_reduce_scatter.register_fake  # type: ignore[untyped-decorator]
def _(a: torch.Tensor, b: torch.Tensor, comm: int, unit: int, op: str, chunks: int) -> torch.Tensor:
    return a.new_empty(_own_rows(a.shape[0], unit, comm), b.shape[1])


def _keep_of_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.comm, ctx.unit, ctx.op, ctx.chunks = inputs
    ctx.rows = a.shape[0]
    ctx.save_for_backward(a, b)


def _backward_of_scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    size = _communicators[ctx.comm].size
    if ctx.op == "avg":
        grad = grad / size
    bs = [b.t()] if ctx.needs_input_grad[0] else []
    whole, products = all_gather_matmul(
        grad, bs, ctx.comm, ctx.rows, ctx.unit, _chunks_of_backward(ctx.chunks)
    )
    whole = grad if size == 1 else whole
    b_grad = a.t() @ whole if ctx.needs_input_grad[1] else None
    return (products[0] if products else None), b_grad, None, None, None, None


matmul_reduce_scatter.register_autograd(_backward_of_scatter, setup_context=_keep_of_scatter)


@_custom_op("reduce_scatter")  # type: ignore[untyped-decorator]
def reduce_scatter(x: torch.Tensor, comm: int, unit: int) -> torch.Tensor:
    of = _communicators[comm]
    owned = plan.shares(x.shape[0], of.size, unit)
    return run.reduce_scatter(of, x.contiguous() if of.size > 1 else x.clone(), owned, "sum")


@reduce_scatter.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, comm: int, unit: int) -> torch.Tensor:
    return x.new_empty(_own_rows(x.shape[0], unit, comm), x.shape[1])


def _keep_of_shares(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.comm, ctx.unit = inputs
    ctx.rows = x.shape[0]


def _backward_of_shares(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    whole, _ = all_gather_matmul(grad, [], ctx.comm, ctx.rows, ctx.unit, 1)
    return (grad if _communicators[ctx.comm].size == 1 else whole), None, None


reduce_scatter.register_autograd(_backward_of_shares, setup_context=_keep_of_shares)


@_custom_op("all_reduce")  # type: ignore[untyped-decorator]
def all_reduce(x: torch.Tensor, comm: int) -> torch.Tensor:
    return _communicators[comm].all_reduce(x.contiguous())


@all_reduce.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, comm: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep_of_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.comm = inputs[1]


all_reduce.register_autograd(lambda ctx, grad: (all_reduce(grad, ctx.comm), None), setup_context=_keep_of_sum)


# split: m, n, or empty: as planned.
@_custom_op("matmul_all_reduce")  # type: ignore[untyped-decorator]
def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, comm: int, split: str, chunks: int) -> torch.Tensor:
    of = _communicators[comm]
    return run.matmul_all_reduce(of, a.contiguous(), b, split, chunks, None, run.torch_mm)[0]


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


@_custom_op("matmul_all_reduce_rms_norm")  # type: ignore[untyped-decorator]
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
    of = _communicators[comm]
    norm = (residual.contiguous(), weight.contiguous(), eps)
    out, residual_out = run.matmul_all_reduce(of, a.contiguous(), b, split, chunks, norm, run.torch_mm)
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
