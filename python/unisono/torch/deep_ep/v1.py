"""DeepEP V1's Buffer: dispatch and combine as Megatron-LM and older SGLang call them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..._core import MoeOptions
from ...errors import UsageError
from ..rows import dtype_name, scale_bytes, with_scales
from .config import Config
from .event import EventHandle, EventOverlap, wait_for
from .low_latency import LowLatency
from .missing import missing
from .moes import Routing

__all__ = ["Buffer"]

_MISSING = (
    "internode_dispatch internode_combine get_comm_stream get_local_buffer_tensor is_sm90_compiled "
    "low_latency_update_mask_buffer low_latency_query_mask_buffer low_latency_clean_mask_buffer"
).split()


class Buffer(LowLatency):
    """Dispatch and combine among the ranks of a torch ProcessGroup, as DeepEP V1 has them. Collective.

    Args:
        group: the ranks.
        num_nvl_bytes, num_rdma_bytes: kept as attributes: memory follows from dispatches.
        explicitly_destroy: whether `destroy` may be called.
        enable_shrink, comm: False and None.
        All others: accepted, and change nothing.

    Memory is made in the first dispatch of a kind (experts, top-k, hidden, dtype). A dispatch of more tokens,
    or with more handles in use, makes it anew.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if comm is not None or group is None:
            raise missing("a Buffer of an mpi4py communicator", "give a torch ProcessGroup as group")
        if enable_shrink:
            raise missing("enable_shrink", "leave it out")
        super().__init__(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy

    def destroy(self) -> None:
        """Releases the memory. Collective.

        Raises:
            UsageError: explicitly_destroy is False.
        """
        if not self.explicitly_destroy:
            raise UsageError("destroy() is for a Buffer with explicitly_destroy=True: give it.")
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the default of Config.num_sms, which changes nothing else."""
        if new_num_sms % 2:
            raise UsageError(f"num_sms={new_num_sms} is odd: give an even number.")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Returns the present point of torch's current CUDA stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns a Config for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Returns a Config for any number of ranks."""
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts what this rank is about to send.

        Returns:
            (num_tokens_per_rank, None, num_tokens_per_expert, is_token_in_rank, event): i32 [ranks], i32
            [num_experts] and bool [tokens, ranks].
        """
        wait_for(previous_event)
        chosen = torch.where(topk_idx >= 0, topk_idx, num_experts).long()
        local = num_experts // self.group_size
        in_rank = topk_idx.new_zeros(len(topk_idx), self.group_size + 1, dtype=torch.bool)
        in_rank = in_rank.scatter_(1, chosen // local, True)[:, :-1].contiguous()
        ones = torch.ones_like(chosen, dtype=torch.int32).flatten()
        of_experts = topk_idx.new_zeros(num_experts + 1, dtype=torch.int32)
        of_experts = of_experts.scatter_add_(0, chosen.flatten(), ones)[:-1]
        return in_rank.sum(0, dtype=torch.int32), None, of_experts, in_rank, _event(async_finish)

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: Routing | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Sends each token once to every rank that has an expert of its own, in a stable order. Collective.

        Args:
            x: [tokens, hidden]; or (rows, scales), quantised by the caller.
            handle: of an earlier dispatch, whose routing is used again, without topk_idx and topk_weights.
            num_tokens_per_expert: of `get_dispatch_layout`. Its length is the number of experts.
            num_worst_tokens: rows of received tensors, at least ranks times the most tokens of a rank. The
                CPU waits for nothing then. 0: as many rows as come.

        Returns:
            (recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event).
            recv_topk_idx: i64, experts within this rank; -1: another rank's, none, or a row without a token.
            num_recv_tokens_per_expert_list: rounded up to expert_alignment; [] with num_worst_tokens. With a
            handle all but recv_x and event are None.

        Raises:
            UsageError: arguments are missing, or do not go together. Errors of `unisono.Moe.dispatch`.
        """
        self._settle()
        wait_for(previous_event)
        x, sf = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise UsageError("a handle has its experts: leave topk_idx and topk_weights out.")
            recv_x, _ = _received(x, sf, handle.moe, handle.rows, handle.exact, None, None, handle.routing)
            return recv_x, None, None, None, None, _event(async_finish)
        if topk_idx is None or topk_weights is None or num_tokens_per_expert is None:
            raise UsageError(
                "dispatch needs topk_idx, topk_weights and num_tokens_per_expert, or a handle: give them."
            )
        exact, experts = num_worst_tokens == 0, len(num_tokens_per_expert)
        moe, keep = self._moe(x, topk_idx.shape[1], experts, num_worst_tokens)
        recv_x, d = _received(x, sf, moe, num_worst_tokens, exact, topk_idx, topk_weights, None)
        handle = Routing(moe, d.handle, d.rows_now if exact else num_worst_tokens, exact)
        keep(handle)
        if exact:
            idx, weights = d.topk_idx[: handle.rows].long(), d.topk_weights[: handle.rows].clone()
            counts = [-(-count // expert_alignment) * expert_alignment for count in d.counts.tolist()]
        else:
            filled = torch.arange(moe.rows_held, device=x.device)[:, None] < d.rows
            idx = topk_idx.new_full((handle.rows, moe.top_k), -1, dtype=torch.int64)
            idx[: moe.rows_held] = torch.where(filled, d.topk_idx, -1)
            weights = topk_weights.new_zeros(handle.rows, moe.top_k)
            weights[: moe.rows_held] = torch.where(filled, d.topk_weights, 0)
            counts = []
        return recv_x, idx, weights, counts, handle, _event(async_finish)

    def combine(
        self,
        x: torch.Tensor,
        handle: Routing,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Returns each token's sum over the ranks to its rank, without weights. Collective.

        Args:
            x: a row for each received row.
            topk_weights: [rows, top_k], or None.
            bias: [tokens, hidden], added to the sum, or None.

        Returns:
            (combined_x, combined_topk_weights, event). combined_topk_weights: [tokens, top_k], the sum of
            topk_weights over the ranks; None without them.

        Raises:
            UsageError: an argument cannot be. Errors of `unisono.Moe.combine`.
        """
        if isinstance(bias, tuple):
            raise missing("a second bias", "give one, their sum")
        self._settle()
        wait_for(previous_event)
        moe, weights = handle.moe, None
        if topk_weights is not None:
            weights = moe.combine(topk_weights.detach().float().contiguous(), handle.routing)
        plain = None if bias is None else bias.detach().contiguous()
        out = moe.combine(x.detach().contiguous(), handle.routing, bias=plain)
        return out, weights, _event(async_finish)

    def _moe(self, x: torch.Tensor, top_k: int, experts: int, worst: int) -> tuple[Any, Any]:
        """Returns the Moe for a dispatch, and what notes its routing."""
        hidden, dtype = x.shape[1], dtype_name(x)
        kind = (experts, top_k, hidden, dtype, x.device.type, worst)

        def make(max_tokens: int, handles: int) -> Any:
            options = MoeOptions(
                more_bytes=scale_bytes(hidden),
                handles=handles,
                host_counts=worst == 0 and x.is_cuda,
                device=x.device.type,
            )
            return self._living().moe(experts, top_k, hidden, max_tokens, dtype, options)

        if worst == 0:
            kept = self._moes.take(kind, len(x), make)
            return kept.moe, kept.add
        most = worst // self.group_size
        if len(x) > most:
            raise UsageError(
                f"num_worst_tokens={worst} is for {most} tokens of a rank, but x has {len(x)}: give "
                f"{self.group_size} times the most tokens of a rank."
            )
        return self._moes.fixed(kind, lambda handles: make(most, handles)), lambda _: None

    def __getattr__(self, name: str) -> Any:
        if name in _MISSING:
            raise missing(f"Buffer.{name}")
        raise AttributeError(f"Buffer has no attribute {name!r}")


def _received(
    x: torch.Tensor,
    sf: torch.Tensor | None,
    moe: Any,
    rows: int,
    exact: bool,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    routing: Any,
) -> tuple[Any, Any]:
    """Dispatches, and returns the caller's own tensors of what has come, and the MoeReceived."""
    sent = with_scales(x, sf, moe.hidden)
    static = None if exact else sent[0].new_empty(rows, x.shape[1])
    d = moe.dispatch(
        sent,
        None if topk_idx is None else topk_idx.contiguous(),
        None if topk_weights is None else topk_weights.detach().float().contiguous(),
        handle=routing,
        out=None if static is None else static[: moe.rows_held],
    )
    recv_x = d.x[: d.rows_now].clone() if static is None else static
    recv_x = recv_x.view(x.dtype)
    if sf is None:
        return recv_x, d
    recv_sf = d.more[0].new_empty(len(recv_x), *sf.shape[1:])
    held = min(len(recv_sf), moe.rows_held)
    recv_sf[:held] = d.more[0][:held]
    return (recv_x, recv_sf.view(sf.dtype)), d


def _event(asynchronous: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if asynchronous else None)
