"""Programs of ranks that dispatch quantised rows by the names of DeepEP and FlashInfer, for `ranks.play`."""

from __future__ import annotations

from typing import Any

import torch

import torch_moe
from torch_group_programs import DEVICE, EXPERTS, MOST, TOP_K, communication, group, tokens
from unisono.torch import deep_ep

FP8 = torch.float8_e4m3fn


def _quantised(rank: int, dtype: Any, packed: bool) -> tuple[Any, Any]:
    """Returns a rank's rows in a byte an element, and their scales, of which every row has others."""
    x, _, _ = tokens(rank)
    numbers = torch.arange(len(x), dtype=torch.int32, device=DEVICE)[:, None] + 100 * rank
    return (x * 10).to(dtype), numbers if packed else numbers / 3


def _bytes(rows: Any) -> Any:
    return rows.contiguous().view(torch.uint8)


def _sources(rank: int, size: int, expand: bool) -> list[tuple[int, int]]:
    """Returns (source rank, token) of each row that comes to a rank; expand: by expert."""
    local, found = EXPERTS // size, []
    for source in range(size):
        _, idx, _ = tokens(source)
        mine = (idx >= 0) & (idx // local == rank)
        pairs = [(t, int(idx[t, k])) for t, k in mine.nonzero().tolist()]
        at = pairs if expand else [(t, 0) for t in mine.any(1).nonzero()[:, 0].tolist()]
        found += [(expert, source, token) for token, expert in at]
    return [(source, token) for _, source, token in sorted(found, key=lambda pair: pair[0])]


def deep_ep_quantised(store: str) -> None:
    """Rows in e4m3 and uint8 with scales, packed or not, by new and by kept routings."""
    with group(store) as ranks:
        rank, size = ranks.rank(), ranks.size()
        buffer = deep_ep.EPBuffer(
            ranks, num_max_tokens_per_rank=MOST, hidden=torch_moe.HIDDEN, num_topk=TOP_K
        )
        x, idx, weights = tokens(rank)
        x = x.bfloat16()
        for expand, sync, packed in [(False, True, False), (True, True, True), (True, False, False)]:
            at = _sources(rank, size, expand)
            handle: Any = None
            for dtype in (FP8, torch.uint8, torch.int8):
                sent = [_quantised(source, dtype, packed) for source in range(size)]
                new: dict[str, Any] = {"topk_idx": idx, "num_experts": EXPERTS, "do_expand": expand}
                new |= {"expert_alignment": 4, "do_cpu_sync": sync, "emit_expert_ids": expand}
                (rows, sf), _, came_weights, handle, _ = buffer.dispatch(
                    sent[rank],
                    topk_weights=weights,
                    use_tma_aligned_col_major_sf=dtype is FP8,
                    **(new if handle is None else {"handle": handle}),
                )
                assert rows.dtype == dtype and rows.shape[1] == torch_moe.HIDDEN
                assert sf.dtype == sent[0][1].dtype and len(sf) == len(rows) == len(came_weights)
                if dtype is FP8:
                    assert sf.stride(0) == 1 and sf.stride(1) % 4 == 0
                filled = handle.recv_expert_ids >= 0 if expand else slice(None)
                expected = torch.stack([_bytes(sent[source][0])[token] for source, token in at])
                assert torch.equal(_bytes(rows)[filled], expected)
                expected = torch.stack([sent[source][1][token] for source, token in at])
                assert torch.equal(sf[filled], expected)
                if expand:
                    gaps = ~filled
                    gaps[int(handle.psum_num_recv_tokens_per_expert[-1]) :] = False
                    assert not _bytes(rows)[gaps].any() and not sf[gaps].any()
            # rows of the Moe's own elements come by the same routing, and go back
            y, *_ = buffer.dispatch(x, handle=handle)
            out, _, _ = buffer.combine(y, handle=handle)
            local = EXPERTS // size
            of_pairs = (idx >= 0).sum(1, keepdim=True)
            of_ranks = sum(((idx >= 0) & (idx // local == r)).any(1, keepdim=True).int() for r in range(size))
            expected = x.float() * (of_pairs if expand else of_ranks)
            torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
        buffer.destroy()


def flashinfer_quantised(store: str) -> None:
    """Rows of half and of all the elements, a byte each, with scales of one and of several axes."""
    with group(store) as ranks:
        rank, size = ranks.rank(), ranks.size()
        one = communication(ranks, torch.bfloat16, "DeepSeekFp8", -1)
        _, idx, weights = tokens(rank)
        for dtype, width in ((FP8, torch_moe.HIDDEN), (torch.uint8, torch_moe.HIDDEN // 2)):
            sent = []
            for source in range(size):
                rows, numbers = _quantised(source, dtype, dtype is torch.uint8)
                sent.append((rows[:, :width], numbers[:, 0] if dtype is FP8 else numbers))
            came = one.dispatch(sent[rank][0], idx, weights, hidden_states_scale=sent[rank][1])
            assert came.hidden_states.dtype == dtype and came.hidden_states.shape == (size * MOST, width)
            scale = came.hidden_states_scale
            assert scale.dtype == sent[0][1].dtype and scale.shape == (size * MOST, *sent[0][1].shape[1:])
            for source in range(size):
                _, chosen, _ = tokens(source)
                mine = ((chosen >= 0) & (chosen // (EXPERTS // size) == rank)).any(1)
                got = slice(source * MOST, source * MOST + int(mine.sum()))
                assert torch.equal(_bytes(came.hidden_states)[got], _bytes(sent[source][0])[mine])
                assert torch.equal(scale[got], sent[source][1][mine])
            y = torch.ones(size * MOST, torch_moe.HIDDEN, dtype=torch.bfloat16, device=DEVICE)
            out = one.combine(y)
            local = EXPERTS // size
            ranks_of = sum(((idx >= 0) & (idx // local == r)).any(1).int() for r in range(size))
            assert torch.equal(out[:, 0].int(), ranks_of)
        one.destroy()
