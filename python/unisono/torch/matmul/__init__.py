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
- chunks: about how many parts the matmul is cut into; 1: the naive form, the collective as a whole and the
  matmul as a whole. None: as many as cost hardly more than the whole. The same on every rank; without chunks,
  the shapes are the same on every rank.
- matmul: `matmul(a, b, out, chunk)` enqueues out = a @ b on the current stream; chunk is a `Chunk`. None:
  torch.mm. With a function there is no gradient, and torch.compile does not trace the call.

Errors of all: UsageError, if tensors or numbers do not fit; nothing has been sent. Errors of the
communicator's calls; on a GPU the next call or `comm.synchronize` raises what goes wrong on the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._core import Communicator
from ...errors import UsageError
from . import ops, overlap, run
from .chunk import Chunk, Matmul, torch_mm

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # types of tensors that need no custom op

__all__ = ["Chunk", "fused_all_gather_matmul", "fused_matmul_reduce_scatter", "matmul_all_reduce", "reserve"]


def reserve(comm: Communicator, nbytes: int) -> None:
    """Makes the memory of each GPU into which others' parts travel. Collective; waits for the GPU.

    A call makes what it lacks. Reserve it before a graph captures one, or where one thread makes the calls of
    several ranks. A fused_all_gather_matmul needs the bytes of A, a fused_matmul_reduce_scatter those of the
    product, a matmul_all_reduce twice those and 1 KiB a chunk. On CPUs, and on GPUs without NVLink, nothing
    is needed.

    Args:
        comm: a `unisono.Communicator`.
        nbytes: the most that a call needs; the same on every rank.

    Raises:
        ResourceError, on every rank: memory cannot be had.
    """
    if overlap.joined(comm):
        overlap.reserve(comm, nbytes)


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
    number = _chunks(chunks)
    if _by_op(matmul, A_shard, *Bs):
        A, products = ops.all_gather_matmul(A_shard, list(Bs), id(comm), dim, gathered, number)
    else:
        extent = A_shard.shape[dim] * comm.size if gathered is None else gathered
        multiply = _without_gradients(matmul)
        A, products = run.all_gather_matmul(comm, A_shard, Bs, dim, extent, number, multiply, keep=return_A)
    return A if return_A else None, products


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
    number = _chunks(chunks)
    if _by_op(matmul, A, B):
        return ops.matmul_reduce_scatter(A, B, id(comm), dim, op, number)
    return run.matmul_reduce_scatter(comm, A, B, dim, op, number, _without_gradients(matmul))


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
            them. None: m.
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
    flat = run.flat(A, 0)
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
    if not _by_op(matmul, A, B, *(norm[:2] if norm is not None else ())):
        own = None if norm is None else (norm[0].contiguous(), norm[1].contiguous(), norm[2])
        multiply = _without_gradients(matmul)
        out, residual_out = run.matmul_all_reduce(comm, flat.contiguous(), B, by, number, own, multiply)
    elif norm is not None:
        out, residual_out = ops.matmul_all_reduce_rms_norm(flat, B, *norm, id(comm), by, number)
    else:
        out, residual_out = ops.matmul_all_reduce(flat, B, id(comm), by, number), None
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


def _chunks(chunks: int | None) -> int:
    if chunks is None:
        return 0
    if chunks < 1:
        raise UsageError(f"chunks={chunks} cuts into nothing: give 1 at least, or leave it out.")
    return chunks


def _by_op(matmul: Matmul | None, *tensors: torch.Tensor) -> bool:
    """Returns whether the call goes by its custom op: it is traced, or needs a gradient. An op takes the host
    longer."""
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    if matmul is None:
        return needs_grad or torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, tensors))
    if needs_grad:
        raise UsageError(
            "a matmul of the caller's has no gradient: leave matmul= out, or call within torch.no_grad()."
        )
    return False


def _without_gradients(matmul: Matmul | None) -> Matmul:
    """Returns the matmul of a call none of whose tensors needs a gradient. The caller's may know others."""
    return torch_mm if matmul is None else torch.no_grad()(matmul)
