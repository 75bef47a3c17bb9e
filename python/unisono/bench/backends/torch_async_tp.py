"""PyTorch's async tensor parallelism: torch.ops.symm_mem.fused_all_gather_matmul and
fused_matmul_reduce_scatter, which send parts by copy engines while others are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from unisono.bench.backends import matmuls, torch_group
from unisono.bench.backends.base import Backend, Buffers, Ranks
from unisono.bench.cuda.device import missing
from unisono.bench.cuda.temporaries import Temporaries
from unisono.bench.matmul import GATHER
from unisono.records import Case
from unisono.records.vocabulary import MATMUL


class TorchAsyncTpBackend(Backend):
    """torch's operators over its symmetric memory, in which they have a workspace of their own."""

    name = "torch-async-tp"
    devices = ("cuda",)
    matmul = True
    collectives = False

    def __init__(self) -> None:
        self._rank, self._joined = 0, False
        self._temporaries: Temporaries | None = None

    def available(self, ranks: int) -> str | None:
        return missing() or torch_group.lacking()

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def setup(self, ranks: Ranks) -> None:
        self._rank = ranks.rank
        torch_group.join(ranks)
        self._joined = True

    def expect(self, cases: Sequence[Case]) -> None:
        if any(case.matmul is not None for case in cases):
            self._temporaries = Temporaries()

    def supports(self, case: Case) -> str | None:
        if case.collective == "matmul_all_reduce":
            return "torch has no matmul fused with an all_reduce."
        if case.collective == MATMUL:
            return "a matmul alone is torch.mm, which others measure."
        if case.ranks == 1:
            return "alone it has nothing to send."
        return matmuls.uneven(case)

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        import torch

        assert self._temporaries is not None
        ops, group = torch.ops.symm_mem, torch_group.name()
        a, b, out = matmuls.tensors(case, self._rank, buffers, lambda tensor, _: tensor)
        if case.collective == GATHER:
            gathered = partial(ops.fused_all_gather_matmul, a, [b], 0, group, return_A=False)
            return self._temporaries.bound(matmuls.returned(lambda: gathered()[1][0], out))
        scattered = partial(ops.fused_matmul_reduce_scatter, a, b, "sum", 0, group)
        return self._temporaries.bound(matmuls.returned(scattered, out))

    def close(self) -> None:
        if self._joined:
            self._joined = False
            torch_group.leave()
