"""Programs of ranks that call DeepEP V1's Buffer with low latency, as SGLang does, for `ranks.play`."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from torch_group_programs import DEVICE, group, refused, there
from unisono.torch.deep_ep import Buffer

HIDDEN, MOST, TOP_K, EACH = 640, 7, 3, 2  # EACH: experts of a rank
BLOCK = 128


def _batch(rank: int, size: int, turn: int) -> tuple[Any, Any, Any]:
    """Returns x, topk_idx and topk_weights: a token names no expert twice, and some are masked."""
    generator = torch.Generator().manual_seed(97 * turn + rank)
    tokens = 0 if turn % 3 == rank == 1 else MOST - (turn + rank) % 3
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    experts, top_k = EACH * size, min(TOP_K, EACH * size)
    idx = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    idx[torch.rand(tokens, top_k, generator=generator) < 0.2] = -1
    return there(x, idx, torch.rand(tokens, top_k, generator=generator) + 0.1)


def _blocks(rank: int, size: int, turn: int) -> list[Any]:
    """Returns the rows of each expert of a rank, by source rank and token."""
    found = []
    for expert in range(rank * EACH, (rank + 1) * EACH):
        parts = []
        for source in range(size):
            x, idx, _ = _batch(source, size, turn)
            parts.append(x[(idx == expert).any(1)])
        found.append(torch.cat(parts))
    return found


def _restored(rows: Any, scales: Any, x: Any, *, rounded: bool, packed: bool) -> Any:
    """Returns the values of quantised rows, whose scales must be the right ones for x."""
    largest = x.float().view(-1, HIDDEN // BLOCK, BLOCK).abs().amax(2).clamp(min=1e-4)
    wanted = largest / 448
    if rounded:
        wanted = torch.exp2(torch.ceil(torch.log2(wanted)))
    if packed:
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=DEVICE)
        bytes_of = (scales[:, :, None] >> shifts).bitwise_and(255).flatten(1)[:, : HIDDEN // BLOCK]
        scales = torch.exp2(bytes_of.float() - 127)
    torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=0)
    return (rows.float().view(-1, HIDDEN // BLOCK, BLOCK) * scales[:, :, None]).view(-1, HIDDEN)


def _check_rows(came: Any, count: Any, rank: int, size: int, turn: int, how: dict[str, bool]) -> None:
    blocks = _blocks(rank, size, turn)
    assert count.dtype == torch.int32 and count.tolist() == [len(block) for block in blocks]
    rows, scales = came if how["use_fp8"] else (came, None)
    assert rows.shape == (EACH, MOST * size, HIDDEN)
    if scales is not None:
        words = -(-HIDDEN // (4 * BLOCK)) if how["use_ue8m0"] else HIDDEN // BLOCK
        assert rows.dtype == torch.float8_e4m3fn and scales.shape == (EACH, MOST * size, words)
        assert scales.stride(1) == 1
    for expert, x in enumerate(blocks):
        got = rows[expert, : len(x)]
        if scales is None:
            assert torch.equal(got, x)
        else:
            mine = scales[expert, : len(x)]
            values = _restored(got, mine, x, rounded=how["round_scale"], packed=how["use_ue8m0"])
            torch.testing.assert_close(values, x.float(), rtol=0.07, atol=0.02)


def _check_sum(out: Any, rank: int, size: int, turn: int) -> None:
    """Experts have multiplied a row by their number and 1."""
    x, idx, weights = _batch(rank, size, turn)
    factors = (weights * (idx + 1) * (idx >= 0)).sum(1, keepdim=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), x.float() * factors, rtol=0.04, atol=0.04)


def _experts(rank: int, size: int, turn: int) -> Any:
    """Returns the experts' output. What no token fills is no number, and must not return."""
    y = torch.full((EACH, MOST * size, HIDDEN), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    for expert, rows in enumerate(_blocks(rank, size, turn)):
        y[expert, : len(rows)] = rows * (rank * EACH + expert + 1)
    return y


def low_latency(store: str) -> None:
    """Each form of scales, with and without hooks, and with calls that overtake hooks."""
    with group(store) as ranks:
        rank, size = ranks.rank(), ranks.size()
        hint = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, size, EACH * size)
        buffer = Buffer(ranks, 0, hint, low_latency_mode=True, num_qps_per_rank=EACH, allow_mnnvl=True)
        assert buffer.num_rdma_bytes == hint > 0 and buffer.low_latency_mode
        buffer.clean_low_latency_buffer(MOST, HIDDEN, EACH * size)
        stats, told = torch.zeros(2, EACH, dtype=torch.int32, device=DEVICE)
        forms = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
        for turn, (form, hooked) in enumerate(itertools.product(forms, (False, True))):
            how = dict(zip(("use_fp8", "round_scale", "use_ue8m0"), form, strict=True))
            x, idx, weights = _batch(rank, size, turn)
            came, count, handle, event, hook = buffer.low_latency_dispatch(
                x,
                idx,
                MOST,
                EACH * size,
                cumulative_local_expert_recv_stats=stats,
                async_finish=not hooked,
                return_recv_hook=hooked,
                **how,
            )
            assert (hook is None) != hooked
            hook() if hooked else event.current_stream_wait()
            told += count
            assert torch.equal(stats, told)
            _check_rows(came, count, rank, size, turn, how)
            y, zero_copy = _experts(rank, size, turn), turn % 3 == 0
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
            given = torch.empty_like(x) if turn % 2 else None
            out, event, hook = buffer.low_latency_combine(
                y, idx, weights, handle, zero_copy=zero_copy, return_recv_hook=hooked, out=given
            )
            assert (hook is None) != hooked and event.event is None and given in (None, out)
            if hooked:
                hook()
            _check_sum(out, rank, size, turn)
        _overtaking(buffer, rank, size)
        _refusals(buffer, rank, size)


