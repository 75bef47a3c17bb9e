"""PyTorch's symmetric memory: torch.ops.symm_mem.one_shot_all_reduce_out and two_shot_all_reduce_.

Variants `torch-symm:one_shot` and `torch-symm:two_shot`; the name alone stands for both. Both need memory of
symm_mem.empty. The backend therefore has buffers of its own, of the size and alignment of the bench's, and
runs only the symmetric cases. two_shot works in place (also its form with an output overwrites the input), so
that out of place a copy of the input is part of the call. The ranks exchange handles over a process group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from unisono.bench.backends import torch_group
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.cases import CaseError
from unisono.bench.cuda.device import missing
from unisono.records import Case

VARIANTS = ("one_shot", "two_shot")
MOST_ONE_SHOT = 64 << 20  # every rank reads every other's input as a whole: beyond, it only takes time
_ALIGN = 16


class TorchSymmBackend(Backend):
    """One algorithm of torch's symmetric memory. Its ops take bf16 and f32, and sum."""

    devices = ("cuda",)
    own_memory = True
    variants = VARIANTS
    _memory: ClassVar[dict[int, tuple[Any, Any]]] = {}  # shared by the variants, by size

    def __init__(self, variant: str = "two_shot") -> None:
        if variant not in VARIANTS:
            raise CaseError(f"torch-symm has no {variant!r}: choose from {', '.join(VARIANTS)}.")
        self.name, self._variant = f"torch-symm:{variant}", variant
        self._device, self._joined = 0, False

    def available(self, ranks: int) -> str | None:
        return missing() or torch_group.lacking()

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def setup(self, ranks: Ranks) -> None:
        self._device = ranks.device or 0
        torch_group.join(ranks)
        self._joined = True

    def supports(self, case: Case) -> str | None:
        if case.collective != "all_reduce":
            return "torch's symmetric memory without multicast has all_reduce only."
        if case.op != "sum" or case.dtype not in ("bf16", "f32"):
            return "torch's symmetric all_reduce has sum of bf16 and f32 only."
        if case.memory != "symmetric":
            return "it needs symmetric memory."
        if case.bytes % _ALIGN:
            return f"it needs a multiple of {_ALIGN} bytes."
        if self._variant == "one_shot" and case.placement == "in_place":
            return "one_shot_all_reduce has no in-place form."
        if self._variant == "one_shot" and case.bytes > MOST_ONE_SHOT:
            return (
                f"one_shot is measured to {MOST_ONE_SHOT >> 20} MiB: every rank reads all of every other's."
            )
        return None

    def allocate(self, size: int) -> tuple[Any, Any]:
        import torch
        from torch.distributed import _symmetric_memory as symmetric

        if size not in self._memory:
            device = torch.device("cuda", self._device)
            made = [symmetric.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
            for tensor in made:
                symmetric.rendezvous(tensor, torch_group.name())
            self._memory[size] = (made[0], made[1])
        return self._memory[size]

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        import torch

        ops, group, x, out = torch.ops.symm_mem, torch_group.name(), buffers.x, buffers.out
        if self._variant == "one_shot":
            return partial(ops.one_shot_all_reduce_out.default, x, "sum", group, out)
        if case.placement == "in_place":
            return partial(ops.two_shot_all_reduce_.default, out, "sum", group)
        two_shot = ops.two_shot_all_reduce_.default

        def copied() -> None:
            out.copy_(x)
            two_shot(out, "sum", group)

        return copied

    def algorithm(self, case: Case) -> str | None:
        return self._variant

    def close(self) -> None:
        if self._joined:
            self._joined = False
            self._memory.clear()
            torch_group.leave()
