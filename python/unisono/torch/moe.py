"""Dispatch and combine of `unisono.Moe` with gradients, as functions.

>>> moe = comm.moe(experts, top_k, hidden, max_tokens, dtype="float32")
>>> received = unisono.torch.moe.dispatch(moe, x, topk_idx, topk_weights)
>>> y = experts_of_this_rank(received)  # a row for each row of received.x
>>> out = unisono.torch.moe.combine(y, received)

Backward is collective too: the gradient of a dispatch is a combine, and the reverse, by the same routing.
Therefore
- all ranks call backward, in the same order, and `requires_grad` of x, of topk_weights and of y is the same
  on all of them. y of a rank that has received nothing may leave the graph, if x or topk_weights needs a
  gradient: `combine` keeps the order of backward then.
- the routing is kept until backward. MoeOptions.handles is at least the number of dispatches of a Moe from a
  forward to the end of its backward: layers that share the Moe, times micro-batches in flight. Otherwise
  backward raises UsageError on every rank.

`received.x`, `more`, `scales` and `topk_weights` are copies, since autograd keeps them for longer than a Moe
keeps its buffers. Rows that no token fills are zeros. The other fields are views, valid as long as the
routing is kept. For inference call `moe.dispatch` itself, which copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..errors import UsageError

__all__ = ["Received", "combine", "dispatch", "place_bytes"]


@dataclass(frozen=True)
class Received:
    """The outcome of a dispatch; see `unisono.MoeReceived` for its fields.

    If the host knows the number of rows (on CPUs, or with host_counts), flat and expert_major have exactly so
    many. Otherwise they have `moe.rows_held`, as rank_major always has.
    """

    x: torch.Tensor
    more: tuple[torch.Tensor, ...]
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    counts: torch.Tensor
    offsets: torch.Tensor
    source_rows: torch.Tensor
    expert_rows: torch.Tensor | None
    row_expert: torch.Tensor | None
    rows: torch.Tensor
    dropped: torch.Tensor
    handle: Any
    moe: Any
    link: torch.Tensor  # without elements: makes backward of every combine follow its dispatch's


def place_bytes(top_k: int) -> int:
    """Returns the bytes of MoeOptions.more_bytes that `dispatch` needs for the gradient of topk_weights.

    Only the layout expert_major needs them: a token's experts and number travel with it, since a row does not
    say its place in top-k.
    """
    return 4 * (top_k + 1)


def dispatch(
    moe: Any,
    x: Any,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    max_tokens: int | None = None,
) -> Received:
    """Sends rows to the ranks of their experts, as `unisono.Moe.dispatch` does. Collective.

    Args:
        moe: a Moe without scales, if x needs a gradient.
        x: [tokens, hidden], or quantised rows; or a tuple of it and payloads. Neither quantised rows nor
            payloads have a gradient.
        topk_idx: [tokens, top_k], i32 or i64; -1: no expert.
        topk_weights: [tokens, top_k], f32. The gradient comes from uses of `Received.topk_weights`, and with
            expert_major from `combine`, which needs `place_bytes(top_k)` of MoeOptions.more_bytes.
        max_tokens: as `unisono.Moe.dispatch` takes it.

    Raises:
        UsageError: a gradient is not possible; the message says why. Errors of `unisono.Moe.dispatch`.
    """
    x, *more = x if isinstance(x, tuple) else (x,)
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    weights_need_grad = torch.is_grad_enabled() and topk_weights is not None and topk_weights.requires_grad
    if moe.options.scales is not None and (needs_grad or weights_need_grad):
        raise UsageError(
            f'a dispatch with scales="{moe.options.scales}" has no gradient: make the Moe without scales, or '
            "call it within torch.no_grad()."
        )
    placed = weights_need_grad and moe.options.layout == "expert_major"
    if placed:
        more.append(_token_marks(moe, topk_idx))
    fields: dict[str, Any] = {}
    received_x, received_weights, link = _Dispatch.apply(
        x, topk_weights, moe, topk_idx, tuple(more), placed, max_tokens, fields
    )
    return Received(x=received_x, topk_weights=received_weights, moe=moe, link=link, **fields)


def combine(
    y: torch.Tensor,
    received: Received,
    topk_weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns each token's sum to its rank, as `unisono.Moe.combine` does. Collective.

    Args:
        y: a row of the Moe's dtype and hidden size for each row of `received.x`. With flat and rank_major the
            caller has multiplied by the weights and summed over this rank's experts.
        received: what the dispatch returned.
        topk_weights: expert_major: f32, of each row of y. None: `received.topk_weights`.
        bias: [tokens, hidden], added to the sum.

    Raises:
        UsageError: y needs a gradient, and has rows of another width or dtype. Errors of `Moe.combine`.
    """
    moe = received.moe
    if moe.options.layout == "expert_major" and topk_weights is None:
        topk_weights = received.topk_weights
    if torch.is_grad_enabled() and (y.requires_grad or received.link.requires_grad):
        expected = (moe.hidden, getattr(torch, moe.dtype))
        if (y.shape[-1], y.dtype) != expected:
            raise UsageError(
                f"y has rows of {y.shape[-1]} {y.dtype}, which has no gradient: give rows of {expected[0]} "
                f"{expected[1]}, or call combine within torch.no_grad()."
            )
    return _Combine.apply(y, topk_weights, bias, received.link, moe, received.handle)


