"""DeepEP's buffer for expert parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..._core import Communicator, MoeOptions
from ...errors import UsageError
from ..group import communicator_of
from ..rows import by_columns, dtype_name, scale_bytes, with_scales
from .event import EventHandle, EventOverlap, wait_for
from .handle import EPHandle
from .missing import missing

__all__ = ["EPBuffer"]

_UNIT = 2 << 20  # bytes that DeepEP rounds sizes of buffers up to
_MISSING = (
    "lb_prefetch_weights lb_reduce_grads lb_get_theoretical_num_sms get_dispatch_layout low_latency_dispatch "
    "low_latency_combine get_comm_stream get_physical_domain_size"
).split()


class EPBuffer:
    """Dispatch and combine among the ranks of a torch ProcessGroup, as DeepEP has them. Collective.

    Args:
        group: the ranks.
        num_bytes: only told by `num_bytes`: memory follows from the other arguments and from dispatches.
        num_max_tokens_per_rank: the most tokens of a rank in one dispatch; 0: each dispatch says it.
        hidden: elements of a row; 0: the first dispatch's.
        num_cpu_timeout_secs: the deadline of every wait, in seconds.
        lb_allocation_plan_or_num_bytes: 0, since experts are not balanced here.
        All others: accepted, and change nothing.
    """

    handles: ClassVar[int] = (
        16  # routings that a buffer keeps, of each kind; set it before the first dispatch
    )

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if lb_allocation_plan_or_num_bytes != 0:
            raise missing("balancing of experts", "leave lb_allocation_plan_or_num_bytes out")
        self.group = group
        self.rank_idx: int = group.rank()
        self.num_ranks: int = group.size()
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_allocated_qps = num_allocated_qps
        self.num_bytes = num_bytes or self.get_buffer_size_hint(
            group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        )
        self._hidden = hidden
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._communicator: Communicator | None = communicator_of(group, device, num_cpu_timeout_secs)
        self._moes: dict[tuple[Any, ...], Any] = {}

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns the bytes of the rows that can come in one dispatch, rounded up to 2 MiB."""
        rows: int = group.size() * num_max_tokens_per_rank
        units: int = -(-rows * hidden * torch.bfloat16.itemsize // _UNIT)
        return units * _UNIT

    @staticmethod
    def capture() -> EventHandle:
        """Returns the present point of torch's current CUDA stream."""
        return EventHandle()

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: Any, **__: Any) -> int:
        """Returns 0: the communicator chooses."""
        return 0

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns 0: the communicator chooses."""
        return 0

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Returns (1, ranks): one domain has all of them."""
        return 1, self.num_ranks

    def barrier(self, *_: Any, **__: Any) -> None:
        """Waits until every rank is here. Collective."""
        self._living().barrier()

    def destroy(self) -> None:
        """Releases the memory and the communicator. Collective, idempotent."""
        self._moes.clear()
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        emit_expert_ids: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Sends rows to the ranks that have their experts, as DeepEP's dispatch does. Collective.

        Args:
            x: [tokens, hidden]; or (rows, scales), which the caller has quantised. There is room for a byte
                of scales for each 16 elements of hidden, or 4 for each 128.
            use_tma_aligned_col_major_sf: whether received scales lie column by column, 16 bytes aligned.

        Returns:
            (recv_x, recv_topk_idx, recv_topk_weights, EPHandle, EventOverlap); recv_x is a tuple if x is.
            do_expand: a row for each pair of token and expert, by expert; recv_topk_idx is None.
            do_cpu_sync (the default without a handle): exactly the rows that have come, else all that can.
            defer_epilogue: an EventOverlap, whose wait returns the first four. No call comes before the wait.

        Raises:
            UsageError: an argument cannot be, or asks for what is not here. Errors of `unisono.Moe.dispatch`.
        """
        x, sf = x if isinstance(x, tuple) else (x, None)
        if do_handle_copy:
            raise missing("do_handle_copy", "give dispatch a copy of topk_idx")
        wait_for(previous_event)
        if handle is None:
            sync = do_cpu_sync is not False
            moe = self._moe(
                x, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_expand, sync
            )
            given, exact = topk_idx, sync
        else:
            if topk_idx is not None or do_cpu_sync:
                raise UsageError(
                    "a dispatch by a handle has its topk_idx and counts: leave topk_idx and do_cpu_sync out."
                )
            moe, topk_idx, given, exact = handle.moe, handle.topk_idx, None, handle.exact
        self._living()
        rows = with_scales(x, sf, moe.hidden)
        static = None if exact else rows[0].new_empty(moe.rows_held, x.shape[1])
        moe.dispatch_begin(
            rows,
            None if given is None else given.contiguous(),
            None if topk_weights is None else topk_weights.detach().contiguous(),
            handle=None if handle is None else handle.routing,
            out=static,
            max_tokens=num_max_tokens_per_rank if handle is None else None,
        )

        def finish() -> tuple[Any, ...]:
            d = moe.dispatch_end()
            of = handle
            if of is None:
                tokens = num_max_tokens_per_rank or self.num_max_tokens_per_rank
                of = EPHandle(moe, d, topk_idx, do_expand, expert_alignment or 1, tokens, num_sms, exact)
            if emit_expert_ids and of.do_expand:
                of.recv_expert_ids = d.row_expert[: of.rows].clone()
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(d.counts)
            recv_x = (d.x[: of.rows].clone() if static is None else static).view(x.dtype)
            if sf is not None:
                recv_sf = d.more[0][: of.rows].view(sf.dtype)
                recv_x = recv_x, by_columns(recv_sf) if use_tma_aligned_col_major_sf else recv_sf.clone()
            idx = None if d.topk_idx is None else d.topk_idx[: of.rows].to(torch.int64)
            weights = None if d.topk_weights is None else d.topk_weights[: of.rows].clone()
            return recv_x, idx, weights, of

        return _end(finish, async_with_compute_stream, defer_epilogue)

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Returns each token's sum to its rank, without weights, as DeepEP's combine does. Collective.

        Returns:
            (combined_x, combined_topk_weights, EventOverlap). combined_topk_weights: the sum of topk_weights,
            [tokens, top_k]; None without them. defer_epilogue: as in dispatch.

        Raises:
            UsageError: an argument cannot be, or asks for what is not here. Errors of `unisono.Moe.combine`.
        """
        if isinstance(bias, tuple):
            raise missing("a second bias", "give one, their sum")
        if topk_weights is not None and handle.do_expand:
            raise missing(
                "combine of topk_weights with do_expand", "leave topk_weights out, which x has already"
            )
        handle.topk_idx  # noqa: B018 - raises if it has changed
        wait_for(previous_event)
        self._living()
        moe, plain = handle.moe, None if bias is None else bias.detach().contiguous()
        weights = None
        if topk_weights is not None:
            weights = moe.combine(topk_weights.detach().float().contiguous(), handle.routing)
        ones = x.new_ones(len(x), dtype=torch.float32) if handle.do_expand else None
        moe.combine_begin(x.detach().contiguous(), handle.routing, topk_weights=ones, bias=plain)
        return _end(lambda: (moe.combine_end(), weights), async_with_compute_stream, defer_epilogue)

    def _moe(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        num_experts: int | None,
        max_tokens: int | None,
        alignment: int | None,
        do_expand: bool,
        sync: bool,
    ) -> Any:
        """Returns the Moe for a kind of dispatch, made once."""
        if topk_idx is None or num_experts is None:
            raise UsageError("dispatch needs topk_idx and num_experts, or a handle: give them.")
        most = self.num_max_tokens_per_rank or max_tokens or 0
        if (max_tokens or 0) > most:
            raise UsageError(
                f"num_max_tokens_per_rank={max_tokens} is above {most}, the buffer's: make it for more."
            )
        if most == 0:
            raise UsageError("num_max_tokens_per_rank is 0: give it to the buffer, or to dispatch.")
        layout = "expert_major" if do_expand else "flat"
        options = (layout, alignment or 1 if do_expand else 1, sync and x.is_cuda, x.device.type)
        hidden = self._hidden or x.shape[1]
        shape = (num_experts, topk_idx.shape[1], hidden, most, dtype_name(x))
        key = (*shape, *options)
        if key not in self._moes:
            self._moes[key] = self._living().moe(
                *shape,
                options=MoeOptions(
                    layout=layout,
                    alignment=options[1],
                    host_counts=options[2],
                    more_bytes=scale_bytes(hidden),
                    handles=self.handles,
                    device=options[3],
                ),
            )
        return self._moes[key]

    def _living(self) -> Communicator:
        if self._communicator is None:
            raise UsageError("this buffer has been destroyed: make another.")
        return self._communicator

    def __getattr__(self, name: str) -> Any:
        if name in _MISSING:
            raise missing(f"EPBuffer.{name}")
        raise AttributeError(f"EPBuffer has no attribute {name!r}")


def _end(finish: Any, asynchronous: bool, deferred: bool) -> Any:
    if not deferred:
        result = finish()
        return *result, EventOverlap(EventHandle() if asynchronous else None)
    if not asynchronous:
        raise UsageError("defer_epilogue needs async_with_compute_stream=True: give both.")
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(finish)
    return event
