"""Mixture of experts by torch over gloo: all_gather of the routes, index_select, all_to_all_single.

Weighted sums are embedding_bag's, which gathers and adds in one pass: on CPUs it takes a quarter of the time
of index_select, a product and index_add_. Its weights have the rows' type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.bench import routes
from unisono.bench.backends.base import Buffers
from unisono.bench.backends.permutation import Bags, Permutation, Scratch
from unisono.records import Case


class GlooMoe(Permutation):
    """The calls of one case. All memory is made beforehand, but for the results of embedding_bag."""

    def __init__(
        self, group: Any, case: Case, buffers: Buffers, scratch: Scratch, tensor: Callable[[Any, Case], Any]
    ) -> None:
        """`tensor` returns an array as a flat tensor on the same memory."""
        import torch

        super().__init__(group.rank(), case, scratch)
        hidden = routes.shape(case).hidden

        def rows_of(array: Any) -> Any:
            return None if array is None else tensor(array, case).view(-1, hidden)

        self._torch, self._group = torch, group
        self._x, self._out = rows_of(buffers.x), rows_of(buffers.out)
        self._sent, self._came, self._ordered = map(rows_of, (self._send, self._recv, self._rows))
        self._gathered = torch.from_numpy(self._all).view(-1), torch.from_numpy(self._mine).view(-1)

    def gather(self) -> None:
        self._group._allgather_base(*self._gathered).wait()

    def dispatch(self) -> None:
        self.route()
        torch, plan = self._torch, self.plan
        sent, came = self._sent[: len(plan.sent)], self._came[: plan.received]
        torch.index_select(self._x, 0, torch.from_numpy(plan.sent), out=sent)
        self._group.alltoall_base(came, sent, plan.recv_counts, plan.send_counts).wait()
        if plan.rows is not None:
            torch.index_select(came, 0, torch.from_numpy(plan.rows), out=self._ordered)

    def combine(self) -> None:
        plan, y = self.plan, self._x
        if not self._given:
            y = self._ordered if self.major else self._came[: self.plan.received]
        if plan.partial is not None:
            y = self._sum(y, plan.partial)
        back = self._sent[: len(plan.sent)]
        self._group.alltoall_base(back, y, plan.send_counts, plan.recv_counts).wait()
        self._out.copy_(self._sum(back, plan.total))

    def _sum(self, rows: Any, bags: Bags) -> Any:
        torch = self._torch
        weights = None if bags.weights is None else torch.from_numpy(bags.weights).to(rows.dtype)
        members, starts = torch.from_numpy(bags.members), torch.from_numpy(bags.starts)
        return torch.nn.functional.embedding_bag(
            members, rows, starts, mode="sum", per_sample_weights=weights
        )
