"""FlashInfer's quantized_all_reduce: a Triton kernel in two steps over PyTorch's symmetric memory.

On the wire is f8e4m3, with a scale of f32 for each 256 elements. FlashInfer states no bound of the error; the
check holds it to that of Unisono's fp8. It is measured if flashinfer-python is installed, or if a folder of
PYTHONPATH holds the unpacked wheels of it, apache-tvm-ffi and nvidia-ml-py: few of its modules are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.bench.backends import torch_group
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.backends.by_path import folder_of, load, version_of
from unisono.bench.cuda.device import missing
from unisono.records import Case

MODULE, BARE = "comm.quantized_allreduce", ("jit",)
SCALED = 256  # elements with one scale
MOST_RANKS = 16
ALIGN = 16  # bytes


class FlashInferBackend(Backend):
    """The kernel on the bench's stream. `--wire fp8` asks for it."""

    name = "flashinfer"
    devices = ("cuda",)
    wire = "fp8"
    wire_bits = 8 + 32 / SCALED
    asked_for = True

    def __init__(self) -> None:
        self._device, self._joined = 0, False
        self._all_reduce: Any = None

    def available(self, ranks: int) -> str | None:
        why = missing() or torch_group.lacking()
        if why is None and folder_of("flashinfer") is None:
            why = "flashinfer is not installed: pip install flashinfer-python."
        if why is None and not (1 < ranks <= MOST_RANKS and ranks & (ranks - 1) == 0):
            why = f"its ranks are 2, 4, 8 or {MOST_RANKS}."
        return why

    def version(self) -> str:
        import torch

        return ", ".join(filter(None, [version_of("flashinfer-python"), f"torch {torch.__version__}"]))

    def setup(self, ranks: Ranks) -> None:
        self._device = ranks.device or 0
        self._all_reduce = load("flashinfer", MODULE, BARE).quantized_all_reduce
        torch_group.join(ranks)
        self._joined = True

    def expect(self, cases: Sequence[Case]) -> None:
        """Makes the kernel's buffer large enough for every case, since graphs keep using the first one."""
        import torch
        import torch.distributed as dist

        largest = max((case.bytes for case in cases if self.supports(case) is None), default=0)
        if largest:
            x = torch.zeros(largest // 2, dtype=torch.bfloat16, device=f"cuda:{self._device}")
            self._all_reduce(x, dist.group.WORLD, output=x)

    def supports(self, case: Case) -> str | None:
        if case.collective != "all_reduce":
            return "FlashInfer quantises an all_reduce only."
        if case.op != "sum" or case.dtype != "bf16":
            return "FlashInfer's quantized_all_reduce sums bf16 only."
        if case.bytes % ALIGN or case.bytes < 2 * SCALED:
            return f"it needs a multiple of {ALIGN} bytes, and {2 * SCALED} or more."
        return None

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        import torch.distributed as dist

        return partial(self._all_reduce, buffers.x, dist.group.WORLD, output=buffers.out)

    def algorithm(self, case: Case) -> str | None:
        return "two_shot"

    def close(self) -> None:
        if self._joined:
            self._joined = False
            load("flashinfer", MODULE, BARE).reset()
            torch_group.leave()