class _Dispatch(torch.autograd.Function):  # type: ignore[misc] # mypy does not see torch
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
        moe: Any,
        topk_idx: torch.Tensor,
        more: tuple[torch.Tensor, ...],
        placed: bool,
        max_tokens: int | None,
        fields: dict[str, Any],
    ) -> tuple[torch.Tensor | None, ...]:
        rows = (_plain(x), *(one.contiguous() for one in more))
        weights = None if topk_weights is None else _plain(topk_weights)
        d = moe.dispatch(rows if more else rows[0], topk_idx.contiguous(), weights, max_tokens=max_tokens)
        exact = _exact_rows(moe, d)

        def own(one: torch.Tensor | None) -> torch.Tensor | None:
            return None if one is None else _own(moe, d, one, exact)

        payloads = [_own(moe, d, one, exact) for one in d.more]
        for name in "counts offsets source_rows rows dropped handle expert_rows".split():
            fields[name] = getattr(d, name)
        for name in "topk_idx row_expert".split():
            fields[name] = None if getattr(d, name) is None else getattr(d, name)[:exact]
        ctx.places = _places(moe, payloads.pop(), fields["row_expert"]) if placed else None
        fields.update(more=tuple(payloads), scales=own(d.scales))
        ctx.moe, ctx.handle = moe, d.handle
        ctx.topk_idx, ctx.weighed = fields["topk_idx"], weights is not None
        came, came_weights = _own(moe, d, d.x, exact), own(d.topk_weights)
        needs_grad = zip((came, came_weights), ctx.needs_input_grad[:2], strict=True)
        ctx.mark_non_differentiable(*(one for one, needs in needs_grad if one is not None and not needs))
        return came, came_weights, x.new_empty(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, grad: torch.Tensor, weights_grad: torch.Tensor | None, _: Any
    ) -> tuple[torch.Tensor | None, ...]:
        moe, handle = ctx.moe, ctx.handle
        expert_major = moe.options.layout == "expert_major"
        # dispatched weights would be taken otherwise
        ones = grad.new_ones(len(grad), dtype=torch.float32) if expert_major and ctx.weighed else None
        x_grad = sent_weights_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = moe.combine(grad.contiguous(), handle, topk_weights=ones)
        if ctx.needs_input_grad[1] and weights_grad is not None:
            if expert_major:
                spread = weights_grad.new_zeros(len(weights_grad), moe.top_k)
                weights_grad = spread.scatter_(1, ctx.places[:, None], weights_grad[:, None])
            else:  # weights of other ranks' experts are zeros here, whatever they are there
                weights_grad = torch.where(ctx.topk_idx >= 0, weights_grad, 0)
            sent_weights_grad = moe.combine(weights_grad, handle, topk_weights=ones)
        return x_grad, sent_weights_grad, None, None, None, None, None, None


