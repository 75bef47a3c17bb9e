"""Makes calls as programs do: the same one many times, each rank on memory of its own kind, among messages
with tags and pauses. Checks each result.

So ranks learn ways, hold to them, change them, and lend memory, which the mixed calls of soak.py seldom make
them do. All data are small whole numbers, whose sums are exact in every order.
"""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import unisono
from soak import COLLECTIVES

Array = npt.NDArray[Any]
Step = Callable[[int], None]
MOST = 1 << 18  # elements of a buffer, f32: 1 MiB
_PATTERN = (np.arange(2 * MOST) % 997).astype(np.float32)
_PAGE = mmap.PAGESIZE
_HIDDEN = 96


class Repeating:
    """One rank's part. Every rank draws the same calls from `seed`, its memory and pauses from a seed of
    its own."""

    def __init__(self, comm: unisono.Communicator, seed: int) -> None:
        self.comm, self._all, self._own = comm, random.Random(seed), random.Random(f"{seed} {comm.rank}")
        self._symmetric = [comm.empty(MOST + _PAGE, np.float32) for _ in range(2)]
        self._experts = comm.moe(4 * comm.size, 3, _HIDDEN, 40, "float32")
        self._wrong: list[str] = []
        self._made: dict[str, int] = {}

    def run(self, calls: int) -> dict[str, Any]:
        """Makes the calls. Returns how many of each collective, and the wrong results."""
        kinds = (*COLLECTIVES, "norm", "moe")
        number = 0
        while number < calls and len(self._wrong) <= 10:
            name = self._all.choice(kinds)
            times = min(calls - number, self._all.choice((1, 2, 5, 30, 300)))
            step: Step = getattr(self, f"_{name}")()
            for _ in range(times):
                if self._own.random() < 0.01:
                    time.sleep(self._own.random() * 3e-3)
                with_messages = self._all.random() < 0.05
                end = self._messages(number) if with_messages else None
                step(number)
                if end:
                    end()
                number += 1
            self._made[name] = self._made.get(name, 0) + times
        self.comm.barrier()
        return {"made": self._made, "wrong": self._wrong}

    # ---- memory and data ----------------------------------------------------------------------------------

    def _memory(self, elements: int, which: int = 0) -> Array:
        """Returns memory of a kind that each rank draws for itself: small pages, the heap's, huge pages, or
        symmetric."""
        kind, offset = self._own.randrange(4), self._own.choice((0, 0, 1, 5, 16))
        if kind == 0:
            found = np.frombuffer(mmap.mmap(-1, 4 * (elements + offset) + 1), np.uint8)[
                : 4 * (elements + offset)
            ]
            return found.view(np.float32)[offset:]
        if kind == 1:
            return np.empty(elements + offset, np.float32)[offset:]
        if kind == 2:
            return np.empty(max(elements + offset, 1 << 20), np.float32)[offset : offset + elements]
        return self._symmetric[which][offset : offset + elements]

    def _elements(self, blocks: int = 1) -> int:
        """Returns how many elements a block has: none to MOST / blocks, mostly few."""
        return int((MOST // blocks) ** self._all.random() ** (1 if self._all.random() < 0.5 else 3)) - 1

    def _x(self, number: int, rank: int, elements: int) -> Array:
        begin = (number * 31 + rank * 7919) % MOST
        return _PATTERN[begin : begin + elements]

    def _sum(self, number: int, elements: int) -> Array:
        return np.sum([self._x(number, r, elements) for r in range(self.comm.size)], axis=0, dtype=np.float32)

    def _check(self, number: int, what: str, got: Array, expected: Array) -> None:
        if not np.array_equal(got, expected):
            where = np.argwhere(got != expected)[0].tolist() if got.shape == expected.shape else "all places"
            self._wrong.append(f"call {number}, {what} of {got.shape}, rank {self.comm.rank}, at {where}")

    # ---- the calls: each returns a step that has its buffers ----------------------------------------------

    def _all_reduce(self) -> Step:
        count, me = self._elements(), self.comm.rank
        x = self._memory(count)
        out = x if self._all.random() < 0.3 else self._memory(count, 1)
        later = self._all.random() < 0.2

        def step(number: int) -> None:
            x[:] = self._x(number, me, count)
            if later:
                self.comm.all_reduce(x, out=out, asynchronous=True).wait()
            else:
                self.comm.all_reduce(x, out=out)
            self._check(number, "all_reduce", out, self._sum(number, count))

        return step

    def _reduce(self) -> Step:
        count, me, root = self._elements(), self.comm.rank, self._all.randrange(self.comm.size)
        x, out = self._memory(count), self._memory(count, 1)

        def step(number: int) -> None:
            x[:] = self._x(number, me, count)
            self.comm.reduce(x, root, out=out if me == root else None)
            if me == root:
                self._check(number, "reduce", out, self._sum(number, count))

        return step

    def _broadcast(self) -> Step:
        count, me, root = self._elements(), self.comm.rank, self._all.randrange(self.comm.size)
        x = self._memory(count)

        def step(number: int) -> None:
            x[:] = self._x(number, me, count)
            self.comm.broadcast(x, root)
            self._check(number, "broadcast", x, self._x(number, root, count))

        return step

    def _gathered(self, number: int, count: int) -> Array:
        return np.stack([self._x(number, r, count) for r in range(self.comm.size)])

    def _all_gather(self) -> Step:
        n, me = self.comm.size, self.comm.rank
        count = self._elements(n)
        x, out = self._memory(count), self._memory(n * count, 1).reshape(n, count)

        def step(number: int) -> None:
            x[:] = self._x(number, me, count)
            self.comm.all_gather(x, out=out)
            self._check(number, "all_gather", out, self._gathered(number, count))

        return step

    def _gather(self) -> Step:
        n, me, root = self.comm.size, self.comm.rank, self._all.randrange(self.comm.size)
        count = self._elements(n)
        x, out = self._memory(count), self._memory(n * count, 1).reshape(n, count)

        def step(number: int) -> None:
            x[:] = self._x(number, me, count)
            self.comm.gather(x, root, out=out if me == root else None)
            if me == root:
                self._check(number, "gather", out, self._gathered(number, count))

        return step

    def _reduce_scatter(self) -> Step:
        n, me = self.comm.size, self.comm.rank
        count = self._elements(n)
        x, out = self._memory(n * count).reshape(n, count), self._memory(count, 1)

        def step(number: int) -> None:
            x.reshape(-1)[:] = self._x(number, me, n * count)
            self.comm.reduce_scatter(x, out=out)
            self._check(
                number, "reduce_scatter", out, self._sum(number, n * count)[me * count : (me + 1) * count]
            )

        return step

    def _scatter(self) -> Step:
        n, me, root = self.comm.size, self.comm.rank, self._all.randrange(self.comm.size)
        count = self._elements(n)
        x, out = self._memory(n * count).reshape(n, count), self._memory(count, 1)

        def step(number: int) -> None:
            x.reshape(-1)[:] = self._x(number, me, n * count)
            self.comm.scatter(x if me == root else None, root, out=out)
            self._check(
                number, "scatter", out, self._x(number, root, n * count)[me * count : (me + 1) * count]
            )

        return step

    def _all_to_all(self) -> Step:
        n, me = self.comm.size, self.comm.rank
        count = self._elements(n)
        x, out = self._memory(n * count).reshape(n, count), self._memory(n * count, 1).reshape(n, count)

        def step(number: int) -> None:
            x.reshape(-1)[:] = self._x(number, me, n * count)
            self.comm.all_to_all(x, out=out)
            expected = [self._x(number, r, n * count)[me * count : (me + 1) * count] for r in range(n)]
            self._check(number, "all_to_all", out, np.stack(expected))

        return step

    def _all_to_all_v(self) -> Step:
        n, me = self.comm.size, self.comm.rank
        counts = [[self._elements(n) for _ in range(n)] for _ in range(n)]
        begins = np.cumsum([[0, *row] for row in counts], axis=1)
        receives = [row[me] for row in counts]
        x, out = self._memory(sum(counts[me])), self._memory(sum(receives), 1)

        def step(number: int) -> None:
            x[:] = self._x(number, me, len(x))
            self.comm.all_to_all_v(x, counts[me], receives, out=out)
            parts = [self._x(number, r, MOST)[begins[r][me] : begins[r][me + 1]] for r in range(n)]
            self._check(number, "all_to_all_v", out, np.concatenate(parts))

        return step

    def _send_recv(self) -> Step:
        n, me, shift = self.comm.size, self.comm.rank, self._all.randrange(self.comm.size)
        count = self._elements()
        x, out = self._memory(count), self._memory(count, 1)
        to, source = (me + shift) % n, (me - shift) % n

        def step(number: int) -> None:
            x[:] = self._x(number, me, count)
            self.comm.send_recv(x, to, out, source)
            self._check(number, "send_recv", out, self._x(number, source, count))

        return step

    def _norm(self) -> Step:
        rows, me = 1 + self._elements() // _HIDDEN, self.comm.rank
        x, residual_out = (self._memory(rows * _HIDDEN, i).reshape(rows, _HIDDEN) for i in range(2))
        residual, weight = np.full((rows, _HIDDEN), 2, np.float32), np.ones(_HIDDEN, np.float32)
        options = unisono.NormOptions(residual_out=residual_out)

        def step(number: int) -> None:
            x.reshape(-1)[:] = self._x(number, me, rows * _HIDDEN)
            out, _ = self.comm.all_reduce_rms_norm(x, residual, weight, options=options)
            whole = self._sum(number, rows * _HIDDEN).reshape(rows, _HIDDEN) + 2
            self._check(number, "the residual of a norm", residual_out, whole)
            scale = 1 / np.sqrt((whole.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6)
            if not np.allclose(out, whole * scale, rtol=1e-5):
                self._wrong.append(f"call {number}, a norm of {rows} rows, rank {me}")

        return step

    def _moe(self) -> Step:
        me, moe = self.comm.rank, self._experts
        tokens = [self._all.randrange(moe.max_tokens + 1) for _ in range(self.comm.size)][me]
        mine = np.random.default_rng(self._own.randrange(1 << 30))

        def step(number: int) -> None:
            every = np.tile(np.arange(moe.num_experts), (tokens, 1))
            idx = np.ascontiguousarray(mine.permuted(every, axis=1)[:, : moe.top_k])
            idx[mine.random(idx.shape) < 0.2] = -1
            x = self._x(number, me, tokens * _HIDDEN).reshape(tokens, _HIDDEN)
            d = moe.dispatch(x, idx)
            out = moe.combine(d.x, d.handle)  # a row for each rank that has experts of the token
            ranks = [len({expert // moe.local_experts for expert in row if expert >= 0}) for row in idx]
            self._check(
                number, "a round of experts", np.asarray(out), x * np.array(ranks, np.float32).reshape(-1, 1)
            )

        return step

    # ---- messages with tags that pass by a call -----------------------------------------------------------

    def _messages(self, number: int) -> Callable[[], None]:
        """Sends some messages, and receives those of this rank: some now, some when the returned function is
        called."""
        n, me = self.comm.size, self.comm.rank
        drawn = [(self._all.randrange(n), self._all.randrange(n), self._elements()) for _ in range(4)]
        sent, taken = [], []
        for tag, (source, to, count) in enumerate(drawn):
            if source == me:
                x = self._x(number + tag, me, count).copy()
                sent.append(self.comm.send(x, to, tag=tag, asynchronous=True))
        receive = [(tag, source, count) for tag, (source, to, count) in enumerate(drawn) if to == me]
        self._own.shuffle(receive)
        early = receive[: self._own.randrange(len(receive) + 1)]
        for tag, source, count in early:
            out = np.empty(count, np.float32)
            taken.append((tag, source, out, self.comm.recv(out, source, tag=tag, asynchronous=True)))

        def end() -> None:
            for tag, source, count in receive[len(early) :]:
                out = np.empty(count, np.float32)
                self.comm.recv(out, source, tag=tag)
                self._check(number, "a message", out, self._x(number + tag, source, count))
            for tag, source, out, work in taken:
                work.wait()
                self._check(number, "an early message", out, self._x(number + tag, source, len(out)))
            for work in sent:
                work.wait()

        return end
