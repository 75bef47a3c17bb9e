"""Mixture of experts by mpi4py and numpy: Allgather of the routes, take, Alltoallv."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from unisono.bench import routes
from unisono.bench.backends.base import Buffers
from unisono.bench.backends.permutation import Bags, Permutation, Scratch
from unisono.records import Case

CACHED_BYTES = 1 << 20  # of rows that are summed at once, so that they stay in the core's cache


class MpiMoe(Permutation):
    """The calls of one case. All memory is made beforehand. Rows of bf16 and f16 are summed in f32."""

    def __init__(self, comm: Any, case: Case, buffers: Buffers, scratch: Scratch) -> None:
        from mpi4py import MPI

        super().__init__(comm.rank, case, scratch)
        self._comm, self._byte, self._int = comm, MPI.BYTE, MPI.INT32_T
        self._x, self._out = buffers.x, buffers.out
        hidden = routes.shape(case).hidden
        self._row_bytes = self._send.itemsize * hidden
        self._at_once = max(1, CACHED_BYTES // (4 * hidden))
        most = max(self._at_once, routes.shape(case).top_k, case.ranks)
        self._taken = np.empty((most, hidden), self._send.dtype)
        self._wide = np.empty((most, hidden), np.float32)

    def gather(self) -> None:
        self._comm.Allgather([self._mine, self._int], [self._all, self._int])

    def dispatch(self) -> None:
        self.route()
        plan = self.plan
        mine, there = plan.own(plan.send_counts), plan.own(plan.recv_counts)
        sent, received = self._send[: len(plan.sent)], self._recv[: plan.received]
        for rows, out in (
            (slice(0, mine.start), sent[: mine.start]),
            (mine, received[there]),  # this rank's own rows do not pass through MPI
            (slice(mine.stop, None), sent[mine.stop :]),
        ):
            self._x.take(plan.sent[rows], axis=0, out=out, mode="clip")
        self._exchange(sent, plan.send_counts, received, plan.recv_counts, without_own=True)
        if plan.rows is not None:
            received.take(plan.rows, axis=0, out=self._rows, mode="clip")

    def combine(self) -> None:
        plan, y = self.plan, self._x if self._given else self.received()
        if plan.partial is not None:
            summed = self._recv[: plan.received]
            self._sum(y, plan.partial, summed)
            y = summed
        back = self._send[: len(plan.sent)]
        self._exchange(y, plan.recv_counts, back, plan.send_counts)
        self._sum(back, plan.total, self._out)

    def _exchange(
        self, x: Any, counts: list[int], out: Any, out_counts: list[int], without_own: bool = False
    ) -> None:
        """Sends `counts` rows to each rank and receives `out_counts` from each."""
        specs = []
        for array, rows in ((x, counts), (out, out_counts)):
            size = [count * self._row_bytes for count in rows]
            starts = [0, *itertools.accumulate(size[:-1])]
            if without_own:
                size[self.rank] = 0
            specs.append([array.view(np.uint8), (size, starts), self._byte])
        self._comm.Alltoallv(*specs)

    def _sum(self, rows: Any, bags: Bags, out: Any) -> None:
        for one in bags.sums:
            step = max(1, self._at_once // one.members.shape[1])
            for start in range(0, len(one.groups), step):
                self._sum_part(rows, out, *one.part(start, step))

    def _sum_part(self, rows: Any, out: Any, where: Any, members: Any, weights: Any) -> None:
        taken = rows.take(members.reshape(-1), axis=0, out=self._taken[: members.size], mode="clip")
        if members.shape[1] == 1 and weights is None:
            out[where] = taken
            return
        if taken.dtype != np.float32:
            wide = self._wide[: members.size]
            np.copyto(wide, taken)
            taken = wide
        parts = taken.reshape(*members.shape, -1)
        at_once = out[where] if isinstance(where, slice) and out.dtype == np.float32 else None
        if weights is None:
            total = np.add.reduce(parts, axis=1, out=at_once)
        else:
            total = np.einsum("nc,nch->nh", weights, parts, out=at_once)
        if at_once is None:
            out[where] = total
