"""Unisono's all_reduce with residual and norm under the names of `flashinfer.comm` (FlashInfer 0.7).

>>> workspace = create_allreduce_fusion_workspace(hidden_dim=4096, dtype=torch.bfloat16)
>>> pattern = AllReduceFusionPattern.kARResidualRMSNorm
>>> norm = allreduce_fusion(x, workspace, pattern, residual_in=residual, rms_gamma=weight)

Patterns 0, 1, 2, 4 and 8 to 11 are there, on tensors of CPUs too. Results differ from FlashInfer's in these
points. The sum is rounded once, in rank order, whatever fp32_acc says. A scale is computed for a magnitude of
at least 1e-4. A row or group with an infinity or a NaN becomes NaN. The patterns that give the norm beside
the codes (4, 9, 11), and a static scale in a tensor, are quantised by operations of torch after the call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from .._core import Communicator, NormOptions
from ..errors import UsageError
from .group import communicator_of

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
]

_LARGEST, _LEAST, _GROUP = 448.0, 1e-4, 128  # of e4m3; the magnitude of a scale; elements of a group


class AllReduceFusionPattern:
    """FlashInfer's numbers of patterns."""

    kAllReduce = 0  # noqa: N815 - FlashInfer's names
    kARResidualRMSNorm = 1  # noqa: N815
    kARResidualRMSNormFP8Quant = 2  # noqa: N815
    kARResidualRMSNormFP4Quant = 3  # noqa: N815
    kARResidualRMSNormOutFP8Quant = 4  # noqa: N815
    kARResidualRMSNormOutFP4Quant = 5  # noqa: N815
    kMoEReductionARResidualRMSNorm = 6  # noqa: N815
    kMoEFinalizeARResidualRMSNorm = 7  # noqa: N815
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8  # noqa: N815
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9  # noqa: N815
    kARResidualRMSNormDynamicFP8Quant = 10  # noqa: N815
    kARResidualRMSNormOutDynamicFP8Quant = 11  # noqa: N815
    kMoEFinalizeARResidualRMSNormFP8Quant = 12  # noqa: N815


_P = AllReduceFusionPattern
_STATIC, _PACKED, _DYNAMIC = "fp8", "mx", "fp8_token"
_QUANTS = {
    _P.kARResidualRMSNormFP8Quant: _STATIC,
    _P.kARResidualRMSNormOutFP8Quant: _STATIC,
    _P.kARResidualRMSNormPerTokenGroupFP8PackedQuant: _PACKED,
    _P.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: _PACKED,
    _P.kARResidualRMSNormDynamicFP8Quant: _DYNAMIC,
    _P.kARResidualRMSNormOutDynamicFP8Quant: _DYNAMIC,
}
_WITH_NORM = (
    _P.kARResidualRMSNormOutFP8Quant,
    _P.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
    _P.kARResidualRMSNormOutDynamicFP8Quant,
)


class AllReduceFusionWorkspace:
    """A communicator, where FlashInfer has memory.

    Args:
        communicator: of the ranks.
        owned: whether `destroy` closes it.
    """

    backend = "unisono"

    def __init__(self, communicator: Communicator, owned: bool = False) -> None:
        self.communicator = communicator
        self.world_size: int = communicator.size
        self.rank: int = communicator.rank
        self._owned = owned

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: Any = None
    ) -> bool:
        """Returns whether the ranks are as many. There is room for any number of tokens."""
        return tp_size == self.world_size

    def destroy(self) -> None:
        """Closes a communicator that was made for the workspace. Collective."""
        if self._owned:
            self.communicator.close()


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: Any = None,
    *,
    communicator: Communicator | None = None,
    **more: Any,
) -> AllReduceFusionWorkspace:
    """Returns a workspace of a group's ranks. Collective, unless a communicator is given.

    Args:
        backend: auto, trtllm, mnnvl or unisono; all are Unisono's here.
        world_size, rank: None, or those of the group.
        group: a ProcessGroup; None: the default one.
        communicator: one of the same ranks, which stays the caller's. None: a new one, with torch's current
            GPU if there is one.
        more: the arguments of mnnvl-cutedsl, which must be None.
        max_token_num, hidden_dim, dtype, gpus_per_node, comm_backend, force_oneshot_support: not needed.

    Returns:
        The workspace.

    Raises:
        UsageError: another backend, other ranks, or an argument of mnnvl-cutedsl.
    """
    if backend not in ("auto", "trtllm", "mnnvl", "unisono"):
        raise UsageError(f"there is no backend {backend!r} here: use auto.")
    if named := [name for name, value in more.items() if value is not None]:
        raise UsageError(f"{', '.join(named)}: for the backend mnnvl-cutedsl alone; leave them out.")
    made = communicator is None
    if communicator is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        found = torch.distributed.group.WORLD if group is None else group
        communicator = communicator_of(found, device)
    workspace = AllReduceFusionWorkspace(communicator, made)
    if world_size not in (None, workspace.world_size) or rank not in (None, workspace.rank):
        workspace.destroy()
        raise UsageError(
            f"this is rank {workspace.rank} of {workspace.world_size}, not {rank} of {world_size}: give the "
            "group's own numbers, or none."
        )
    return workspace


