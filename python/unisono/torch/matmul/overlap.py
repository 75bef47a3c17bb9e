"""Matmuls on GPUs whose parts travel by copy engines, into windows (Communicator.window), while the next part
is multiplied. A kernel that sends would wait for SMs behind the matmul.

A call is one round of its communicator's window. Matmuls, waits and sums are on the current stream, copies on
one beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..._core import Communicator, combine_arrays
from . import plan
from .chunk import Chunk, Matmul, part_of, slice_of

_Made = list[tuple[Any, torch.Tensor]]
_windows: weakref.WeakKeyDictionary[Communicator, _Made] = weakref.WeakKeyDictionary()
_streams: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()


def joined(comm: Communicator) -> bool:
    """Returns whether the ranks have GPUs that can have a window: the same on every rank."""
    return bool(comm.size > 1 and comm.nvlink and len(comm.nodes) == 1)


def possible(comm: Communicator, x: torch.Tensor) -> bool:
    """Returns whether parts of x can go by copy engines: the same on every rank."""
    return x.is_cuda and joined(comm)


def reserve(comm: Communicator, nbytes: int) -> tuple[Any, torch.Tensor]:
    """Returns a window of so many bytes at least, and its memory. Collective, if there is none yet.

    Smaller ones are kept, since graphs may have captured them: each is at least twice the one before.
    """
    made = _windows.setdefault(comm, [])
    if not made or made[-1][0].nbytes < nbytes:
        window = comm.window(max(nbytes, 2 * made[-1][0].nbytes if made else 0))
        made.append((window, window.array()))
    return made[-1]


class _Round:
    """A round of the window, from `with` on. At its end the current stream waits for the copies."""

    def __init__(self, comm: Communicator, like: torch.Tensor, nbytes: int) -> None:
        self._window, self._memory = reserve(comm, nbytes)
        self._like = like
        self._here = torch.cuda.current_stream(like.device)
        if comm not in _streams:
            _streams[comm] = torch.cuda.Stream(like.device)
        self.beside = _streams[comm]

    def __enter__(self) -> _Round:
        self._window.begin(stream=self._here)
        self.follow()
        return self

    def __exit__(self, *_: object) -> None:
        self._here.wait_stream(self.beside)

    def follow(self) -> None:
        """Makes later copies wait for what is on the current stream."""
        self.beside.wait_stream(self._here)

    def put(self, x: torch.Tensor, peer: int, offset: int) -> None:
        self._window.put_signal(x, peer, offset, stream=self.beside)

    def wait(self, peers: Sequence[int], count: int) -> None:
        """Makes the current stream wait for `count` puts of each of the peers in this round."""
        self._window.wait_signals(peers, count, stream=self._here)

    def rows(self, offset: int, rows: int, columns: int) -> torch.Tensor:
        """Returns this rank's memory there as a matrix."""
        nbytes = rows * columns * self._like.itemsize
        return self._memory[offset : offset + nbytes].view(self._like.dtype).view(rows, columns)


def others(comm: Communicator) -> list[int]:
    """Returns the other ranks, the one before this one in the ring first: it wants this rank's part first."""
    return [(comm.rank - i) % comm.size for i in range(1, comm.size)]


def _slot(sender: int, owner: int) -> int:
    """Returns the place of a sender's part among those of all ranks but the owner."""
    return sender - (sender > owner)


def gathered(
    comm: Communicator,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    owned: plan.Ranges,
    panels: plan.Ranges,
    matmul: Matmul,
    keep: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Returns everyone's a, if it is to be kept, and its products."""
    rows, depth = owned[-1].stop, a.shape[1]
    mine, orders = owned[comm.rank], plan.orders(panels, owned)
    products = [a.new_empty(rows, b.shape[1]) for b in bs]
    whole = a.new_empty(rows, depth) if keep else None
    came = dict.fromkeys(others(comm), 0)
    with _Round(comm, a, rows * depth * a.itemsize) as now:
        memory = now.rows(0, rows, depth)
        for step in range(len(panels)):
            for r in others(comm):
                if part := plan.overlap(orders[r][step], mine):
                    now.put(a[part_of(part, mine)], r, part.start * depth * a.itemsize)
        for step, panel in enumerate(orders[comm.rank]):
            inside = plan.overlap(panel, mine) == panel
            sources = [r for r in came if plan.overlap(panel, owned[r])]
            for r in sources:
                came[r] += 1
            for count in {came[r] for r in sources}:
                now.wait([r for r in sources if came[r] == count], count)
            if not inside and (part := plan.overlap(panel, mine)):
                memory[slice_of(part)] = a[part_of(part, mine)]
            source = a[part_of(panel, mine)] if inside else memory[slice_of(panel)]
            if whole is not None:
                now.follow()
                with torch.cuda.stream(now.beside):
                    whole[slice_of(panel)] = source
            for operand, (b, product) in enumerate(zip(bs, products, strict=True)):
                chunk = Chunk(step, operand, slice_of(panel), slice(0, b.shape[1]))
                matmul(source, b, product[slice_of(panel)], chunk)
    return whole, products


def scattered(
    comm: Communicator,
    a: torch.Tensor,
    b: torch.Tensor,
    owned: plan.Ranges,
    panels: plan.Ranges,
    matmul: Matmul,
    op: str,
) -> torch.Tensor:
    """Returns this rank's rows of the sum of all products."""
    me, mine, columns = comm.rank, owned[comm.rank], b.shape[1]
    product = a.new_empty(a.shape[0], columns)
    row_bytes = columns * a.itemsize
    block = len(owned[0]) * row_bytes
    with _Round(comm, a, (comm.size - 1) * block) as now:
        for step, panel in enumerate(plan.orders(panels, owned, own_last=True)[me]):
            rows = slice_of(panel)
            matmul(a[rows], b, product[rows], Chunk(step, 0, rows, slice(0, columns)))
            now.follow()
            for r in others(comm):
                if part := plan.overlap(panel, owned[r]):
                    offset = _slot(me, r) * block + (part.start - owned[r].start) * row_bytes
                    now.put(product[slice_of(part)], r, offset)
        if mine:
            now.wait(others(comm), sum(bool(plan.overlap(panel, mine)) for panel in panels))
        landed = [now.rows(i * block, len(mine), columns) for i in range(comm.size - 1)]
        landed.insert(me, product[slice_of(mine)])
        return combine_arrays(landed, op)
