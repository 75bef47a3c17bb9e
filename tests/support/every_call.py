"""Every call of a communicator, on integers: by comm itself, by comm.bind, waited for or begun."""

from __future__ import annotations

from typing import Any

import numpy as np

import unisono


class EveryCall:
    """Inputs of one rank of two or more, and all calls that take them."""

    def __init__(self, comm: unisono.Communicator) -> None:
        self.size, self.rank = comm.size, comm.rank
        self.random = np.random.default_rng(self.rank)
        self.x = self.random.integers(0, 1000, (self.size, 70), dtype=np.int32)
        # the same from and to each rank
        self.counts = [10 * (1 + (self.rank + r) % self.size) for r in range(self.size)]
        self.packed = np.arange(sum(self.counts), dtype=np.int32) + self.rank

    def outputs(self) -> list[Any]:
        """Returns arrays for `make` to write."""
        return [*(np.zeros(70, np.int32) for _ in range(3)), np.zeros_like(self.x), np.zeros_like(self.x)]

    def make(self, of: Any, got: list[Any], **more: Any) -> list[Any]:
        """Makes each call of `of` once, with the parameters `more`. Returns what they return."""
        x, last = self.x, self.size - 1
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        made = [
            of.all_reduce(x, "max", out=got[4], algorithm="two_shot", **more),
            of.reduce(x, root=last, **more),
            of.broadcast(x, root=last, out=got[3], **more),
            of.all_gather(x, **more),
            of.gather(x, root=0, **more),
            of.reduce_scatter(x, **more),
            of.scatter(x, root=0, **more),
            of.all_to_all(x, **more),
            of.all_to_all_v(self.packed, self.counts, self.counts, **more),
            of.send_recv(x[0], right, got[0], left, **more),
            of.batch_send_recv([(x[1], right)], [(got[1], left)], **more),
            of.barrier(**more),
        ]
        if self.rank == 0:
            made.append(of.send(x[2], 1, **more))
        elif self.rank == 1:
            made.append(of.recv(got[2], 0, **more))
        return made


def assert_alike(some: list[Any], others: list[Any]) -> None:
    """Fails unless results are of the same types and equal."""
    for one, other in zip(some, others, strict=True):
        assert type(one) is type(other)
        if other is not None:
            assert np.array_equal(one, other)
