"""DeepEP V1's calls for decoding: few tokens, static shapes, a block of rows for each expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..._core import Communicator, MoeOptions
from ...errors import UsageError
from ..group import communicator_of
from .event import EventHandle, EventOverlap
from .missing import missing
from .moes import Moes

__all__ = ["LowLatency", "Packed"]

_TIMEOUT_S = 100.0  # DeepEP's
_BLOCK = 128  # elements that share a scale
_BF16 = 2  # bytes
_MISSING = "waits are not timed: leave it out"
Hook = Callable[[], None]


class Packed:
    """V1's handle of a low-latency dispatch, valid until its Buffer has made `Buffer.handles` further ones.

    Attributes:
        places: i64, the place of each received row among experts * rows of a block; one more: no token.
        shape: (experts of this rank, rows of a block, hidden).
        routing: None until the hook of the dispatch has run.
    """

    def __init__(self, moe: Any, rows: int) -> None:
        self.moe = moe
        self.shape = (moe.local_experts, rows, moe.hidden)
        self.routing: Any = None
        self.places: Any = None
        self.buffer: torch.Tensor | None = None  # of get_next_low_latency_combine_buffer

    def place(self, d: Any) -> None:
        """Finds the places of what a dispatch has brought."""
        experts, rows, _ = self.shape
        self.routing, expert = d.handle, d.row_expert.long()
        row = torch.arange(len(expert), device=expert.device) - d.offsets[expert.clamp(min=0)]
        filled = (expert >= 0) & (row < rows)
        self.places = torch.where(filled, expert * rows + row, experts * rows)


class LowLatency:
    """Holds the group and settings of a Buffer, and makes its calls with `low_latency` in their names."""

    handles: ClassVar[int] = 16  # routings that there is room for at first

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.group_size: int = group.size()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._communicator: Communicator | None = communicator_of(group, device, _TIMEOUT_S)
        self._moes = Moes(self._communicator, self.handles)
        self._hook: Hook | None = None  # of the call that has begun

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes of all experts' blocks in bfloat16, for num_rdma_bytes of a Buffer."""
        return num_experts * num_max_dispatch_tokens_per_rank * hidden * _BF16

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: calls leave nothing behind."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, Packed, EventOverlap, Hook | None]:
        """Sends each token to the block of each of its experts, quantised on the way if use_fp8. Collective.

        Args:
            x: [tokens, hidden], bfloat16.
            topk_idx: [tokens, top_k]; a token names no expert twice. -1: none.
            cumulative_local_expert_recv_stats: i32, to which recv_count is added.
            dispatch_wait_recv_cost_stats: None.
            round_scale: whether scales are powers of two. use_ue8m0: whether they come as their exponents.
            return_recv_hook: whether the rows come when `hook` is called. Otherwise hook is None.

        Returns:
            (recv_x, recv_count, handle, event, hook). recv_x: [local experts, most tokens * ranks, hidden],
            of each expert the first recv_count rows, by (source rank, token). With use_fp8 it is (rows in
            float8_e4m3fn, scales), and scales lie column by column: f32 [..., blocks of 128 elements]; with
            use_ue8m0 i32 [..., blocks of 512], four exponents each.

        Raises:
            UsageError: an argument cannot be. Errors of `unisono.Moe.dispatch`.
        """
        if dispatch_wait_recv_cost_stats is not None:
            raise missing("dispatch_wait_recv_cost_stats", _MISSING)
        if use_ue8m0 and not round_scale:
            raise UsageError("use_ue8m0 needs scales that are powers of two: give round_scale=True.")
        scales = None if not use_fp8 else "mx" if round_scale else "e4m3_128"
        self._settle()
        most = num_max_dispatch_tokens_per_rank
        moe = self._blocks(num_experts, topk_idx.shape[1], x.shape[1], most, scales, x)
        handle = Packed(moe, most * self.group_size)
        experts, rows, hidden = handle.shape
        packed = x.new_empty(experts * rows + 1, hidden, dtype=torch.uint8 if use_fp8 else x.dtype)
        blocks = -(-hidden // _BLOCK)
        words = -(-blocks // 4) if use_ue8m0 else blocks
        sf = x.new_empty(experts, words, rows, dtype=torch.int32 if use_ue8m0 else torch.float32)
        sf = sf.transpose(1, 2)
        count = x.new_empty(experts, dtype=torch.int32)
        moe.dispatch_begin(x.detach().contiguous(), topk_idx.contiguous())

        def finish() -> None:
            d = moe.dispatch_end()
            handle.place(d)
            packed.index_copy_(0, handle.places, d.x.view(packed.dtype))
            if use_fp8:
                ordered = sf.new_empty(experts * rows + 1, words)
                ordered.index_copy_(0, handle.places, _scales(d.scales, blocks, use_ue8m0))
                sf.copy_(ordered[:-1].view(experts, rows, words))
            count.copy_(d.counts)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(d.counts)

        event, hook = self._finish(finish, x, async_finish, return_recv_hook)
        recv_x = packed[:-1].view(handle.shape)
        if use_fp8:
            return (recv_x.view(torch.float8_e4m3fn), sf), count, handle, event, hook
        return recv_x, count, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Packed,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Returns each token's sum over its experts by topk_weights. Collective.

        A rank sums its own experts in f32 and rounds; these sums are added in f32, in the order of ranks.

        Args:
            x: the shape of the dispatch's recv_x, bfloat16.
            topk_idx, topk_weights: [tokens, top_k], those of the dispatch, and f32.
            zero_copy: whether the rows are in the tensor of `get_next_low_latency_combine_buffer`, not in x.
            return_recv_hook: as in the dispatch.
            out: [tokens, hidden], or None.
            use_logfmt, combine_wait_recv_cost_stats: False and None.

        Returns:
            (out, event, hook).

        Raises:
            UsageError: an argument cannot be. Errors of `unisono.Moe.combine`.
        """
        if use_logfmt:
            raise missing("use_logfmt", "rows return as they are: leave it out")
        if combine_wait_recv_cost_stats is not None:
            raise missing("combine_wait_recv_cost_stats", _MISSING)
        if zero_copy:
            if handle.buffer is None:
                raise UsageError(
                    "zero_copy needs rows: call get_next_low_latency_combine_buffer, and fill it."
                )
            x = handle.buffer
        self._settle()
        if handle.routing is None:
            raise UsageError("the rows of this dispatch have not come: call its hook first.")
        moe = handle.moe
        # the weights go the way of the tokens: each row's, in the order of rows
        small = self._blocks(moe.num_experts, moe.top_k, 1, moe.max_tokens, None, x)
        weights = small.dispatch(
            x.new_empty(len(topk_idx), 1), topk_idx.contiguous(), topk_weights.detach().float().contiguous()
        ).topk_weights
        y = x.detach().reshape(-1, x.shape[-1])
        y = y.index_select(0, handle.places.clamp(max=len(y) - 1))
        combined = x.new_empty(len(topk_idx), x.shape[-1]) if out is None else out
        moe.combine_begin(y, handle.routing, topk_weights=weights, out=combined)

        def finish() -> None:
            moe.combine_end()

        return combined, *self._finish(finish, x, async_finish, return_recv_hook)

    def get_next_low_latency_combine_buffer(self, handle: Packed) -> torch.Tensor:
        """Returns a tensor of the shape of recv_x in bfloat16, to be filled for a combine with zero_copy."""
        if handle.buffer is None:
            handle.buffer = handle.places.new_empty(handle.shape, dtype=torch.bfloat16)
        return handle.buffer

    def _blocks(
        self, experts: int, top_k: int, hidden: int, most: int, scales: str | None, like: torch.Tensor
    ) -> Any:
        """Returns the Moe whose rows go to experts. The first call of a kind is collective."""
        dtype = str(like.dtype).removeprefix("torch.")
        device = like.device.type

        def make(handles: int) -> Any:
            options = MoeOptions(layout="expert_major", scales=scales, handles=handles, device=device)
            return self._living().moe(experts, top_k, hidden, most, dtype, options)

        return self._moes.fixed((experts, top_k, hidden, most, scales, dtype, device), make)

    def _finish(
        self, end: Hook, x: torch.Tensor, asynchronous: bool, deferred: bool
    ) -> tuple[EventOverlap, Hook | None]:
        """Ends a call that has begun: now; or when the hook is called, or another call comes."""
        begun_on = torch.cuda.current_stream() if x.is_cuda else None

        def hook() -> None:
            if self._hook is not hook:
                return
            self._hook = None
            if begun_on is None:
                return end()
            with torch.cuda.stream(begun_on):
                end()
            torch.cuda.current_stream().wait_stream(begun_on)

        self._hook = hook
        if not deferred:
            hook()
        event = EventOverlap(EventHandle() if asynchronous else None)
        return event, hook if deferred else None

    def _settle(self) -> None:
        """Ends the call that has begun, if any: a communicator has one at a time."""
        self._living()
        if self._hook is not None:
            self._hook()

    def _living(self) -> Communicator:
        if self._communicator is None:
            raise UsageError("this buffer has been destroyed: make another.")
        return self._communicator


def _scales(scales: torch.Tensor, blocks: int, packed: bool) -> torch.Tensor:
    """Returns scales of rows as V1 has them: f32, or four exponents in an i32."""
    if scales.dtype == torch.float32:
        return scales
    if packed:
        return scales.view(torch.int32)
    return (scales[:, :blocks].int() << 23).view(torch.float32)
