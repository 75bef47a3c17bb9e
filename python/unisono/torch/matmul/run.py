"""Runs matmuls with their collectives, chunk by chunk. On a GPU collectives have a stream of their own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ... import communicator
from ..._core import Communicator, NormOptions, combine_arrays
from ...errors import UsageError
from . import plan


@dataclass(frozen=True)
class Chunk:
    """A part of a product, as a `matmul` of the caller's is told."""

    index: int  # the how-manieth of this call
    operand: int  # the number of B
    rows: slice  # of the whole product
    columns: slice


Matmul = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Chunk], object]


def torch_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, _: Chunk) -> None:
    """Writes a @ b to out."""
    torch.mm(a, b, out=out)


_streams: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()
_alone: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()


class _Beside:
    """The place of a call's collectives: a stream beside the current one; on CPUs they run at once.

    The current stream waits for that one at the end, also after an error.
    """

    def __init__(self, comm: Communicator, tensor: torch.Tensor) -> None:
        self._stream: Any = None
        if tensor.is_cuda and comm.size > 1:
            self._current = torch.cuda.current_stream(tensor.device)
            self._stream = _streams.get(comm)
            if self._stream is None:  # of high priority: a kernel that sends needs few SMs, and soon
                self._stream = _streams[comm] = torch.cuda.Stream(tensor.device, priority=-1)

    def __enter__(self) -> _Beside:
        if self._stream is not None:
            self._stream.wait_stream(self._current)
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def collectives(self, after_matmuls: bool = False) -> AbstractContextManager[Any]:
        """Returns a context for collectives. after_matmuls: they wait for the matmuls before them."""
        if self._stream is None:
            return nullcontext()
        if after_matmuls:
            self._stream.wait_stream(self._current)
        return torch.cuda.stream(self._stream)  # type: ignore[no-any-return]

    def join(self) -> None:
        """Makes what follows on the current stream wait for all collectives so far."""
        if self._stream is not None:
            self._current.wait_stream(self._stream)


