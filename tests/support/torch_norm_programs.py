"""Programs of ranks that call `unisono.torch.flashinfer`, for `ranks.play`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from norm_body import Job, expected, parts
from norm_reference import codes_and_scales
from reference import combine, difference
from torch_group_programs import DEVICE, group, refused
from unisono.torch import flashinfer as fi

GROUPS = {8: "mx", 9: "mx", 10: "fp8_token", 11: "fp8_token", 2: "fp8", 4: "fp8"}


def tensor(array: Any) -> torch.Tensor:
    """Returns a copy on the device."""
    name = {"bfloat16": torch.bfloat16}.get(array.dtype.name) or getattr(torch, array.dtype.name)
    return torch.from_numpy(array.copy().view(np.uint8)).view(name).view(array.shape).to(DEVICE)


def same(got: torch.Tensor, wanted: Any) -> None:
    raw = got.cpu().contiguous().view(-1).view(torch.uint8).numpy().view(wanted.dtype).reshape(wanted.shape)
    assert difference(raw, wanted) is None, difference(raw, wanted)


def patterns(store: str) -> None:
    """Calls every pattern, and compares with numpy bit by bit."""
    with group(store) as ranks:
        rank, size = ranks.rank(), ranks.size()
        shape = {"max_token_num": 8, "hidden_dim": 640, "dtype": torch.bfloat16}
        workspace = fi.create_allreduce_fusion_workspace("trtllm", size, rank, **shape)  # type: ignore[arg-type]
        assert (workspace.rank, workspace.world_size) == (rank, size)
        assert workspace.is_buffer_size_sufficient(size, 100, 640, torch.bfloat16)
        assert not workspace.is_buffer_size_sufficient(size + 1, 1, 640, torch.bfloat16)
        for number, pattern in enumerate((1, 2, 4, 8, 9, 10, 11) * 2):
            job = Job("fusion", 4 * number, size, 7, 640, dtype=("bf16", "f32")[number % 2])
            xs, residual, weight, _ = parts(job, 0)
            x, held, gamma = tensor(xs[rank]), tensor(residual), tensor(weight)
            rows, norm = expected(job, 0)
            scale = 0.01 if number % 3 else torch.tensor(0.01, device=DEVICE)
            norm_out = torch.empty_like(x) if pattern in (1, 4, 9, 11) else None
            quant_out = (
                torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=DEVICE) if pattern > 1 else None
            )
            scale_out = None
            if pattern in (8, 9):  # 5 groups: 2 words, by columns of 8 tokens
                scale_out = torch.full((16,), -1, dtype=torch.int32, device=DEVICE).as_strided((7, 2), (1, 8))
            elif pattern in (10, 11):
                scale_out = torch.empty(7, 1, device=DEVICE)
            result = fi.allreduce_fusion(
                x,
                workspace,
                pattern,
                residual_out=held,
                norm_out=norm_out,
                quant_out=quant_out,
                scale_out=scale_out,
                residual_in=held,
                rms_gamma=gamma,
                scale_factor=scale if pattern in (2, 4) else None,
                use_oneshot=(None, True, False)[number % 3],
                block_quant_group_size=128,
            )
            same(held, rows)
            if norm_out is not None:
                same(norm_out, norm)
            if quant_out is None:
                assert result is norm_out
                continue
            codes, scales = codes_and_scales(norm, GROUPS[pattern], 0.01)
            assert result.data_ptr() == quant_out.data_ptr()
            same(quant_out, codes)
            if pattern in (8, 9):
                assert scale_out is not None and scales is not None
                same(scale_out, scales.view(np.int32))
                assert scale_out.as_strided((1, 1), (1, 8), 7).item() == 0  # a token that fills up
            elif scale_out is not None:
                same(scale_out, scales)
        summed = fi.allreduce_fusion(tensor(xs[rank]), workspace, fi.AllReduceFusionPattern.kAllReduce)
        same(summed, combine(xs, "sum"))
        for words, more in {
            "pattern 3 is not here": {"pattern": 3},
            "needs residual_in and rms_gamma": {"pattern": 1},
            "give block_quant_group_size=128": {"pattern": 8, "residual_in": held, "rms_gamma": gamma},
            "needs a scale_factor": {"pattern": 2, "residual_in": held, "rms_gamma": gamma},
            "weight_bias is not here": {
                "pattern": 1,
                "residual_in": held,
                "rms_gamma": gamma,
                "weight_bias": 1.0,
            },
        }.items():
            refused(words, lambda more=more: fi.allreduce_fusion(x, workspace, **more))  # type: ignore[misc]
        refused("there is no backend", lambda: fi.create_allreduce_fusion_workspace("nccl"))
        refused("leave them out", lambda: fi.create_allreduce_fusion_workspace(top_k=8))
        workspace.destroy()
