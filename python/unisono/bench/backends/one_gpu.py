"""Libraries that permute rows on one GPU: torch, moe-ops, and Transformer Engine's kernels in Triton.

The last two are measured if they are installed, or if a folder of PYTHONPATH holds their unpacked wheels.
Two modules of Transformer Engine are loaded alone, since the package itself needs libraries that they do not.
They get routes as a mask, which is made beforehand.
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono.bench import routes
from unisono.bench.backends.base import Backend, Buffers, MoeCalls, Ranks, ResultCall, moe_call
from unisono.bench.backends.by_path import folder_of, load, version_of
from unisono.bench.cuda.device import missing
from unisono.bench.cuda.memory import tensor_of
from unisono.bench.cuda.temporaries import Temporaries
from unisono.records import Case

TE_MODULE = "pytorch.triton.permutation"


class Permuted(MoeCalls):
    """The calls of one case, by torch: argsort, index_select and index_add_."""

    def __init__(self, case: Case, buffers: Buffers) -> None:
        import torch

        found, moe, device = routes.of(case), routes.shape(case), buffers.x.device
        self.torch: Any = torch
        self.tokens, self.hidden, self.experts, self.top_k = moe.tokens, moe.hidden, moe.experts, moe.top_k
        self.x, self.out = buffers.x, buffers.out
        self.idx, self.weights = (tensor_of(one[0], device) for one in (found.experts, found.weights))
        self.rows = self.x  # of a combine alone; a dispatch gives others
        self.sums: Any = None

    def order(self) -> Any:
        """Returns the pair of each row; pair i is of token i // top_k."""
        return self.torch.argsort(self.idx.view(-1), stable=True)

    def route(self) -> None:
        order = self.order()
        self.token, self.weight = order // self.top_k, self.weights.view(-1)[order][:, None]

    def dispatch(self) -> None:
        self.route()
        self.rows = self.torch.index_select(self.x, 0, self.token)

    def combine(self) -> None:
        wide = self.torch.zeros(self.tokens, self.hidden, device=self.x.device)
        self.out.copy_(wide.index_add_(0, self.token, self.rows * self.weight))

    def received(self) -> Any:
        return self.rows

    def summed(self) -> Any:
        return self.sums


class MoeOps(Permuted):
    """moe-ops. Atomic additions order the rows of an expert: another order in each call."""

    def __init__(self, case: Case, buffers: Buffers) -> None:
        super().__init__(case, buffers)
        self.ops, self.narrow = importlib.import_module("moe_ops"), self.idx.int()

    def route(self) -> None:
        order = self.order()
        row = self.torch.empty_like(order)
        row[order] = self.torch.arange(len(order), device=order.device)
        self.map = row.view(-1, self.top_k).t().reshape(-1).int()  # [top_k, tokens]

    def dispatch(self) -> None:
        self.rows, self.map, _ = self.ops.permute(self.x, self.narrow, E=self.experts)

    def combine(self) -> None:
        self.sums = self.ops.unpermute(self.rows, self.map, self.weights, self.tokens, self.top_k)

    def received(self) -> Any:
        """Returns the rows in the order of a stable sort, from where the map says that they are."""
        return self.rows[self.map.view(self.top_k, -1).t().reshape(-1)[self.order()].long()]


class TransformerEngine(Permuted):
    """Transformer Engine's permutation by a map of rows."""

    def __init__(self, case: Case, buffers: Buffers) -> None:
        super().__init__(case, buffers)
        self.te = load("transformer_engine", TE_MODULE, ("common.triton",))
        self.shape = self.tokens, self.experts
        self.chosen, self.probs = (
            self.torch.zeros(self.shape, dtype=one.dtype, device=one.device).scatter_(1, self.idx, one)
            for one in (self.torch.ones_like(self.idx, dtype=self.torch.int32), self.weights)
        )

    def route(self) -> None:
        self.map = self.te.make_row_id_map(self.chosen, *self.shape)

    def dispatch(self) -> None:
        self.route()
        size = self.tokens * self.top_k, self.hidden, 0
        self.rows, *_ = self.te.permute_with_mask_map(self.x, self.map, None, None, None, *self.shape, *size)

    def combine(self) -> None:
        self.sums, _ = self.te.unpermute_with_mask_map(
            self.rows, self.map, self.probs, None, None, *self.shape, self.hidden
        )


class TorchBackend(Backend):
    """torch's own operations. Other libraries override `calls` and `package`."""

    name = "torch"
    devices = ("cuda",)
    moe, collectives = True, False
    calls: type[Permuted] = Permuted
    package, project = "torch", "torch"

    def available(self, ranks: int) -> str | None:
        if why := missing():
            return why
        if ranks > 1:
            return "it permutes on one GPU, and has no exchange: give --ranks 1."
        if folder_of(self.package) is None:
            return f"{self.project} is not installed: pip install --no-deps {self.project}."
        return None

    def version(self) -> str:
        return version_of(self.project)

    def setup(self, ranks: Ranks) -> None:
        self._temporaries = Temporaries()

    def supports(self, case: Case) -> str | None:
        flat = case.moe is not None and case.moe.layout != "expert_major"
        return "it permutes to the order of experts only." if flat else None

    def prepare(self, case: Case, buffers: Buffers) -> ResultCall:
        return self._temporaries.bound(moe_call(case, self.calls(case, buffers)))


class MoeOpsBackend(TorchBackend):
    """moe-ops, in Triton alone."""

    name, project, package, calls = "moe-ops", "moe-ops", "moe_ops", MoeOps


class TransformerEngineBackend(TorchBackend):
    """Transformer Engine's Triton files."""

    name, project, package, calls = "te", "transformer_engine", "transformer_engine", TransformerEngine
