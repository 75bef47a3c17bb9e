"""Mixture of experts by torch: index_select, an exchange of rows (all_to_all_single), and sums.

Sums are embedding_bag's, which gathers and adds in one pass: on CPUs it takes a quarter of the time of
index_select, a product and index_add_. Its weights have the rows' type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.bench.backends.base import Buffers
from unisono.bench.backends.permutation import Array, Bags, Permutation, Scratch
from unisono.records import Case


@dataclass(frozen=True)
class _Bags:
    """Bags as tensors."""

    members: Any
    starts: Any
    weights: Any


class TorchMoe(Permutation):
    """The calls of one case. All memory is made beforehand, but for the results of embedding_bag.

    Args:
        tensor: returns an array of the bench as a tensor on the same memory.
        index: returns an array of numpy as a tensor where the rows are.
    """

    def __init__(
        self,
        rank: int,
        case: Case,
        buffers: Buffers,
        scratch: Scratch,
        tensor: Callable[[Any], Any],
        index: Callable[[Array], Any],
    ) -> None:
        import torch

        super().__init__(rank, case, scratch)
        self._torch, self._index = torch, index
        self._x, self._out = tensor(buffers.x), tensor(buffers.out)
        self._sent, self._came, self._ordered = map(tensor, (self._send, self._recv, self._rows))

    def exchange(self, x: Any, counts: list[int], out: Any, out_counts: list[int]) -> None:
        """Sends `counts` rows to each rank and receives `out_counts` from each."""
        raise NotImplementedError

    def follow(self, idx: Array, weights: Array) -> None:
        super().follow(idx, weights)
        self._tokens = self._index(self.plan.sent)
        self._order = None if self.plan.rows is None else self._index(self.plan.rows)
        self._bags: tuple[_Bags | None, _Bags] | None = None

    def bags(self) -> tuple[_Bags | None, _Bags]:
        """Returns the sums of the plan as tensors, which a dispatch does not need."""
        if self._bags is None:
            partial, total = self.plan.partial, self.plan.total
            self._bags = None if partial is None else self._tensors(partial), self._tensors(total)
        return self._bags

    def _tensors(self, bags: Bags) -> _Bags:
        weights = None if bags.weights is None else self._index(bags.weights).to(self._sent.dtype)
        return _Bags(self._index(bags.members), self._index(bags.starts), weights)

    def dispatch(self) -> None:
        torch, plan = self._torch, self.plan
        sent, came = self._sent[: len(plan.sent)], self._came[: plan.received]
        torch.index_select(self._x, 0, self._tokens, out=sent)
        self.exchange(sent, plan.send_counts, came, plan.recv_counts)
        if self._order is not None:
            torch.index_select(came, 0, self._order, out=self._ordered)

    def combine(self) -> None:
        plan, y = self.plan, self._x
        if not self._given:
            y = self._ordered if self.major else self._came[: self.plan.received]
        partial, total = self.bags()
        if partial is not None:
            y = self._sum(y, partial)
        back = self._sent[: len(plan.sent)]
        self.exchange(y, plan.recv_counts, back, plan.send_counts)
        self._sums = self._sum(back, total)

    def _sum(self, rows: Any, bags: _Bags) -> Any:
        bag = self._torch.nn.functional.embedding_bag
        return bag(bags.members, rows, bags.starts, mode="sum", per_sample_weights=bags.weights)
