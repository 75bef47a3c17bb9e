"""DeepEP's handle of a routing."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UsageError
from .missing import missing

__all__ = ["EPHandle"]

_MISSING = "recv_src_metadata dst_buffer_slot_idx token_metadata_at_forward channel_linked_list".split()


class EPHandle:
    """The routing of a dispatch, for its combine and for further dispatches by the same routing.

    Valid until the buffer has made `EPBuffer.handles` further routings of the same kind.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: the caller's tensor, which must not change as long as the handle is in use.
        num_recv_tokens: rows that have been received, if the CPU knows it, and else the most that can be.
        num_expanded_tokens: the same with do_expand.
        num_recv_tokens_per_expert_list: rows of each expert of this rank, rounded up to expert_alignment;
            empty if the CPU does not know them.
        psum_num_recv_tokens_per_scaleup_rank: i32, tokens of the ranks up to each.
        psum_num_recv_tokens_per_expert: i32, of each expert: with do_expand the place at which its rows end,
            otherwise the sum of rounded numbers of rows up to it.
        num_unaligned_recv_tokens_per_expert: i32, rows of each expert.
        recv_expert_ids: i32, the expert of each row with do_expand and emit_expert_ids, -1: none. Else None.
    """

    def __init__(
        self,
        moe: Any,
        d: Any,
        topk_idx: torch.Tensor,
        do_expand: bool,
        alignment: int,
        tokens: int,
        sms: int,
        exact: bool,
    ) -> None:
        counts = d.counts.clone()
        rounded = (counts + alignment - 1) // alignment * alignment
        ends = rounded.cumsum(0, dtype=torch.int32)
        self.do_expand = do_expand
        self.num_experts: int = moe.num_experts
        self.expert_alignment = alignment
        self.num_max_tokens_per_rank = tokens
        self.num_sms = sms
        self.psum_num_recv_tokens_per_scaleup_rank = d.source_rows.cumsum(0, dtype=torch.int32)
        self.psum_num_recv_tokens_per_expert = ends - rounded + counts if do_expand else ends
        self.num_unaligned_recv_tokens_per_expert = counts
        self.num_recv_tokens_per_expert_list: list[int] = rounded.tolist() if exact else []
        self.exact = exact  # whether received tensors have no more rows than have come
        self.rows: int = d.rows_now if exact else moe.rows_held  # of received tensors
        self.num_recv_tokens = int(self.psum_num_recv_tokens_per_scaleup_rank[-1]) if exact else self.rows
        self.num_expanded_tokens: int = self.rows if do_expand else 0
        self.recv_expert_ids: torch.Tensor | None = None
        self.moe, self.routing = moe, d.handle
        self._topk_idx = topk_idx
        self._version = None if topk_idx.is_inference() else topk_idx._version

    @property
    def topk_idx(self) -> torch.Tensor:
        if self._version is not None and self._topk_idx._version != self._version:
            raise UsageError(
                "topk_idx has changed since its dispatch: give dispatch a copy, or do not change it."
            )
        return self._topk_idx

    def __getattr__(self, name: str) -> Any:
        if name in _MISSING:
            raise missing(f"EPHandle.{name}", "rows come in the order of ranks and tokens")
        raise AttributeError(f"EPHandle has no attribute {name!r}")
