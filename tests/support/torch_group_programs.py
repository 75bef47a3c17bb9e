"""Programs of ranks that meet by a torch ProcessGroup, for `ranks.play`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import torch_moe
import unisono
from unisono.torch import deep_ep, flashinfer_moe

EXPERTS, TOP_K, MOST = 6, 2, 8
DEVICE = os.environ.get("UNISONO_TEST_TORCH_DEVICE", "cpu")  # of all tensors that go into calls


@contextmanager
def group(store: str) -> Iterator[Any]:
    """Makes the default process group, over gloo and a file."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def refused(words: str, call: Callable[[], Any]) -> None:
    """Fails unless `call` raises a UsageError with these words."""
    try:
        call()
    except unisono.UsageError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error: {words}")


def there(*tensors: Any) -> tuple[Any, ...]:
    """Returns copies on the device."""
    return tuple(one.to(DEVICE) for one in tensors)


def tokens(rank: int) -> tuple[Any, Any, Any]:
    """Returns x, topk_idx and topk_weights of a rank."""
    return there(*torch_moe.batch(MOST - 3 * rank, EXPERTS, TOP_K, rank, True))


def _expect_rows(rank: int, size: int) -> tuple[list[Any], list[tuple[int, Any]], list[int]]:
    """Returns a rank's rows, its pairs (expert within the rank, row) by expert, and its rows by source."""
    local = EXPERTS // size
    rows, pairs, sources = [], [], []
    for source in range(size):
        x, idx, _ = tokens(source)
        mine = (idx >= 0) & (idx // local == rank)
        sources.append(int(mine.any(1).sum()))
        rows += list(x[mine.any(1)])
        pairs += [(int(idx[t, k]) - rank * local, x[t]) for t, k in mine.nonzero().tolist()]
    return rows, sorted(pairs, key=lambda pair: pair[0]), sources


def deep_ep_flat(store: str) -> None:
    """A step of training by DeepEP's calls as torchtitan makes them, with the calls of its backward."""
    with group(store) as ranks:
        hint = deep_ep.ElasticBuffer.get_buffer_size_hint(ranks, MOST, torch_moe.HIDDEN, num_topk=TOP_K)
        buffer = deep_ep.ElasticBuffer(
            ranks, num_bytes=hint, num_max_tokens_per_rank=MOST, hidden=torch_moe.HIDDEN, num_topk=TOP_K
        )
        assert buffer.num_bytes == hint > 0 and buffer.group is ranks
        x, idx, weights = tokens(buffer.rank_idx)
        stats = torch.zeros(EXPERTS // buffer.num_ranks, dtype=torch.int32)
        recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            cumulative_local_expert_recv_stats=stats,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=MOST,
            expert_alignment=4,
            num_sms=buffer.get_theoretical_num_sms(EXPERTS, TOP_K),
        )
        assert event.event is None and handle.topk_idx is idx
        rows, pairs, sources = _expect_rows(buffer.rank_idx, buffer.num_ranks)
        assert torch.equal(recv_x, torch.stack(rows)) and handle.num_recv_tokens == len(rows)
        assert recv_idx.dtype == deep_ep.topk_idx_t and recv_idx.shape == recv_weights.shape == (
            len(rows),
            TOP_K,
        )
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == _sums(sources)
        counts = [sum(expert == e for expert, _ in pairs) for e in range(len(stats))]
        rounded = [-(-count // 4) * 4 for count in counts]
        assert stats.tolist() == handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        assert handle.num_recv_tokens_per_expert_list == rounded
        assert handle.psum_num_recv_tokens_per_expert.tolist() == _sums(rounded)

        local = (recv_idx >= 0).float()
        y = recv_x * (recv_weights * local).sum(1, keepdim=True)
        bias = torch.ones_like(x)
        out, summed, event = buffer.combine(
            y, handle=handle, topk_weights=recv_weights * local, bias=bias, async_with_compute_stream=True
        )
        event.current_stream_wait()
        routed = (idx >= 0).float()
        torch.testing.assert_close(out, x * (weights * routed).sum(1, keepdim=True) + bias)
        torch.testing.assert_close(summed, weights * routed)

        for deferred in (False, True):  # by the handle: the rows of another x come to the same places
            came = buffer.dispatch(
                -x,
                handle=handle,
                do_cpu_sync=False,
                defer_epilogue=deferred,
                async_with_compute_stream=deferred,
            )
            recv, again, none, same, *_ = came.current_stream_wait() if deferred else came
            assert torch.equal(recv, -recv_x) and torch.equal(again, recv_idx)
            assert none is None and same is handle
        _refusals(buffer, x, idx, weights, handle)
        buffer.destroy()


def _sums(numbers: list[int]) -> list[int]:
    return [sum(numbers[: i + 1]) for i in range(len(numbers))]


def _refusals(buffer: Any, x: Any, idx: Any, weights: Any, handle: Any) -> None:
    """Parts that are not here say so, before anything is sent."""
    for words, call in {
        "have 8 bytes, but there is room for 4": lambda: buffer.dispatch(
            (x, weights), idx, num_experts=EXPERTS
        ),
        "needs topk_idx and num_experts": lambda: buffer.dispatch(x, idx),
        "leave topk_idx": lambda: buffer.dispatch(x, idx, handle=handle),
        "is above 8, the buffer's": lambda: buffer.dispatch(
            x, idx, num_experts=EXPERTS, num_max_tokens_per_rank=MOST + 1
        ),
        "second bias": lambda: buffer.combine(x, handle, bias=(x, x)),
        "EPHandle.recv_src_metadata is not in": lambda: handle.recv_src_metadata,
        "EPBuffer.lb_prefetch_weights is not in": lambda: buffer.lb_prefetch_weights,
        "balancing of experts": lambda: deep_ep.EPBuffer(buffer.group, lb_allocation_plan_or_num_bytes=1),
    }.items():
        refused(words, call)
    assert not hasattr(buffer, "low_latency_dispatch")
    idx.add_(0)
    refused("topk_idx has changed", lambda: buffer.combine(x, handle))


def deep_ep_expanded(store: str) -> None:
    """A step of inference by DeepEP's calls as SGLang makes them: rows by expert, aligned, static shapes."""
    with group(store) as ranks:
        buffer = deep_ep.EPBuffer(
            ranks, num_max_tokens_per_rank=MOST, hidden=torch_moe.HIDDEN, num_topk=TOP_K
        )
        x, idx, weights = tokens(buffer.rank_idx)
        x = x.bfloat16()
        _, pairs, _ = _expect_rows(buffer.rank_idx, buffer.num_ranks)
        for sync in (True, False):
            recv_x, none, recv_weights, handle, event = buffer.dispatch(
                x,
                topk_idx=idx,
                topk_weights=weights,
                num_experts=EXPERTS,
                num_max_tokens_per_rank=MOST,
                expert_alignment=4,
                do_cpu_sync=sync,
                do_expand=True,
                emit_expert_ids=True,
                previous_event=buffer.capture(),
            )
            assert none is None and event.event is None
            assert recv_weights.shape == (len(recv_x),) == handle.recv_expert_ids.shape
            ids = handle.recv_expert_ids
            assert [int(one) for one in ids[ids >= 0]] == [expert for expert, _ in pairs]
            assert torch.equal(recv_x[ids >= 0], torch.stack([row.bfloat16() for _, row in pairs]))
            begin = 0
            for end, count in zip(
                handle.psum_num_recv_tokens_per_expert.tolist(),
                handle.num_unaligned_recv_tokens_per_expert.tolist(),
                strict=True,
            ):
                assert end == begin + count
                begin = -(-end // 4) * 4
                assert not recv_x[end:begin].any()
            assert (len(recv_x) == begin) if sync else (len(recv_x) > begin)
            y = (recv_x.float() * recv_weights[:, None]).bfloat16()
            out, summed, _ = buffer.combine(y, handle=handle)
            assert summed is None
            expected = x.float() * (weights * (idx >= 0)).sum(1, keepdim=True)
            torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
        buffer.destroy()


def communication(ranks: Any, dtype: Any, dispatch_format: str | None, invalid: int) -> Any:
    """Makes a communication as FlashInfer does; invalid: the number of a masked expert."""
    bootstrap = SimpleNamespace(rank=ranks.rank(), world_size=ranks.size(), device=None, process_group=None)
    params = SimpleNamespace(
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=MOST,
        hidden_size=torch_moe.HIDDEN,
        dtype=dtype,
        dispatch_format=dispatch_format,
        invalid_expert_id=invalid,
    )
    return flashinfer_moe.Communication(bootstrap, params)


def flashinfer(store: str) -> None:
    """Steps by FlashInfer's interface."""
    with group(store) as ranks:
        rank, size = ranks.rank(), ranks.size()
        one = communication(ranks, None, None, EXPERTS)
        x, idx, weights = tokens(rank)
        x = x.bfloat16()
        asked = torch.where(idx < 0, EXPERTS, idx)
        buffers = set()
        for _ in range(3):
            came = one.dispatch(x, asked, weights)
            assert came.tokens_per_rank == MOST and came.hidden_states.shape == (
                size * MOST,
                torch_moe.HIDDEN,
            )
            for source in range(size):
                there, chosen, _ = tokens(source)
                mine = (chosen >= 0) & (chosen // (EXPERTS // size) == rank)
                got = slice(source * MOST, source * MOST + int(mine.any(1).sum()))
                expected = torch.where(mine, chosen, EXPERTS)[mine.any(1)]
                assert torch.equal(came.hidden_states[got], there[mine.any(1)].bfloat16())
                assert torch.equal(came.topk_ids[got].long(), expected)
                rest = slice(got.stop, (source + 1) * MOST)
                assert (came.topk_ids[rest] == EXPERTS).all()
            y = one.get_combine_input_buffer(torch.bfloat16)
            buffers.add(y.data_ptr())
            local = came.topk_ids != EXPERTS
            y.copy_(came.hidden_states.nan_to_num() * (came.topk_weights * local).sum(1, keepdim=True))
            out = torch.empty_like(x)
            assert one.combine(y.view(size, MOST, -1), output=out) is out
            expected = x.float() * (weights * (idx >= 0)).sum(1, keepdim=True)
            torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
        assert len(buffers) == 1
        for words, call in {
            "call dispatch first": lambda: one.combine(y),
            "leave them out": lambda: one.dispatch(x, asked, eplb_local_stats=weights),
            "have 8 bytes, but there is room for 4": lambda: one.dispatch(
                x, asked, hidden_states_scale=weights
            ),
            "is above that of the parameters": lambda: one.dispatch(x, asked, max_tokens_per_rank=MOST + 1),
        }.items():
            refused(words, call)
        one.dispatch(x, asked)
        refused("call combine between", lambda: one.dispatch(x, asked))
        one.destroy()
        one.destroy()
