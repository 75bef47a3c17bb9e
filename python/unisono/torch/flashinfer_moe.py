"""Unisono as a communication backend of `flashinfer.moe_ep`.

>>> unisono.torch.flashinfer_moe.register()
>>> communication = flashinfer.moe_ep.create_communication(bootstrap, params, "unisono")

FlashInfer's layers then take it by name: SplitConfig(comm="unisono"). The interface is FlashInfer 0.7's.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from .._core import Communicator, MoeOptions
from ..errors import UsageError
from .group import communicator_of
from .rows import scale_bytes, with_scales

__all__ = ["Communication", "DispatchResult", "register"]

_HANDLES = 2  # one dispatch and its combine are under way at a time


@dataclass(frozen=True)
class DispatchResult:
    """The fields of FlashInfer's MoEEpDispatchResult: arrays of world_size * tokens_per_rank rows.

    Row i of source rank r is row r * tokens_per_rank + i. All are views, valid until the next dispatch.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor  # i32, of all ranks' experts; invalid_expert_id: another rank's, or none
    topk_weights: torch.Tensor | None
    tokens_per_rank: int
    hidden_states_scale: torch.Tensor | None = None
    eplb_gathered_stats: torch.Tensor | None = None


class Communication:
    """FlashInfer's MoEEpCommunication over `unisono.Moe`: dispatch and combine in turn, with static shapes.

    Args:
        bootstrap: FlashInfer's BootstrapConfig. Its process_group, or else the default group, has the ranks.
        params: FlashInfer's MoEEpCommParams. With any dispatch_format: there is room for all of them.
        communicator: a communicator of the same ranks, which stays the caller's. None: a new one, with
            bootstrap.device or else torch's current GPU, if there is one.

    Collective. The first dispatch needs nothing more, so that a CUDA graph may capture it.
    """

    backend_name = "unisono"
    supports_cuda_graph = True
    result = DispatchResult

    def __init__(self, bootstrap: Any, params: Any, communicator: Communicator | None = None) -> None:
        self.bootstrap, self.params = bootstrap, params
        self.ep_rank: int = bootstrap.rank
        self.ep_size: int = bootstrap.world_size
        self._dtype: torch.dtype = torch.bfloat16 if params.dtype is None else params.dtype
        self._made_communicator = communicator is None
        if communicator is None:
            communicator = communicator_of(self._group(), self._device())
        self._communicator: Communicator | None = communicator
        self._moe: Any = communicator.moe(
            params.num_experts,
            params.top_k,
            params.hidden_size,
            params.max_tokens_per_rank,
            dtype=str(self._dtype).removeprefix("torch."),
            options=MoeOptions(
                layout="rank_major", handles=_HANDLES, more_bytes=scale_bytes(params.hidden_size)
            ),
        )
        self.num_local_experts: int = self._moe.local_experts
        self._handle: Any = None
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._where: Any = None  # the device of the last dispatch

    def _group(self) -> Any:
        group = self.bootstrap.process_group
        return torch.distributed.group.WORLD if group is None else group

    def _device(self) -> int | None:
        if self.bootstrap.device is not None or not torch.cuda.is_available():
            return self.bootstrap.device  # type: ignore[no-any-return]
        return torch.cuda.current_device()  # type: ignore[no-any-return]

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Returns True: `unisono.init` says what a machine lacks."""
        return True

    def is_workload_feasible(self, max_tokens_per_rank: int) -> bool:
        """Returns whether a rank may dispatch so many tokens."""
        return max_tokens_per_rank <= int(self.params.max_tokens_per_rank)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
    ) -> Any:
        """Sends each token once to every rank that has an expert of its own. Collective.

        Args:
            hidden_states: [tokens, hidden_size] of params.dtype. Or quantised rows of any dtype, of at most
                as many bytes, which come as they are.
            topk_ids: [tokens, top_k]; invalid_expert_id or -1: none.
            topk_weights: [tokens, top_k], or None.
            max_tokens_per_rank: the most tokens of a rank in this call, at most params.max_tokens_per_rank,
                which shapes the result all the same. Few tokens are faster on GPUs if it says so.
            hidden_states_scale: [tokens, ...] of any dtype, which go where the rows go. There is room for a
                byte for each 16 elements, or 4 bytes for each 128.
            eplb_local_stats: None.

        Raises:
            UsageError: see Args. Or the last dispatch has had no combine.
        """
        if eplb_local_stats is not None:
            raise UsageError("eplb_local_stats cannot be dispatched: leave them out.")
        if self._handle is not None:
            raise UsageError("dispatch follows dispatch: call combine between them.")
        if max_tokens_per_rank is not None and not self.is_workload_feasible(max_tokens_per_rank):
            raise UsageError(
                f"max_tokens_per_rank={max_tokens_per_rank} is above that of the parameters, "
                f"{self.params.max_tokens_per_rank}: make a communication for more."
            )
        invalid = self.params.invalid_expert_id
        if invalid != -1:
            topk_ids = topk_ids.masked_fill(topk_ids == invalid, -1)
        weights = None if topk_weights is None else topk_weights.detach().float().contiguous()
        scale = hidden_states_scale
        rows = with_scales(hidden_states, scale, self._moe.hidden)
        d = self._living().dispatch(rows, topk_ids.contiguous(), weights, max_tokens=max_tokens_per_rank)
        self._handle, self._where = d.handle, hidden_states.device
        first = self.ep_rank * self.num_local_experts
        return self.result(
            hidden_states=d.x.view(hidden_states.dtype),
            hidden_states_scale=None if scale is None else d.more[0].view(scale.dtype),
            topk_ids=torch.where(d.topk_idx >= 0, d.topk_idx + first, invalid),
            topk_weights=d.topk_weights,
            tokens_per_rank=self.params.max_tokens_per_rank,
        )

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns [world_size * tokens_per_rank, hidden_size] for the experts' output, always the same.

        `combine` reads any tensor where it lies: this one saves an allocation, and no copy.
        """
        if self._handle is None:
            raise UsageError("the buffer belongs to a dispatch: call dispatch first.")
        if dtype not in self._buffers:
            shape = (self._moe.rows_held, self.params.hidden_size)
            self._buffers[dtype] = torch.zeros(shape, dtype=dtype, device=self._where)
        return self._buffers[dtype]

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        """Returns each token's sum over the ranks, [tokens, hidden_size], in `output` if given. Collective.

        Args:
            expert_output: a row for each received row, weighted and summed over this rank's experts:
                [world_size * tokens_per_rank, hidden_size], or with the first axis split in two.
        """
        if self._handle is None:
            raise UsageError("combine needs a dispatch: call dispatch first.")
        rows = expert_output.detach().reshape(self._moe.rows_held, -1)
        combined = self._living().combine(rows, self._handle, out=output)
        self._handle = None
        return combined

    def _living(self) -> Any:
        if self._moe is None:
            raise UsageError("this communication has been destroyed: make another.")
        return self._moe

    def destroy(self) -> None:
        """Releases the memory. Collective, idempotent."""
        if self._made_communicator and self._communicator is not None:
            self._communicator.close()
        self._moe = self._communicator = self._handle = None
        self._buffers.clear()


def register(name: str = "unisono") -> type[Communication]:
    """Registers `Communication` with FlashInfer by a name, and returns the registered class.

    Raises:
        UsageError: FlashInfer cannot be imported, or is older than `flashinfer.moe_ep`.
    """
    try:
        moe_ep: Any = importlib.import_module("flashinfer.moe_ep")
        base, result = moe_ep.MoEEpCommunication, moe_ep.MoEEpDispatchResult
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"flashinfer.moe_ep cannot be imported ({error}): pip install 'flashinfer-python>=0.7'."
        ) from error
    registered = type(
        "UnisonoCommunication", (Communication, base), {"__module__": __name__, "result": result}
    )
    return moe_ep.register_communication(name)(registered)  # type: ignore[no-any-return]
