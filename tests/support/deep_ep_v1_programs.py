"""Programs of ranks that call DeepEP V1's Buffer as Megatron-LM and SGLang do, for `ranks.play`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import torch_moe
from torch_group_programs import DEVICE, EXPERTS, TOP_K, group, refused, there
from unisono.torch.deep_ep import Buffer, Config, EventHandle, EventOverlap

HIDDEN = torch_moe.HIDDEN
LAYERS = 22  # more than a Buffer has room for at first


class _Dispatch(torch.autograd.Function):  # type: ignore[misc] # mypy does not see torch
    """Dispatch forward, combine backward, with events."""

    @staticmethod
    def forward(ctx: Any, x: Any, idx: Any, weights: Any, buffer: Any) -> Any:
        previous = EventOverlap(EventHandle())
        of_ranks, of_nodes, of_experts, in_rank, event = buffer.get_dispatch_layout(
            idx, EXPERTS, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        assert of_nodes is None
        came, came_idx, came_weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=of_ranks,
            num_tokens_per_rdma_rank=of_nodes,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=of_experts,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(came_idx)
        return came, came_idx, came_weights, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, grad: Any, _idx: Any, weights_grad: Any, _counts: Any, _handle: Any) -> Any:
        x_grad, weights_grad, event = ctx.buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=weights_grad.float(), async_finish=True
        )
        event.current_stream_wait()
        return x_grad, None, weights_grad, None


class _Combine(torch.autograd.Function):  # type: ignore[misc] # mypy does not see torch
    """Combine forward, dispatch by the handle backward."""

    @staticmethod
    def forward(ctx: Any, y: Any, handle: Any, buffer: Any) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        out, none, event = buffer.combine(y, handle=handle, previous_event=Buffer.capture())
        assert none is None and event.event is None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        y_grad, *nothing, event = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)
        assert nothing == [None] * 4 and event.event is None
        return y_grad, None, None


def _batch(rank: int, layer: int) -> tuple[Any, Any, Any]:
    """Returns a rank's tokens: more in each of the first layers, and none in one layer of the second rank."""
    tokens = 0 if (rank, layer) == (1, 2) else 3 + rank + 2 * min(layer, 3) ** 2
    return torch_moe.batch(tokens, EXPERTS, TOP_K, 1000 * layer + rank, True)