class _Combine(torch.autograd.Function):  # type: ignore[misc] # mypy does not see torch
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        link: torch.Tensor,
        moe: Any,
        handle: Any,
    ) -> torch.Tensor:
        weights = None if topk_weights is None else _plain(topk_weights)
        out = moe.combine(
            _plain(y), handle, topk_weights=weights, bias=None if bias is None else _plain(bias)
        )
        ctx.moe, ctx.handle, ctx.rows = moe, handle, len(y)
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, topk_weights)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, weights = ctx.saved_tensors
        moe = ctx.moe
        d = moe.dispatch(grad.contiguous(), None, handle=ctx.handle)
        rows = _own(moe, d, d.x, _exact_rows(moe, d))[: ctx.rows]
        if len(rows) < ctx.rows:  # y has more rows than have been received
            rows = torch.cat([rows, rows.new_zeros(ctx.rows - len(rows), rows.shape[1])])
        weights_grad = None
        if ctx.needs_input_grad[1]:
            weights_grad = (rows.float() * y.float()).sum(1)
        if weights is not None:
            rows = (rows.float() * weights[:, None]).to(rows.dtype)
        bias_grad = grad if ctx.needs_input_grad[2] else None
        return rows, weights_grad, bias_grad, None, None, None


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous()


def _exact_rows(moe: Any, d: Any) -> int | None:
    """Returns the number of received rows, if the host knows it and they follow each other."""
    return None if moe.options.layout == "rank_major" else d.rows_now


def _own(moe: Any, d: Any, rows: torch.Tensor, exact: int | None) -> torch.Tensor:
    """Returns a copy of received rows: exactly so many, or all, with zeros where no token fills a row."""
    if exact is not None:
        return rows[:exact].clone()
    if moe.options.layout == "rank_major":
        filled = (d.topk_idx >= 0).any(1)
    elif moe.options.layout == "expert_major":
        filled = d.row_expert >= 0
    else:
        filled = torch.arange(len(rows), device=rows.device) < d.rows
    filled = filled.reshape(-1, *[1] * (rows.dim() - 1))
    if rows.dtype.is_floating_point and rows.dtype.itemsize == 1:  # torch.where has no 8-bit floats
        return torch.where(filled, rows.view(torch.uint8), 0).view(rows.dtype)
    return torch.where(filled, rows, 0)


def _token_marks(moe: Any, topk_idx: torch.Tensor) -> torch.Tensor:
    """Returns [tokens, top_k + 1] i32: a token's experts, and its number among the tokens of all ranks."""
    first = moe.communicator.rank * moe.max_tokens
    numbers = torch.arange(first, first + len(topk_idx), dtype=torch.int32, device=topk_idx.device)
    return torch.cat([topk_idx.to(torch.int32), numbers[:, None]], 1)


def _places(moe: Any, marks: torch.Tensor, row_expert: torch.Tensor) -> torch.Tensor:
    """Returns the place in top-k of each row of expert_major.

    A token may have an expert twice: its rows follow each other, in the order of the places.
    """
    experts = row_expert + moe.communicator.rank * moe.local_experts
    rows = torch.arange(len(marks), device=marks.device)
    again = (marks[1:, -1] == marks[:-1, -1]) & (experts[1:] == experts[:-1])
    first = rows.clone()
    first[1:].masked_fill_(again, 0)
    repeats = rows - first.cummax(0).values
    matches = marks[:, :-1] == experts[:, None]
    return (matches & (matches.cumsum(1) - 1 == repeats[:, None])).int().argmax(1)
