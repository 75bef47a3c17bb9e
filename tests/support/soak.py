"""Makes mixed collectives of random sizes back to back on one communicator, and checks each result.

Inputs are a function of (call, rank, index) that costs little to compute, so that calls follow each other
closely. Sums are of small whole numbers, which are exact in every order. The contract suite is the reference
for the bits of other sums.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt

import unisono
from unisono import traits

Array = npt.NDArray[Any]
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "reduce_scatter",
    "scatter",
    "all_to_all",
    "all_to_all_v",
    "send_recv",
)
_BASE = 1 << 17  # elements of the pattern
_KINDS = (np.float32, np.int32, np.float64, np.int64)


class Soak:
    """One rank's part. Every rank draws the same calls from the same seed."""

    def __init__(self, comm: unisono.Communicator, seed: int) -> None:
        self.comm = comm
        self._random = random.Random(seed)
        self._pattern = {kind: (np.arange(_BASE) % 997).astype(kind) for kind in _KINDS}
        self._symmetric = {kind: comm.empty(1 << 15, kind) for kind in _KINDS}
        self._wrong: list[str] = []
        self._made: dict[str, int] = {}
        self._algorithms = {name: [None, *comm.algorithms(name)] for name in COLLECTIVES}

    def run(self, calls: int) -> dict[str, Any]:
        """Makes the calls. Returns how many of each collective, and the wrong results."""
        kinds = [*self._algorithms, "batch_send_recv", "all_reduce", "barrier"]
        for number in range(calls):
            name = self._random.choice(kinds)
            self._made[name] = self._made.get(name, 0) + 1
            getattr(self, f"_{name}")(number)
            if len(self._wrong) > 10:
                break
        return {"made": self._made, "wrong": self._wrong}

    # ---- random choices, the same on every rank -----------------------------------------------------------

    def _size(self, most: int = 1 << 15) -> int:
        """Returns a size: mostly small, sometimes large."""
        return int(most ** self._random.random() ** (1 if self._random.random() < 0.1 else 2)) - 1

    def _kind(self) -> Any:
        return self._random.choice(_KINDS)

    def _rank(self) -> int:
        return self._random.randrange(self.comm.size)

    def _how(self, name: str) -> dict[str, Any]:
        algorithms = self._algorithms[name]
        pick = self._random.choice(algorithms) if self._random.random() < 0.5 else None
        return {} if pick is None or traits.algorithm(pick).direct else {"algorithm": pick}

    def _x(self, number: int, rank: int, count: int, kind: Any) -> Array:
        begin = (number * 31 + rank * 7919) % (_BASE - (1 << 16))
        return self._pattern[kind][begin : begin + count]

    def _check(self, number: int, what: str, got: Array, expected: Array) -> None:
        if not np.array_equal(got, expected):
            where = np.argwhere(got != expected)[0].tolist()
            self._wrong.append(
                f"call {number}, {what} of {got.shape} {got.dtype}, rank {self.comm.rank}, at {where}"
            )

    def _sum(self, number: int, count: int, kind: Any) -> Array:
        total = self._x(number, 0, count, kind).copy()
        for rank in range(1, self.comm.size):
            total += self._x(number, rank, count, kind)
        return total

    # ---- the calls ----------------------------------------------------------------------------------------

    def _barrier(self, number: int) -> None:
        self.comm.barrier()

    def _all_reduce(self, number: int) -> None:
        count, kind, how = self._size(), self._kind(), self._how("all_reduce")
        place = self._random.randrange(3)
        x = self._x(number, self.comm.rank, count, kind)
        if place == 0:
            got = self.comm.all_reduce(x, **how)
        else:
            buffer = x.copy() if place == 1 else self._symmetric[kind][:count]
            buffer[:] = x
            got = self.comm.all_reduce(buffer, out=buffer, **how)
        self._check(number, "all_reduce", got, self._sum(number, count, kind))

    def _reduce(self, number: int) -> None:
        count, kind, root, how = self._size(), self._kind(), self._rank(), self._how("reduce")
        got = self.comm.reduce(self._x(number, self.comm.rank, count, kind), root=root, **how)
        if got is not None:
            self._check(number, "reduce", got, self._sum(number, count, kind))

    def _broadcast(self, number: int) -> None:
        count, kind, root, how = self._size(), self._kind(), self._rank(), self._how("broadcast")
        x = self._x(number, self.comm.rank, count, kind).copy()
        self._check(
            number, "broadcast", self.comm.broadcast(x, root=root, **how), self._x(number, root, count, kind)
        )

    def _all(self, number: int, count: int, kind: Any) -> Array:
        return np.stack([self._x(number, rank, count, kind) for rank in range(self.comm.size)])

    def _all_gather(self, number: int) -> None:
        count, kind, how = self._size(1 << 13), self._kind(), self._how("all_gather")
        got = self.comm.all_gather(self._x(number, self.comm.rank, count, kind), **how)
        self._check(number, "all_gather", got, self._all(number, count, kind))

    def _gather(self, number: int) -> None:
        count, kind, root, how = self._size(1 << 13), self._kind(), self._rank(), self._how("gather")
        got = self.comm.gather(self._x(number, self.comm.rank, count, kind), root=root, **how)
        if got is not None:
            self._check(number, "gather", got, self._all(number, count, kind))

    def _blocks(self, number: int, rank: int, count: int, kind: Any) -> Array:
        return self._x(number, rank, count * self.comm.size, kind).reshape(self.comm.size, count)

    def _reduce_scatter(self, number: int) -> None:
        count, kind, how = self._size(1 << 12), self._kind(), self._how("reduce_scatter")
        got = self.comm.reduce_scatter(self._blocks(number, self.comm.rank, count, kind), **how)
        total = self._sum(number, count * self.comm.size, kind).reshape(self.comm.size, count)
        self._check(number, "reduce_scatter", got, total[self.comm.rank])

    def _scatter(self, number: int) -> None:
        count, kind, root, how = self._size(1 << 12), self._kind(), self._rank(), self._how("scatter")
        x = self._blocks(number, root, count, kind) if self.comm.rank == root else None
        got = self.comm.scatter(x, root=root, out=np.empty(count, kind), **how)
        self._check(number, "scatter", got, self._blocks(number, root, count, kind)[self.comm.rank])

    def _all_to_all(self, number: int) -> None:
        count, kind, how = self._size(1 << 12), self._kind(), self._how("all_to_all")
        x = self._blocks(number, self.comm.rank, count, kind)
        if self._random.random() < 0.5:
            x = x.copy()
            got = self.comm.all_to_all(x, out=x, **how)
        else:
            got = self.comm.all_to_all(x, **how)
        n, me = self.comm.size, self.comm.rank
        self._check(
            number, "all_to_all", got, np.stack([self._blocks(number, r, count, kind)[me] for r in range(n)])
        )

    def _all_to_all_v(self, number: int) -> None:
        kind, how, n, me = self._kind(), self._how("all_to_all_v"), self.comm.size, self.comm.rank
        counts = [[self._size(1 << 11) for _ in range(n)] for _ in range(n)]
        got = self.comm.all_to_all_v(
            self._x(number, me, sum(counts[me]), kind), counts[me], [row[me] for row in counts], **how
        )
        parts = [
            self._x(number, r, sum(row), kind)[sum(row[:me]) : sum(row[: me + 1])]
            for r, row in enumerate(counts)
        ]
        self._check(number, "all_to_all_v", got, np.concatenate(parts))

    def _send_recv(self, number: int) -> None:
        count, kind, step, how = self._size(), self._kind(), self._rank(), self._how("send_recv")
        n, me = self.comm.size, self.comm.rank
        source = (me - step) % n
        got = self.comm.send_recv(self._x(number, me, count, kind), (me + step) % n, None, source, **how)
        self._check(number, "send_recv", got, self._x(number, source, count, kind))

    def _batch_send_recv(self, number: int) -> None:
        kind, n, me = self._kind(), self.comm.size, self.comm.rank
        counts = [[self._size() if self._random.random() < 0.7 else None for _ in range(n)] for _ in range(n)]
        sends = [
            (self._x(number, me, count, kind), p) for p, count in enumerate(counts[me]) if count is not None
        ]
        recvs = [(np.zeros(row[me], kind), p) for p, row in enumerate(counts) if row[me] is not None]
        self.comm.batch_send_recv(sends, recvs)
        for got, source in recvs:
            self._check(number, "batch_send_recv", got, self._x(number, source, len(got), kind))
