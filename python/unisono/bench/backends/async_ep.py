"""torchtitan's MinimalAsyncEP: Triton kernels push rows over PyTorch's symmetric memory, to experts' order.

It is measured if torchtitan is installed, or if a folder of PYTHONPATH holds its unpacked wheel: only
three of its modules are loaded. A token goes once to each of its experts, also to those of one rank. A
process has one buffer of one shape, so that only cases of the run's first shape are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.bench import routes
from unisono.bench.backends import torch_group
from unisono.bench.backends.base import Backend, Buffers, MoeCalls, Ranks, ResultCall, moe_call
from unisono.bench.backends.by_path import folder_of, load, version_of
from unisono.bench.cuda.device import missing
from unisono.bench.cuda.memory import tensor_of
from unisono.bench.cuda.temporaries import Temporaries
from unisono.records import Case

MODULE = "distributed.minimal_async_ep.api"


class AsyncEp(MoeCalls):
    """The calls of one case. `capacity`: the rows of the buffer."""

    def __init__(self, api: Any, capacity: int, rank: int, case: Case, buffers: Buffers) -> None:
        import torch

        moe, found, device = routes.shape(case), routes.of(case), buffers.x.device
        self.torch, self.api, self.moe = torch, api, moe
        self.x, self.out, self.capacity, self.ranks = buffers.x, buffers.out, capacity, case.ranks
        self.idx, self.weights = (tensor_of(one[rank], device) for one in (found.experts, found.weights))
        self.received_rows = len(routes.rows(case, rank).token)
        self.ones = torch.ones_like(self.idx.view(-1))
        self.rows, self.plan, self.sums = self.x, (), None

    def send(self, x: Any) -> Any:
        """Returns the received rows, as many as the buffer holds, and keeps the plan of the combine."""
        counts = self.torch.zeros(self.moe.experts, dtype=self.torch.int64, device=x.device)
        counts.scatter_add_(0, self.idx.view(-1), self.ones)
        rows, *plan, order, place, _ = self.api.dispatch_op(x, self.idx, counts, self.capacity, self.ranks)
        self.plan = (*plan, place, order)
        return rows

    def route(self) -> None:
        self.send(self.out)

    def dispatch(self) -> None:
        self.rows = self.send(self.x)

    def combine(self) -> None:
        weights, size = self.weights.view(-1), (self.moe.tokens, self.moe.top_k)
        self.sums, _ = self.api.combine_op(self.rows, *self.plan, weights, *size)

    def received(self) -> Any:
        return self.rows[: self.received_rows]

    def summed(self) -> Any:
        return self.sums


class AsyncEpBackend(Backend):
    """MinimalAsyncEP on the bench's stream."""

    name = "async-ep"
    devices = ("cuda",)
    moe, collectives = True, False

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._shape: tuple[object, ...] | None = None
        self._tokens = 0
        self._api: Any = None

    def available(self, ranks: int) -> str | None:
        why = missing() or torch_group.lacking()
        if why is None and ranks == 1:
            why = "alone it has nothing to exchange: backend torch permutes."
        if why is None and folder_of("torchtitan") is None:
            why = "torchtitan is not installed: pip install --no-deps torchtitan."
        return why

    def version(self) -> str:
        return version_of("torchtitan")

    def setup(self, ranks: Ranks) -> None:
        self._temporaries = Temporaries()
        torch_group.join(ranks)
        self._ranks = ranks

    def expect(self, cases: Sequence[Case]) -> None:
        for case in cases:
            if case.moe is not None and self._lacks(case) is None:
                self._shape = self._shape or _shape(case)
                if _shape(case) == self._shape:
                    self._tokens = max(self._tokens, case.moe.tokens)

    @staticmethod
    def _lacks(case: Case) -> str | None:
        if routes.shape(case).layout != "expert_major" or case.dtype == "f16":
            return "it has rows of f32 and bf16 in the order of experts only."
        return None

    def supports(self, case: Case) -> str | None:
        other = _shape(case) != self._shape
        return self._lacks(case) or ("it has one buffer, for the run's first shape." if other else None)

    def prepare(self, case: Case, buffers: Buffers) -> ResultCall:
        assert self._ranks is not None
        moe, here = routes.shape(case), routes.shape(case).experts // case.ranks
        if self._api is None:
            import torch.distributed as dist

            self._api = load("torchtitan", MODULE, ("tools",))
            self._api.init_buffer(
                dist.group.WORLD, moe.hidden, self._tokens, here, moe.top_k, buffers.x.dtype, buffers.x.device
            )
        capacity = case.ranks * self._tokens * min(moe.top_k, here)
        calls = AsyncEp(self._api, capacity, self._ranks.rank, case, buffers)
        return self._temporaries.bound(moe_call(case, calls))

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks = None
            torch_group.leave()


def _shape(case: Case) -> tuple[object, ...]:
    """Returns what its buffer depends on, besides the tokens."""
    moe = routes.shape(case)
    return moe.hidden, moe.top_k, moe.experts, case.dtype
