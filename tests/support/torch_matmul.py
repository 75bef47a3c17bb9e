"""The fused matmuls from torch.mm of each chunk and plain numpy sums. Shares no code with the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import unisono
from reference import DTYPES, Array, combine
from unisono.torch.matmul import Chunk

Tensor = torch.Tensor


def share_of(extent: int, rank: int, size: int) -> slice:
    """Returns a rank's share, as torch.chunk has it."""
    block = -(-extent // size)
    return slice(min(rank * block, extent), min((rank + 1) * block, extent))


def random(rank: int, *shape: int, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + sum(shape))
    return (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    )


def exact(rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers whose products are exact: no bit depends on how a CPU's library adds them. Those of
    different ranks are so far apart that a sum over ranks is rounded."""
    generator = torch.Generator().manual_seed(100 * rank + sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype) * 2.0 ** (11 * rank % 40)


class Recorded:
    """A matmul of the caller's that is torch.mm, and keeps what it was told."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, chunk: Chunk) -> None:
        torch.mm(a, b, out=out)
        self.chunks.append(chunk)

    def product(self, a: Tensor, b: Tensor, operand: int = 0) -> Tensor:
        """Returns a @ b by torch.mm of each chunk, of which each element is in one."""
        out = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=a.dtype, device=a.device)
        for chunk in self.chunks:
            if chunk.operand == operand:
                part = torch.empty_like(out[chunk.rows, chunk.columns])
                assert part.numel() == 0 or out[chunk.rows, chunk.columns].isnan().all()
                torch.mm(a[chunk.rows], b[:, chunk.columns], out=part)
                out[chunk.rows, chunk.columns] = part
        return out

    def rows(self) -> list[tuple[int, int]]:
        return [(chunk.rows.start, chunk.rows.stop) for chunk in self.chunks if chunk.operand == 0]


def numbers(x: Tensor) -> Array:
    """Returns a tensor's bits as a numpy array of its dtype, bf16 by ml_dtypes."""
    kind = DTYPES["bf16"] if x.dtype == torch.bfloat16 else np.dtype(str(x.dtype).removeprefix("torch."))
    raw = x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return raw.view(kind).reshape(tuple(x.shape))


def summed(parts: Sequence[Tensor], op: str = "sum") -> Array:
    """Returns the sum in rank order."""
    return combine([numbers(part) for part in parts], op)


class Together(torch.autograd.Function):  # type: ignore[misc] # mypy does not see torch
    """A call of all ranks as one function of all ranks' inputs, rank by rank, for gradcheck.

    Each rank is a thread. Its part of backward runs there too, since backward is collective.
    """

    @staticmethod
    def forward(ctx: Any, ranks: Any, body: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        n = len(ranks.communicators)
        each = len(inputs) // n
        own = [[x.detach().requires_grad_() for x in inputs[r * each : (r + 1) * each]] for r in range(n)]

        def forward(comm: unisono.Communicator) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return tuple(body(comm, *own[comm.rank]))

        outputs = ranks.run(forward)
        ctx.ranks, ctx.own, ctx.outputs = ranks, own, outputs
        return tuple(one.detach() for of_rank in outputs for one in of_rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        each = len(ctx.outputs[0])

        def backward(comm: unisono.Communicator) -> Sequence[Tensor]:
            r = comm.rank
            return torch.autograd.grad(
                ctx.outputs[r], ctx.own[r], grads[r * each : (r + 1) * each], retain_graph=True
            )

        return None, None, *(one for of_rank in ctx.ranks.run(backward) for one in of_rank)
