"""The permutation around an all_to_all by which libraries without mixture of experts dispatch and combine.

Every rank gets all ranks' top k and weights in one small gather, from which it knows all counts and places,
so that no second exchange is needed. A token goes once to each rank with an expert of its own, and each rank
sums its experts' results before it sends them back. Both take the fewest bytes. The index arithmetic is
numpy's for all peers, without a loop over tokens: on these small arrays it is quicker than torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from unisono.bench import routes
from unisono.bench.backends.base import MoeCalls
from unisono.bench.buffers import Region, plain_region
from unisono.records import Case
from unisono.records.vocabulary import DTYPES

Array = Any


class Scratch:
    """Memory of one rank for the calls of all cases, which are made one after the other. `make`: makes a
    region of a number of bytes."""

    def __init__(self, make: Callable[[int], Region] = plain_region) -> None:
        self._make = make
        self._regions: dict[str, Region] = {}

    def of(self, case: Case, rank: int) -> tuple[Array, Array, Array]:
        """Returns memory for the rows that a rank sends and receives, and for the received ones by expert."""
        moe, sent = routes.shape(case), routes.of(case).sent
        most = int(max(sent[rank].sum(), sent[:, rank].sum()))
        pairs = len(routes.rows(case, rank).token) if moe.layout == "expert_major" else 0
        sizes = {"send": most, "recv": most, "rows": pairs}
        send, recv, rows = (self.view(name, size, moe.hidden, case.dtype) for name, size in sizes.items())
        return send, recv, rows

    def view(self, name: str, rows: int, hidden: int, dtype: str) -> Array:
        """Returns an array [rows, hidden] in the memory of this name."""
        size = rows * hidden * DTYPES[dtype].itemsize
        known = self._regions.get(name)
        if known is None or known.memory.nbytes < size:
            known = self._regions[name] = self._make(size)
            known.poison()  # first touch
        return known.view((rows, hidden), dtype)


@dataclass(frozen=True)
class Sum:
    """Sums of as many rows each: row groups[i] is the sum over j of weights[i, j] * rows[members[i, j]]."""

    groups: Array  # ascending
    members: Array
    weights: Array | None

    def part(self, start: int, count: int) -> tuple[Any, Array, Array | None]:
        """Returns where some of the sums go, a slice if they follow each other, their members and weights."""
        groups = self.groups[start : start + count]
        along = slice(int(groups[0]), int(groups[-1]) + 1)
        weights = None if self.weights is None else self.weights[start : start + count]
        where = along if along.stop - along.start == len(groups) else groups
        return where, self.members[start : start + count], weights


@dataclass(frozen=True)
class Bags:
    """Sums of `counts` rows each, whose members and weights follow each other."""

    counts: Array
    members: Array
    weights: Array | None

    @cached_property
    def starts(self) -> Array:
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def sums(self) -> list[Sum]:
        """Returns the sums, those of as many rows together."""
        found = []
        for count in np.flatnonzero(np.bincount(self.counts)):
            if count:
                groups = np.flatnonzero(self.counts == count)
                at = self.starts[groups, None] + np.arange(count)
                weights = None if self.weights is None else self.weights[at]
                found.append(Sum(groups, self.members[at], weights))
        return found


@dataclass(frozen=True)
class Plan:
    """One rank's part of a routing."""

    rank: int
    sent: Array  # the tokens of the rows to send, by (rank, token)
    send_counts: list[int]  # rows to each rank
    recv_counts: list[int]
    rows: Array | None  # expert_major: the received row of each row of the result; flat: None, the same
    counts: Array  # (token, expert) pairs of each expert here
    topk_idx: Array | None  # flat: of each received row, its experts as numbers within this rank, or -1
    weights: Array | None
    partial: Bags | None  # expert_major: from the experts' rows to the received rows
    total: Bags  # from the rows that came back to the tokens

    @property
    def received(self) -> int:
        return sum(self.recv_counts)

    def own(self, counts: list[int]) -> slice:
        """Returns the rows of this rank itself among those of `counts`."""
        start = sum(counts[: self.rank])
        return slice(start, start + counts[self.rank])


def make_plan(idx: Array, weights: Array, rank: int, experts: int, expert_major: bool) -> Plan:
    """Returns the plan of `rank`. `idx`, `weights`: [ranks, tokens, top_k], of all ranks."""
    ranks, tokens, top_k = idx.shape
    here = experts // ranks
    hit = np.zeros((ranks, tokens), bool)
    hit[idx[rank] // here, np.arange(tokens)[:, None]] = True
    local = (idx - rank * here).reshape(-1, top_k)
    mine = (local >= 0) & (local < here)
    got = mine.any(axis=1)
    flat_weights = weights.reshape(-1, top_k)
    expert = local[mine]
    rows = partial = topk_idx = row_weights = None
    if not expert_major:
        topk_idx, row_weights = np.where(mine, local, -1)[got], flat_weights[got]
    else:
        received = np.cumsum(got)[np.nonzero(mine)[0]] - 1  # the row of each pair
        order = np.argsort(expert.astype(np.int16), kind="stable")
        rows, place = received[order], np.empty_like(order)
        place[order] = np.arange(len(order))
        partial = Bags(np.count_nonzero(mine[got], axis=1), place, flat_weights[mine])
    return Plan(
        rank=rank,
        sent=np.nonzero(hit)[1],
        send_counts=np.count_nonzero(hit, axis=1).tolist(),
        recv_counts=np.count_nonzero(got.reshape(ranks, tokens), axis=1).tolist(),
        rows=rows,
        counts=np.bincount(expert, minlength=here),
        topk_idx=topk_idx,
        weights=row_weights,
        partial=partial,
        total=Bags(np.count_nonzero(hit, axis=0), (np.cumsum(hit) - 1).reshape(hit.shape).T[hit.T], None),
    )


class Permutation(MoeCalls):
    """A rank's routes, memory and plan, which the calls of one case have in common."""

    def __init__(self, rank: int, case: Case, scratch: Scratch) -> None:
        moe, found = routes.shape(case), routes.of(case)
        self.rank, self.major = rank, moe.layout == "expert_major"
        self._given = case.collective == "moe_combine"  # the experts' results are an input
        self._experts, self._top_k = moe.experts, moe.top_k
        self._idx, self._weights = found.experts[rank].copy(), found.weights[rank].copy()
        self._mine = np.empty((moe.tokens, 2 * moe.top_k), np.int32)
        self._all = np.empty((case.ranks, moe.tokens, 2 * moe.top_k), np.int32)
        self._send, self._recv, self._rows = scratch.of(case, rank)
        self.plan: Plan

    def gather(self) -> None:
        """Gathers `_mine` of all ranks into `_all`."""
        raise NotImplementedError

    def route(self) -> None:
        k = self._top_k
        self._mine[:, :k] = self._idx
        self._mine[:, k:].view(np.float32)[...] = self._weights
        self.gather()
        self.follow(self._all[:, :, :k], self._all[:, :, k:].view(np.float32))

    def follow(self, idx: Array, weights: Array) -> None:
        """Takes the routes of all ranks."""
        self.plan = make_plan(idx, weights, self.rank, self._experts, self.major)

    def received(self) -> Array:
        """Returns the rows that the last dispatch has given."""
        return self._rows if self.major else self._recv[: self.plan.received]