def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    """Sums over the ranks; adds the residual, normalises and quantises as the pattern says. Collective.

    Args:
        input: [tokens, hidden], this rank's part of the sum.
        workspace: of `create_allreduce_fusion_workspace`.
        pattern: of AllReduceFusionPattern: 0, 1, 2, 4, 8, 9, 10 or 11.
        output: for pattern 0; None: a new tensor.
        residual_out, norm_out, quant_out, scale_out: results; None: new tensors. residual_out may be
            residual_in. scale_out of patterns 8 and 9: int32 [tokens, ceil(groups / 4)], by columns of a
            multiple of 4 tokens.
        residual_in: [tokens, hidden], the same on every rank.
        rms_gamma: [hidden].
        scale_factor: of patterns 2 and 4: codes are of norm / scale_factor.
        use_oneshot: True or False: that many steps; None: as the plan says.
        block_quant_group_size: 128, for patterns 8 and 9.
        weight_bias: 0.
        launch_with_pdl, trigger_completion_at_end, fp32_acc, layout_code: no effect. Kernels start early if
            the communicator's do, and the next one waits for all results.

    Returns:
        The output of pattern 0, norm_out of pattern 1, else quant_out.

    Raises:
        UsageError: another pattern, or a tensor that is missing or does not fit.
    """
    comm = workspace.communicator
    if pattern == _P.kAllReduce:
        output = torch.empty_like(input) if output is None else output
        comm.all_reduce(input, out=output)
        return output
    quant = _QUANTS.get(pattern)
    if pattern != _P.kARResidualRMSNorm and quant is None:
        raise UsageError(f"pattern {pattern} is not here: use 0, 1, 2, 4, 8, 9, 10 or 11.")
    if residual_in is None or rms_gamma is None:
        raise UsageError(f"pattern {pattern} needs residual_in and rms_gamma: give both.")
    if weight_bias != 0:
        raise UsageError("weight_bias is not here: add it to rms_gamma, and leave it out.")
    if quant == _STATIC and scale_factor is None:
        raise UsageError(f"pattern {pattern} needs a scale_factor: give it.")
    if quant == _PACKED and block_quant_group_size != _GROUP:
        raise UsageError(f"a group has {_GROUP} elements: give block_quant_group_size={_GROUP}.")
    of_tensor = quant == _STATIC and isinstance(scale_factor, torch.Tensor)
    apart = pattern in _WITH_NORM or of_tensor  # the norm itself is needed
    packed = quant == _PACKED
    aside = quant is not None and not apart and _cannot_alias(comm, input, residual_in, residual_out)
    options = NormOptions(
        out=norm_out if quant is None or apart else quant_out,
        residual_out=None if aside else residual_out,
        quant=None if apart else quant,
        scale=scale_factor if quant == _STATIC and not apart else None,
        scales_out=None if apart or packed else scale_out,
        algorithm=_algorithm(comm, input, use_oneshot),
    )
    result: Any
    result, joined = comm.all_reduce_rms_norm(input, residual_in, rms_gamma, rms_eps, options=options)
    if aside and residual_out is not None:
        residual_out.copy_(joined)
    if quant is None:
        return result
    codes, scales = _quantised(result, quant, scale_factor) if apart else result
    if apart and quant_out is not None:
        codes = quant_out.copy_(codes)
    if packed and scale_out is not None:
        _pack(scale_out, scales)
    elif apart and scale_out is not None and quant == _DYNAMIC:
        scale_out.copy_(scales)
    return codes


