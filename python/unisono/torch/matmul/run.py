"""Runs matmuls with their collectives, chunk by chunk.

On GPUs that NVLink joins, several chunks go by copy engines (overlap.py). Elsewhere each has a collective, on
a GPU on a stream of its own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ... import communicator
from ..._core import Communicator, NormOptions, combine_arrays
from ...errors import UsageError
from . import overlap, plan
from .chunk import Chunk, Matmul, part_of, slice_of

_streams: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()
_alone: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()
_Norm = tuple[torch.Tensor, torch.Tensor, float]  # residual, weight, eps


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


def _sms(tensor: torch.Tensor) -> int:
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def _panels(
    comm: Communicator,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    owned: plan.Ranges,
    chunks: int,
    gathers: bool,
) -> plan.Ranges:
    """Returns the panels of rows that are shared out. chunks: 0: as planned. gathers: rows of a travel, else
    of the product."""
    if chunks or not overlap.possible(comm, a):  # otherwise nothing would travel beside the matmul
        return plan.by_shares(owned, chunks or 1)
    columns = tuple(b.shape[1] for b in bs)
    return plan.of_shares(owned, columns, a.shape[1], a.itemsize, _sms(a), gathers)


def flat(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns x as a matrix, with rows in the order of axis `dim` first."""
    if x.dim() == 2:
        return x
    return x.movedim(dim, 0).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def shaped(rows: torch.Tensor, like: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """Returns rows in the axes of `like`, whose axis `dim` has another extent here."""
    if like.dim() == 2:
        return rows
    rest = like.movedim(dim, 0).shape[1:-1]
    return rows.view(extent, *rest, rows.shape[-1]).movedim(0, dim)


def share(extent: int, comm: Communicator) -> int:
    """Returns the length of this rank's share, as plan.shares cuts it, also of an extent that is a symbol."""
    block = -(-extent // comm.size)
    return min(block, max(extent - block * comm.rank, 0))


def _owned(x: torch.Tensor, dim: int, extent: int, comm: Communicator) -> plan.Ranges:
    """Returns each rank's rows of a matrix as `flat` makes it of x with that extent of axis `dim`."""
    unit = math.prod(x.shape[:dim]) * math.prod(x.shape[dim + 1 : -1])
    return plan.shares(extent * unit, comm.size, unit)


def _only_multiplies(comm: Communicator, chunks: int) -> bool:
    """Returns whether a call is one product and nothing else: that of a rank alone."""
    return comm.size == 1 and chunks < 2


def _product(a: torch.Tensor, b: torch.Tensor, matmul: Matmul, operand: int = 0) -> torch.Tensor:
    """Returns a @ b, in one chunk. operand: the number of b."""
    out = a.new_empty(a.shape[0], b.shape[1])
    matmul(a, b, out, Chunk(0, operand, slice(0, a.shape[0]), slice(0, b.shape[1])))
    return out


def all_gather_matmul(
    comm: Communicator,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    dim: int,
    extent: int,
    chunks: int,
    matmul: Matmul,
    keep: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Returns everyone's a, of that extent along axis `dim`, and the products. One rank gets a itself. keep:
    whether a is wanted: otherwise there may be None in its place."""
    if a.shape[dim] != share(extent, comm):
        raise UsageError(
            f"A_shard has {a.shape[dim]} along gather_dim, but of {extent} rank {comm.rank} of {comm.size} "
            "has another share: give the share that torch.chunk gives."
        )
    rows = flat(a, dim).contiguous()
    whole: torch.Tensor | None = rows
    if _only_multiplies(comm, chunks):
        products = [_product(rows, b, matmul, operand) for operand, b in enumerate(bs)]
    else:
        whole, products = _gathered(comm, rows, bs, _owned(a, dim, extent, comm), chunks, matmul, keep)
    together = a if comm.size == 1 or whole is None else shaped(whole, a, dim, extent)
    return together if keep else None, [shaped(product, a, dim, extent) for product in products]


def _gathered(
    comm: Communicator,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    owned: plan.Ranges,
    chunks: int,
    matmul: Matmul,
    keep: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    rows, mine, me = owned[-1].stop, owned[comm.rank], comm.rank
    panels = _panels(comm, a, bs, owned, chunks, gathers=True)
    if len(panels) > 1 and overlap.possible(comm, a):
        return overlap.gathered(comm, a, bs, owned, panels, matmul, keep)
    whole = a if comm.size == 1 else a.new_empty(rows, a.shape[1])
    if len(panels) == 1:
        _gather(comm, a, whole, owned)
        return whole, [_product(whole, b, matmul, operand) for operand, b in enumerate(bs)]
    products = [a.new_empty(rows, b.shape[1]) for b in bs]
    orders = plan.orders(panels, owned)
    with _Beside(comm, a) as beside:
        if comm.size > 1:
            with beside.collectives():
                whole[slice_of(mine)] = a
        for step, panel in enumerate(orders[me]):
            inside = plan.overlap(panel, mine) == panel
            with beside.collectives():
                _exchange(
                    comm,
                    [
                        (a[part_of(plan.overlap(orders[r][step], mine), mine)], r)
                        for r in overlap.others(comm)
                    ],
                    [(whole[slice_of(plan.overlap(panel, owned[q]))], q) for q in overlap.others(comm)],
                )
            if not inside:
                beside.join()
            source = a[part_of(panel, mine)] if inside else whole[slice_of(panel)]
            for operand, (b, product) in enumerate(zip(bs, products, strict=True)):
                chunk = Chunk(step, operand, slice_of(panel), slice(0, b.shape[1]))
                matmul(source, b, product[slice_of(panel)], chunk)
    return whole, products


Messages = list[tuple[torch.Tensor, int]]


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
    whole[slice_of(owned[comm.rank])] = a
    _exchange(
        comm,
        [(a, r) for r in overlap.others(comm)],
        [(whole[slice_of(owned[q])], q) for q in overlap.others(comm)],
    )


def matmul_reduce_scatter(
    comm: Communicator, a: torch.Tensor, b: torch.Tensor, dim: int, op: str, chunks: int, matmul: Matmul
) -> torch.Tensor:
    """Returns this rank's share, along axis `dim`, of the sum of all products."""
    rows = flat(a, dim).contiguous()
    if _only_multiplies(comm, chunks):
        own = _product(rows, b, matmul)
    else:
        own = _scattered(comm, rows, b, _owned(a, dim, a.shape[dim], comm), op, chunks, matmul)
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
    panels = _panels(comm, a, [b], owned, chunks, gathers=False)
    if len(panels) > 1 and overlap.possible(comm, a):
        return overlap.scattered(comm, a, b, owned, panels, matmul, op)
    if len(panels) <= 1:
        return _sum_of_shares(comm, _product(a, b, matmul), owned, op)
    product = a.new_empty(a.shape[0], b.shape[1])
    orders = plan.orders(panels, owned, own_last=True)
    landed = _landing(comm, product, owned)
    with _Beside(comm, a) as beside:
        for step, panel in enumerate(orders[me]):
            rows = slice_of(panel)
            matmul(a[rows], b, product[rows], Chunk(step, 0, rows, slice(0, b.shape[1])))
            with beside.collectives(after_matmuls=True):
                _exchange(
                    comm,
                    [(product[slice_of(plan.overlap(panel, owned[r]))], r) for r in overlap.others(comm)],
                    [
                        (landed[q][part_of(plan.overlap(orders[q][step], mine), mine)], q)
                        for q in overlap.others(comm)
                    ],
                )
    return combine_arrays(landed, op)


def _landing(comm: Communicator, product: torch.Tensor, owned: plan.Ranges) -> list[torch.Tensor]:
    """Returns a place for each rank's part of this rank's rows: its own part is where it is."""
    mine = owned[comm.rank]
    others = iter(product.new_empty(comm.size - 1, len(mine), product.shape[1]))
    return [product[slice_of(mine)] if r == comm.rank else next(others) for r in range(comm.size)]


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
    sends = [(x[slice_of(owned[r])], r) for r in overlap.others(comm)]
    _exchange(comm, sends, [(landed[q], q) for q in overlap.others(comm)])
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
    """Returns the sum of all products and None; or with a norm the normalised rows, and residual_out."""
    if norm is None and _only_multiplies(comm, chunks):
        return _product(a, b, matmul), None
    owned = plan.shares(a.shape[0], comm.size)
    split, panels = _cut(comm, a, b, owned, split, chunks)
    if split == "m" and len(panels) > 1 and overlap.possible(comm, a):
        out = a.new_empty(a.shape[0], b.shape[1])
        _gather(comm, overlap.scattered(comm, a, b, owned, panels, matmul, "sum"), out, owned)
        return (out, None) if norm is None else _tail(comm, out, norm)
    rows, columns = slice(0, a.shape[0]), slice(0, b.shape[1])
    out = a.new_empty(a.shape[0], b.shape[1])
    residual_out = None if norm is None else torch.empty_like(out)
    parts = []  # kept until the other stream is done with them
    with _Beside(comm, a) as beside:
        for index, panel in enumerate(panels):
            if len(panels) == 1:
                part = out
                matmul(a, b, part, Chunk(0, 0, rows, columns))
            elif split == "m":
                part = out[slice_of(panel)]
                matmul(a[slice_of(panel)], b, part, Chunk(index, 0, slice_of(panel), columns))
            else:
                part = out.new_empty(a.shape[0], len(panel))
                parts.append(part)
                matmul(a, b[:, slice_of(panel)], part, Chunk(index, 0, rows, slice_of(panel)))
            with beside.collectives(after_matmuls=True):
                if norm is not None and split == "m":
                    assert residual_out is not None
                    _normalise(comm, part, residual_out[slice_of(panel)], norm, slice_of(panel))
                    continue
                if comm.size > 1:
                    comm.all_reduce(part, out=part)
                if split == "n" and part is not out:
                    out[:, slice_of(panel)] = part
    return _tail(comm, out, norm) if norm is not None and split == "n" else (out, residual_out)


def _normalise(
    comm: Communicator, x: torch.Tensor, residual_out: torch.Tensor, norm: _Norm, rows: slice
) -> None:
    residual, weight, eps = norm
    options = NormOptions(out=x, residual_out=residual_out)
    comm.all_reduce_rms_norm(x, residual[rows], weight, eps, options=options)


def _tail(comm: Communicator, out: torch.Tensor, norm: _Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises sums in place. Returns them and residual_out."""
    residual_out = torch.empty_like(out)
    _normalise(alone(comm), out, residual_out, norm, slice(None))
    return out, residual_out


def _cut(
    comm: Communicator, a: torch.Tensor, b: torch.Tensor, owned: plan.Ranges, split: str, chunks: int
) -> tuple[str, plan.Ranges]:
    """Returns m and panels of rows, or n and panels of columns. split: empty: m."""
    if split == "n":
        return split, plan.evenly(range(b.shape[1]), chunks or 1, plan.TILE_COLUMNS)
    return "m", _panels(comm, a, [b], owned, chunks, gathers=False)


def alone(comm: Communicator) -> Communicator:
    """Returns a communicator of this rank alone, for the tail of a norm without the all_reduce."""
    if comm.size == 1:
        return comm
    made = _alone.get(comm)
    if made is None:
        made = _alone[comm] = communicator.init(rank=0, size=1, device=comm.device, check=False)
    return made