def _part(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _sms(tensor: torch.Tensor) -> int:
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def _panels(a: torch.Tensor, bs: Sequence[torch.Tensor], owned: plan.Ranges, chunks: int) -> plan.Ranges:
    """Returns the panels of rows of a product that is shared out. chunks: 0: as planned."""
    if chunks or not a.is_cuda or len(owned) == 1:  # otherwise nothing would run beside the matmul
        return plan.by_shares(owned, chunks or 1)
    return plan.of_shares(owned, tuple(b.shape[1] for b in bs), a.shape[1] * a.itemsize, _sms(a))


def flat(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns x as a matrix, with rows in the order of axis `dim` first."""
    return x.movedim(dim, 0).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def shaped(rows: torch.Tensor, like: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """Returns rows in the axes of `like`, whose axis `dim` has another extent here."""
    rest = like.movedim(dim, 0).shape[1:-1]
    return rows.view(extent, *rest, rows.shape[-1]).movedim(0, dim)


def share(extent: int, comm: Communicator) -> int:
    """Returns the length of this rank's share, as plan.shares cuts it, also of an extent that is a symbol."""
    block = -(-extent // comm.size)
    return min(block, max(extent - block * comm.rank, 0))


def _owned(x: torch.Tensor, dim: int, extent: int, comm: Communicator) -> plan.Ranges:
    """Returns each rank's rows of a matrix as `flat` makes it of x with that extent of axis `dim`."""
    unit = math.prod(x.movedim(dim, 0).shape[1:-1])
    return plan.shares(extent * unit, comm.size, unit)


def all_gather_matmul(
    comm: Communicator,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    dim: int,
    extent: int,
    chunks: int,
    matmul: Matmul,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns everyone's a, of that extent along axis `dim`, and the products. One rank gets a itself."""
    if a.shape[dim] != share(extent, comm):
        raise UsageError(
            f"A_shard has {a.shape[dim]} along gather_dim, but of {extent} rank {comm.rank} of {comm.size} "
            "has another share: give the share that torch.chunk gives."
        )
    rows = flat(a, dim).contiguous()
    whole, products = _gathered(comm, rows, bs, _owned(a, dim, extent, comm), chunks, matmul)
    together = a if comm.size == 1 else shaped(whole, a, dim, extent)
    return together, [shaped(product, a, dim, extent) for product in products]


def _gathered(
    comm: Communicator,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    owned: plan.Ranges,
    chunks: int,
    matmul: Matmul,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    rows, mine, me = owned[-1].stop, owned[comm.rank], comm.rank
    whole = a if comm.size == 1 else a.new_empty(rows, a.shape[1])
    products = [a.new_empty(rows, b.shape[1]) for b in bs]
    panels = _panels(a, bs, owned, chunks)
    orders = plan.orders(panels, owned)
    with _Beside(comm, a) as beside:
        if comm.size > 1 and len(panels) > 1:
            with beside.collectives():
                whole[_part(mine)] = a
        for step, panel in enumerate(orders[me]):
            inside = plan.overlap(panel, mine) == panel
            with beside.collectives():
                if len(panels) == 1:
                    _gather(comm, a, whole, owned)
                else:
                    _exchange(
                        comm,
                        [(a[_part_of(plan.overlap(orders[r][step], mine), mine)], r) for r in _others(comm)],
                        [(whole[_part(plan.overlap(panel, owned[q]))], q) for q in _others(comm)],
                    )
            if not inside:
                beside.join()
            source = a[_part_of(panel, mine)] if inside else whole[_part(panel)]
            for operand, (b, product) in enumerate(zip(bs, products, strict=True)):
                chunk = Chunk(step, operand, _part(panel), slice(0, b.shape[1]))
                matmul(source, b, product[_part(panel)], chunk)
    return whole, products


def _part_of(rows: range, share: range) -> slice:
    """Returns the rows within a share."""
    return slice(rows.start - share.start, rows.stop - share.start)


Messages = list[tuple[torch.Tensor, int]]


def _others(comm: Communicator) -> list[int]:
    """Returns the other ranks in the order of the ring."""
    return [(comm.rank + i) % comm.size for i in range(1, comm.size)]


def _exchange(comm: Communicator, sends: Messages, receives: Messages) -> None:
    """Sends and receives all at once. Empty parts are no messages, on either side."""
    sends, receives = ([one for one in messages if one[0].numel()] for messages in (sends, receives))
    if sends or receives:
        comm.batch_send_recv(sends, receives)


def _gather(comm: Communicator, a: torch.Tensor, whole: torch.Tensor, owned: plan.Ranges) -> None:
    if comm.size == 1:
        return
    if len(owned[-1]) == len(owned[0]):
        comm.all_gather(a, out=whole.view(comm.size, *a.shape))
        return
    whole[_part(owned[comm.rank])] = a
    _exchange(comm, [(a, r) for r in _others(comm)], [(whole[_part(owned[q])], q) for q in _others(comm)])


def matmul_reduce_scatter(
    comm: Communicator, a: torch.Tensor, b: torch.Tensor, dim: int, op: str, chunks: int, matmul: Matmul
) -> torch.Tensor:
    """Returns this rank's share, along axis `dim`, of the sum of all products."""
    owned = _owned(a, dim, a.shape[dim], comm)
    own = _scattered(comm, flat(a, dim).contiguous(), b, owned, op, chunks, matmul)
    return shaped(own, a, dim, share(a.shape[dim], comm))


def _scattered(
    comm: Communicator,
    a: torch.Tensor,
    b: torch.Tensor,
    owned: plan.Ranges,
    op: str,
    chunks: int,
    matmul: Matmul,
) -> torch.Tensor:
    me, mine = comm.rank, owned[comm.rank]
    product = a.new_empty(a.shape[0], b.shape[1])
    panels = _panels(a, [b], owned, chunks)
    if len(panels) <= 1:
        matmul(a, b, product, Chunk(0, 0, slice(0, a.shape[0]), slice(0, b.shape[1])))
        return _sum_of_shares(comm, product, owned, op)
    orders = plan.orders(panels, owned, own_last=True)
    landed = _landing(comm, product, owned)
    with _Beside(comm, a) as beside:
        for step, panel in enumerate(orders[me]):
            rows = _part(panel)
            matmul(a[rows], b, product[rows], Chunk(step, 0, rows, slice(0, b.shape[1])))
            with beside.collectives(after_matmuls=True):
                _exchange(
                    comm,
                    [(product[_part(plan.overlap(panel, owned[r]))], r) for r in _others(comm)],
                    [
                        (landed[q][_part_of(plan.overlap(orders[q][step], mine), mine)], q)
                        for q in _others(comm)
                    ],
                )
    return combine_arrays(landed, op)


def _landing(comm: Communicator, product: torch.Tensor, owned: plan.Ranges) -> list[torch.Tensor]:
    """Returns a place for each rank's part of this rank's rows: its own part is where it is."""
    mine = owned[comm.rank]
    others = iter(product.new_empty(comm.size - 1, len(mine), product.shape[1]))
    return [product[_part(mine)] if r == comm.rank else next(others) for r in range(comm.size)]


def reduce_scatter(comm: Communicator, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns this rank's share, along axis `dim`, of the sum of everyone's x."""
    extent = x.shape[dim]
    own = _sum_of_shares(comm, flat(x, dim).contiguous(), _owned(x, dim, extent, comm), "sum")
    return shaped(own, x, dim, share(extent, comm))


def _sum_of_shares(comm: Communicator, x: torch.Tensor, owned: plan.Ranges, op: str) -> torch.Tensor:
    """Returns this rank's rows of the sum of everyone's x. One rank alone gets x itself."""
    if comm.size == 1:
        return x
    if len(owned[-1]) == len(owned[0]):
        return comm.reduce_scatter(x.view(comm.size, len(owned[0]), x.shape[1]), op)
    landed = _landing(comm, x, owned)
    _exchange(comm, [(x[_part(owned[r])], r) for r in _others(comm)], [(landed[q], q) for q in _others(comm)])
    return combine_arrays(landed, op)


def matmul_all_reduce(
    comm: Communicator,
    a: torch.Tensor,
    b: torch.Tensor,
    split: str,
    chunks: int,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    matmul: Matmul,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the sum of all products and None; or with a norm the normalised rows, and residual_out.

    norm: residual, weight, eps.
    """
    rows, columns = range(a.shape[0]), range(b.shape[1])
    split, panels = _cut(a, b, split, chunks, comm.size)
    out = a.new_empty(len(rows), len(columns))
    residual_out = None if norm is None else torch.empty_like(out)
    tail = alone(comm) if norm is not None and split == "n" else None
    parts = []  # kept until the other stream is done with them
    with _Beside(comm, a) as beside:
        for index, panel in enumerate(panels):
            if split == "m":
                part = out[_part(panel)]
                matmul(a[_part(panel)], b, part, Chunk(index, 0, _part(panel), slice(0, len(columns))))
            else:
                part = out if len(panels) == 1 else out.new_empty(len(rows), len(panel))
                parts.append(part)
                matmul(a, b[:, _part(panel)], part, Chunk(index, 0, slice(0, len(rows)), _part(panel)))
            with beside.collectives(after_matmuls=True):
                if norm is not None and split == "m":
                    assert residual_out is not None
                    _normalise(comm, part, residual_out[_part(panel)], norm, _part(panel))
                    continue
                if comm.size > 1:
                    comm.all_reduce(part, out=part)
                if part is not out and split == "n":
                    out[:, _part(panel)] = part
    if tail is not None:
        assert norm is not None and residual_out is not None
        _normalise(tail, out, residual_out, norm, slice(None))
    return out, residual_out


def _normalise(
    comm: Communicator,
    x: torch.Tensor,
    residual_out: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float],
    rows: slice,
) -> None:
    residual, weight, eps = norm
    options = NormOptions(out=x, residual_out=residual_out)
    comm.all_reduce_rms_norm(x, residual[rows], weight, eps, options=options)


def _cut(a: torch.Tensor, b: torch.Tensor, split: str, chunks: int, ranks: int) -> tuple[str, plan.Ranges]:
    """Returns m and panels of rows, or n and panels of columns. split: empty: as planned."""
    rows, columns = a.shape[0], b.shape[1]
    if not chunks and a.is_cuda and ranks > 1:
        return plan.of_all(rows, columns, a.shape[1] * a.itemsize, _sms(a), split)
    if split == "n":
        return split, plan.evenly(range(columns), chunks or 1, plan.TILE_COLUMNS)
    return "m", plan.evenly(range(rows), chunks or 1)


def alone(comm: Communicator) -> Communicator:
    """Returns a communicator of this rank alone, for the tail of a norm without the all_reduce."""
    if comm.size == 1:
        return comm
    made = _alone.get(comm)
    if made is None:
        made = _alone[comm] = communicator.init(rank=0, size=1, device=comm.device, check=False)
    return made
