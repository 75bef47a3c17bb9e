"""Matmuls fused with collectives: while one chunk is multiplied, another travels.

>>> _, (q, k) = unisono.torch.fused_all_gather_matmul(comm, x_shard, [wq, wk])
>>> y_shard = unisono.torch.fused_matmul_reduce_scatter(comm, h, w_out)
>>> y = unisono.torch.matmul_all_reduce(comm, h, w_out)

The matmul is torch.mm, or the caller's own. Its chunks depend on the shape and the number of ranks alone, so
that a call gives the same bits each time; each element is summed over the ranks once, in rank order. On CPUs,
where no core is idle meanwhile, a call is planned as one chunk.

They are custom ops (torch.ops.unisono): torch.compile traces through them, and they have gradients, which are
collective too: all ranks call backward, in the same order, and the same tensors need gradients on all of
them. Gradients are those of the sum of all ranks' losses, as with torch.distributed.nn: a loss that every
rank computes alike counts once for each rank. A replicated residual or weight has the gradient of this rank's
own outputs.

Arguments of all:

- comm: a `unisono.Communicator`.
- chunks: how many parts the matmul is cut into, at most; 1: the naive form, the collective as a whole and
  the matmul as a whole. None: as many as cost hardly more than the whole. The same on every rank; without
  chunks, the shapes are the same on every rank.
- matmul: `matmul(a, b, out, chunk)` enqueues out = a @ b on the current stream; chunk is a `Chunk`. None:
  torch.mm. With a function there is no gradient, and torch.compile does not trace the call.

Errors of all: UsageError, if tensors or numbers do not fit; nothing has been sent. Errors of the
communicator's calls; on a GPU the next call or `comm.synchronize` raises what goes wrong on the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..._core import Communicator
from ...errors import UsageError
from . import ops, plan, run
from .run import Chunk, Matmul

__all__ = ["Chunk", "fused_all_gather_matmul", "fused_matmul_reduce_scatter", "matmul_all_reduce"]


def fused_all_gather_matmul(
    comm: Communicator,
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int = 0,
    *,
    return_A: bool = True,
    chunks: int | None = None,
    gathered: int | None = None,
    matmul: Matmul | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gives everyone everyone's A_shard, and its products with this rank's Bs. Collective.

    A rank multiplies its own shard first, and the others' in the order of the ring, as they come.

    Args:
        comm, chunks, matmul: as above.
        A_shard: [..., K], at least two axes.
        Bs: [K, N] each; N may differ.
        gather_dim: the axis along which shards follow each other; not the last.
        return_A: whether the gathered A is returned.
        gathered: the extent of that axis in A. None: A_shard's times the number of ranks. Otherwise shards
            are those of torch.chunk: ceil(gathered / ranks) each, the last ones fewer or none.

    Returns:
        A or None, and A @ B for each B.

    Raises:
        as above.
    """
    _check_matrices(A_shard, Bs)
    dim = _axis(A_shard, gather_dim, "gather_dim")
    rank, size = ops.place_of(comm)
    shard, lead = A_shard.movedim(dim, 0), A_shard.shape[dim]
    extent = lead * size if gathered is None else gathered
    if lead != _share(extent, rank, size):
        raise UsageError(
            f"A_shard has {lead} along gather_dim, but of {extent} rank {rank} of {size} has another share: "
            "give the share that torch.chunk gives."
        )
    rest = shard.shape[1:-1]
    unit = math.prod(rest)
    flat = shard.reshape(lead * unit, shard.shape[-1])
    number = _chunks(chunks)
    if matmul is None:
        whole, products = ops.all_gather_matmul(
            flat, list(Bs), ops.number_of(comm), extent * unit, unit, number
        )
    else:
        _check_no_gradient(A_shard, *Bs)
        with torch.no_grad():
            owned = plan.shares(extent * unit, size, unit)
            whole, products = run.all_gather_matmul(comm, flat.contiguous(), Bs, owned, number, matmul)

    def restored(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(extent, *rest, rows.shape[-1]).movedim(0, dim)

    A = (A_shard if size == 1 else restored(whole)) if return_A else None
    return A, [restored(one) for one in products]


def fused_matmul_reduce_scatter(
    comm: Communicator,
    A: torch.Tensor,
    B: torch.Tensor,
    op: str = "sum",
    scatter_dim: int = 0,
    *,
    chunks: int | None = None,
    matmul: Matmul | None = None,
) -> torch.Tensor:
    """Gives each rank its share of the sum of everyone's A @ B. Collective.

    A rank multiplies others' rows first and sends them as they are done. Its own come last.

    Args:
        comm, chunks, matmul: as above.
        A: [..., K], at least two axes.
        B: [K, N].
        op: sum or avg.
        scatter_dim: the axis that is shared out; not the last. Shares are those of torch.chunk: ceil(extent /
            ranks) each, the last ones fewer or none.

    Returns:
        [..., N], of this rank's share.

    Raises:
        as above.
    """
    _check_matrices(A, [B])
    dim = _axis(A, scatter_dim, "scatter_dim")
    if op not in ("sum", "avg"):
        raise UsageError(f"op {op!r} is not for a sum of products: use sum or avg.")
    rank, size = ops.place_of(comm)
    moved = A.movedim(dim, 0)
    rest = moved.shape[1:-1]
    unit = math.prod(rest)
    flat = moved.reshape(moved.shape[0] * unit, moved.shape[-1])
    number = _chunks(chunks)
    if matmul is None:
        own = ops.matmul_reduce_scatter(flat, B, ops.number_of(comm), unit, op, number)
    else:
        _check_no_gradient(A, B)
        with torch.no_grad():
            owned = plan.shares(flat.shape[0], size, unit)
            own = run.matmul_reduce_scatter(comm, flat.contiguous(), B, owned, op, number, matmul)
    return own.view(_share(A.shape[dim], rank, size), *rest, B.shape[1]).movedim(0, dim)


def matmul_all_reduce(
    comm: Communicator,
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    split: str | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    chunks: int | None = None,
    matmul: Matmul | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gives everyone the sum of everyone's A @ B; with residual and weight also what a transformer does next.

    Args:
        comm, chunks, matmul: as above.
        A: [..., K].
        B: [K, N].
        split: m: chunks are rows of the product. n: columns, if it has few rows; the norm then follows all of
            them. None: m, unless only columns can be cut.
        residual: [..., N], the same on every rank.
        weight: [N], the same on every rank.
        eps: as in `Communicator.all_reduce_rms_norm`.

    Returns:
        [..., N]. With residual and weight what `Communicator.all_reduce_rms_norm` returns for it.

    Raises:
        as above.
    """
    _check_matrices(A, [B], axes=1)
    if split not in ("m", "n", None):
        raise UsageError(f"split {split!r} is unknown: use m (rows), n (columns), or leave it out.")
    if (residual is None) != (weight is None):
        raise UsageError("residual and weight go together: give both, or neither.")
    flat = A.reshape(math.prod(A.shape[:-1]), A.shape[-1])
    shape = (*A.shape[:-1], B.shape[1])
    number, by = _chunks(chunks), split or ""
    norm = None
    if residual is not None and weight is not None:
        for name, one, expected in (("residual", residual, shape), ("weight", weight, shape[-1:])):
            if tuple(one.shape) != tuple(expected) or one.dtype != A.dtype or one.device != A.device:
                raise UsageError(
                    f"{name} has shape {tuple(one.shape)} and dtype {one.dtype} on {one.device}: this call "
                    f"takes {tuple(expected)} and {A.dtype} on {A.device}."
                )
        norm = (residual.reshape(flat.shape[0], shape[-1]), weight, float(eps))
    if matmul is not None:
        _check_no_gradient(A, B, *([residual, weight] if residual is not None else []))
        with torch.no_grad():
            own = None if norm is None else (norm[0].contiguous(), norm[1].contiguous(), norm[2])
            out, residual_out = run.matmul_all_reduce(comm, flat.contiguous(), B, by, number, own, matmul)
    elif norm is not None:
        out, residual_out = ops.matmul_all_reduce_rms_norm(flat, B, *norm, ops.number_of(comm), by, number)
    else:
        out, residual_out = ops.matmul_all_reduce(flat, B, ops.number_of(comm), by, number), None
    return out.view(shape) if residual_out is None else (out.view(shape), residual_out.view(shape))


def _check_matrices(A: torch.Tensor, Bs: Sequence[torch.Tensor], axes: int = 2) -> None:
    if A.dim() < axes:
        raise UsageError(f"A has {A.dim()} axes: give {axes} at least, of which the last is multiplied.")
    if not A.dtype.is_floating_point:
        raise UsageError(f"A has dtype {A.dtype}: give floating-point numbers.")
    for B in Bs:
        if B.dim() != 2 or B.shape[0] != A.shape[-1] or B.dtype != A.dtype or B.device != A.device:
            raise UsageError(
                f"B has shape {tuple(B.shape)} and dtype {B.dtype} on {B.device}: this call takes "
                f"({A.shape[-1]}, N) and {A.dtype} on {A.device}."
            )


def _axis(A: torch.Tensor, dim: int, name: str) -> int:
    """Returns the axis counted from the front."""
    if not -A.dim() <= dim < A.dim() or dim % A.dim() == A.dim() - 1:
        raise UsageError(
            f"{name}={dim} is no axis of A but the last, which is multiplied: give one of 0 to {A.dim() - 2}."
        )
    return dim % len(A.shape)


def _share(extent: int, rank: int, size: int) -> int:
    """Returns the length of a rank's share, as plan.shares cuts it, also of an extent that is a symbol."""
    block = -(-extent // size)
    return min(block, max(extent - block * rank, 0))


def _chunks(chunks: int | None) -> int:
    if chunks is None:
        return 0
    if chunks < 1:
        raise UsageError(f"chunks={chunks} cuts into nothing: give 1 at least, or leave it out.")
    return chunks


def _check_no_gradient(*tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        raise UsageError(
            "a matmul of the caller's has no gradient: leave matmul= out, or call within torch.no_grad()."
        )