def megatron(store: str) -> None:
    """Many layers forward, then backward: outputs and gradients are those of plain torch on one process."""
    with group(store) as ranks:
        rank, size = ranks.rank(), ranks.size()
        configs = (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size))
        num_bytes = max(one.get_nvl_buffer_size_hint(HIDDEN * 4, size) for one in configs)
        assert max(one.get_rdma_buffer_size_hint(HIDDEN * 4, size) for one in configs) == 0 < num_bytes
        buffer = Buffer(ranks, num_bytes, 0)
        assert buffer.num_nvl_bytes == num_bytes and buffer.group is ranks
        experts, plain = torch_moe.Experts(EXPERTS), torch_moe.Experts(EXPERTS)
        inputs: list[Any] = []
        loss = torch.zeros(())
        for layer in range(LAYERS):
            x, idx, weights = _batch(rank, layer)
            inputs += [x.requires_grad_(), weights.requires_grad_()]
            came, came_idx, came_weights, counts, handle = _Dispatch.apply(x, idx, weights, buffer)
            assert counts.tolist() == [int((came_idx == e).sum()) for e in range(len(counts))]
            received = SimpleNamespace(x=came, counts=counts, topk_idx=came_idx, topk_weights=came_weights)
            y = torch_moe.by_rows(experts, rank * EXPERTS // size, received) + 0 * came
            out = _Combine.apply(y, handle, buffer)
            torch.testing.assert_close(out, torch_moe.reference(plain, x, idx, weights))
            loss = loss + (out * out).sum()
        own = [experts.first, experts.second]
        got = torch_moe.gradients(loss, [*inputs, *own])
        expected, shared = [], [torch.zeros_like(experts.first), torch.zeros_like(experts.second)]
        for source in range(size):
            leaves, loss = [], torch.zeros(())
            for layer in range(LAYERS):
                x, idx, weights = _batch(source, layer)
                leaves += [x.requires_grad_(), weights.requires_grad_()]
                loss = loss + (torch_moe.reference(plain, x, idx, weights) ** 2).sum()
            grads = torch_moe.gradients(loss, [*leaves, plain.first, plain.second])
            shared = [a + b for a, b in zip(shared, grads[-2:], strict=True)]
            expected = grads[:-2] if source == rank else expected
        for one, other in zip(got[:-2], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        mine = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        for one, other in zip(got[-2:], shared, strict=True):
            torch.testing.assert_close(one[mine], other[mine], rtol=1e-4, atol=1e-4)


def normal(store: str) -> None:
    """Calls of inference: quantised rows, alignment, static shapes, and a handle that is used again."""
    with group(store) as ranks:
        rank, size = ranks.rank(), ranks.size()
        buffer = Buffer(ranks, explicitly_destroy=True)
        x, idx, weights = there(*torch_moe.batch(9 - 2 * rank, EXPERTS, TOP_K, rank, True))
        of_ranks, _, of_experts, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        local = EXPERTS // size
        for r in range(size):
            goes = ((idx >= 0) & (idx // local == r)).any(1)
            assert torch.equal(in_rank[:, r], goes) and of_ranks[r] == goes.sum()
        assert of_experts.tolist() == [int((idx == e).sum()) for e in range(EXPERTS)]
        given = {"topk_idx": idx, "topk_weights": weights, "num_tokens_per_expert": of_experts}
        sent, expected, lists = [], [], []
        for source in range(size):
            batch = there(*torch_moe.batch(9 - 2 * source, EXPERTS, TOP_K, source, True))
            rows, chosen, their_weights = batch
            numbers = torch.arange(1.0, len(rows) + 1, device=DEVICE)[:, None]
            sent.append((rows.to(torch.float8_e4m3fn), numbers + source))
            here = (chosen >= 0) & (chosen // local == rank)
            taken = here.any(1)
            expected.append(
                tuple(one[taken] for one in (rows, sent[source][0].view(torch.uint8), sent[source][1]))
            )
            inside = torch.where(here, chosen - rank * local, -1)[taken]
            lists.append((inside, torch.where(here, their_weights, 0)[taken]))
        rows, codes, scales = (torch.cat(one) for one in zip(*expected, strict=True))
        inside, kept_weights = (torch.cat(one) for one in zip(*lists, strict=True))
        of_local = [int((inside == e).sum()) for e in range(local)]
        for worst in (0, 9 * size + 1):
            came, came_idx, came_weights, counts, handle, _ = buffer.dispatch(
                x, num_worst_tokens=worst, expert_alignment=4, config=Config(num_sms=24), **given
            )
            assert len(came) == len(came_idx) == len(came_weights) == (worst or len(rows))
            assert counts == ([] if worst else [-(-one // 4) * 4 for one in of_local])
            assert torch.equal(came[: len(rows)], rows) and torch.equal(came_idx[: len(rows)], inside)
            assert torch.equal(came_weights[: len(rows)], kept_weights) and came_idx.dtype == torch.int64
            assert (came_idx[len(rows) :] == -1).all() and not came_weights[len(rows) :].any()
            y = came * came_weights.sum(1, keepdim=True)
            y[len(rows) :] = float("nan")  # rows that nobody sent do not return
            bias = torch.ones_like(x)
            out, summed, _ = buffer.combine(y, handle, topk_weights=came_weights, bias=bias)
            routed = weights * (idx >= 0)
            torch.testing.assert_close(out, x * routed.sum(1, keepdim=True) + 1)
            torch.testing.assert_close(summed, routed)
            for again in (False, True):  # the routing is kept, also beside another one
                (came_codes, came_scales), _, _, _, other, _ = buffer.dispatch(
                    sent[rank], **({"handle": handle} if again else {**given, "num_worst_tokens": worst})
                )
                assert (other is None) == again and came_codes.dtype == torch.float8_e4m3fn
                assert torch.equal(came_codes.view(torch.uint8)[: len(codes)], codes)
                assert torch.equal(came_scales[: len(scales)], scales)
        for words, call in {
            "needs topk_idx, topk_weights": lambda: buffer.dispatch(x, topk_idx=idx),
            "leave topk_idx": lambda: buffer.dispatch(x, handle=handle, topk_idx=idx),
            f"for {8 - 2 * rank} tokens of a rank, but x has {9 - 2 * rank}": lambda: buffer.dispatch(
                x, num_worst_tokens=(8 - 2 * rank) * size, **given
            ),
            "second bias": lambda: buffer.combine(x, handle, bias=(x, x)),
            "Buffer.get_comm_stream is not in": lambda: buffer.get_comm_stream,
            "mpi4py communicator": lambda: Buffer(None, comm=ranks),
            "enable_shrink": lambda: Buffer(ranks, enable_shrink=True),
            "num_sms=3 is odd": lambda: Buffer.set_num_sms(3),
        }.items():
            refused(words, call)
        Buffer.set_num_sms(26)
        assert Buffer.get_combine_config(size).num_sms == 26
        buffer.destroy()
        refused("has been destroyed", lambda: buffer.dispatch(x, **given))
        kept = Buffer(ranks)
        refused("explicitly_destroy=True", kept.destroy)