def _overtaking(buffer: Any, rank: int, size: int) -> None:
    """Two micro-batches: the next call comes before the hook of the one before."""
    how = {"use_fp8": False}
    batches = [_batch(rank, size, turn) for turn in (20, 21)]
    begun = [
        buffer.low_latency_dispatch(x, idx, MOST, EACH * size, return_recv_hook=True, **how)
        for x, idx, _ in batches
    ]
    for *_, hook in reversed(begun):
        hook()
    sums = []
    for (_, idx, weights), (came, count, handle, _, _), turn in zip(batches, begun, (20, 21), strict=True):
        _check_rows(came, count, rank, size, turn, how)
        y = _experts(rank, size, turn)
        sums.append(buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=True))
    for turn, (out, _, hook) in zip((20, 21), sums, strict=True):
        hook()
        hook()
        _check_sum(out, rank, size, turn)


def _refusals(buffer: Any, rank: int, size: int) -> None:
    x, idx, weights = _batch(rank, size, 30)
    y = _experts(rank, size, 30)

    def dispatch(**more: Any) -> Any:
        return buffer.low_latency_dispatch(x, idx, MOST, EACH * size, **more)

    *_, handle, _, hook = dispatch(return_recv_hook=True, use_fp8=False)
    hook()
    for words, call in {
        "give round_scale=True": lambda: dispatch(use_ue8m0=True),
        "dispatch_wait_recv_cost_stats is not in": lambda: dispatch(dispatch_wait_recv_cost_stats=x),
        "use_logfmt is not in": lambda: buffer.low_latency_combine(y, idx, weights, handle, use_logfmt=True),
        "zero_copy needs rows": lambda: buffer.low_latency_combine(y, idx, weights, handle, zero_copy=True),
        "combine_wait_recv_cost_stats is not in": lambda: buffer.low_latency_combine(
            y, idx, weights, handle, combine_wait_recv_cost_stats=x
        ),
        "Buffer.low_latency_clean_mask_buffer is not in": lambda: buffer.low_latency_clean_mask_buffer,
    }.items():
        refused(words, call)