def _algorithm(comm: Communicator, x: torch.Tensor, use_oneshot: bool | None) -> str | None:
    """Returns the steps that are asked for, over what the plan takes for so many bytes."""
    if use_oneshot is None or comm.size == 1:
        return None
    device = "cuda" if x.is_cuda else "cpu"
    planned = comm.plan("all_reduce_rms_norm", x.numel() * x.element_size(), device=device)
    over = "_ll128" if planned.endswith("_ll128") else ""
    return ("one_shot" if use_oneshot else "two_shot") + over


def _cannot_alias(
    comm: Communicator, x: torch.Tensor, residual: torch.Tensor, residual_out: torch.Tensor | None
) -> bool:
    """Returns whether a call with codes needs a residual_out apart: it has an all_reduce of its own."""
    if residual_out is None or residual_out.data_ptr() != residual.data_ptr() or not x.is_cuda:
        return False
    return comm.plan("all_reduce_rms_norm", x.numel() * x.element_size(), device="cuda") == "two_shot"


def _quantised(norm: torch.Tensor, quant: str, scale: Any) -> tuple[torch.Tensor, Any]:
    """Returns codes and scales of normalised rows, by operations of torch."""
    wide = norm.float()
    if quant == _STATIC:
        inverse = 1 / (scale.float() if isinstance(scale, torch.Tensor) else torch.tensor(scale).to(wide))
        return (wide * inverse).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale
    rows, hidden = norm.shape
    groups = 1 if quant == _DYNAMIC else -(-hidden // _GROUP)
    if quant == _PACKED:
        wide = torch.nn.functional.pad(wide, (0, groups * _GROUP - hidden))
    blocks = wide.view(rows, groups, -1)
    raised = blocks.abs().amax(2, keepdim=True).clamp(min=_LEAST)
    finite = raised.isfinite()
    scales = torch.where(finite, raised / _LARGEST, torch.nan)
    inverse = torch.where(finite, _LARGEST / raised, torch.nan)
    if quant == _PACKED:
        powers = torch.where(finite, (scales.view(torch.int32) + 0x7FFFFF) >> 23, 255)
        inverse = torch.where(finite, ((254 - powers) << 23).view(torch.float32), torch.nan)
        padded = torch.zeros(rows, -(-groups // 4) * 4, dtype=torch.uint8, device=norm.device)
        padded[:, :groups] = powers.view(rows, groups)
        scales = padded
    codes = (blocks * inverse).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    codes = codes.view(rows, -1)[:, :hidden].contiguous()
    return codes, scales if quant == _PACKED else scales.view(rows, 1)


def _pack(scale_out: torch.Tensor, powers: torch.Tensor) -> None:
    """Writes rows of exponents into FlashInfer's columns of words, with zeros for the tokens that fill up."""
    rows, words = powers.shape[0], powers.shape[1] // 4
    aligned = -(-rows // 4) * 4
    if scale_out.dtype != torch.int32 or tuple(scale_out.shape) != (rows, words):
        raise UsageError(
            f"scale_out is {scale_out.dtype} {tuple(scale_out.shape)}: give int32 {(rows, words)}."
        )
    if scale_out.stride() != (1, aligned):
        raise UsageError(f"scale_out has strides {scale_out.stride()}: give it {(1, aligned)}.")
    scale_out.copy_(powers.view(torch.int32))
    if aligned > rows and words > 1:
        beyond = scale_out.storage_offset() + rows
        scale_out.as_strided((aligned - rows, words - 1), (1, aligned), beyond).zero_()
