"""A transformer block whose matmuls are cut among the ranks: collectives apart, and within one call.

unisono run -n 2 examples/12_fused_matmul.py
"""

import torch
from torch.nn import functional

import unisono
import unisono.torch as ut

TOKENS, HIDDEN, HEADS, INNER = 24, 64, 12, 96
WIDTH = HIDDEN // 4  # of a head
Tensor = torch.Tensor


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns this rank's heads side by side."""
    q, k, v = (x.view(TOKENS, -1, WIDTH).transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(TOKENS, -1)


class Block:
    """This rank's heads, and its columns of the feed-forward layer."""

    def __init__(self, comm: unisono.Communicator) -> None:
        self.comm = comm
        own = lambda w, dim: w.chunk(comm.size, dim)[comm.rank].contiguous()  # noqa: E731
        self.qkv = [own(randn(HIDDEN, HEADS * WIDTH, seed=i), 1) for i in range(3)]
        self.o = own(randn(HEADS * WIDTH, HIDDEN, seed=3), 0)
        self.up, self.down = own(randn(HIDDEN, INNER, seed=4), 1), own(randn(INNER, HIDDEN, seed=5), 0)
        self.weight = randn(HIDDEN, seed=6)

    def sequence_parallel(self, x: Tensor, fused: bool) -> Tensor:
        """Takes and gives this rank's tokens."""
        comm, width = self.comm, HIDDEN
        if fused:
            _, qkv = ut.fused_all_gather_matmul(comm, x, self.qkv, return_A=False)
            x = x + ut.fused_matmul_reduce_scatter(comm, attention(*qkv), self.o)
            _, (h,) = ut.fused_all_gather_matmul(comm, x, [self.up], return_A=False)
            return x + ut.fused_matmul_reduce_scatter(comm, torch.relu(h), self.down)
        whole = comm.all_gather(x).view(TOKENS, width)
        part = attention(*(whole @ w for w in self.qkv)) @ self.o
        x = x + comm.reduce_scatter(part.view(comm.size, -1, width))
        part = torch.relu(comm.all_gather(x).view(TOKENS, width) @ self.up) @ self.down
        return x + comm.reduce_scatter(part.view(comm.size, -1, width))

    def tensor_parallel(self, x: Tensor, residual: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
        """Takes and gives all tokens, normalised, and the residual."""
        rows = attention(*(x @ w for w in self.qkv))
        for w in (self.o, self.down):
            if fused:
                tail = {"residual": residual, "weight": self.weight}
                x, residual = ut.matmul_all_reduce(self.comm, rows, w, **tail)
            else:
                x, residual = self.comm.all_reduce_rms_norm(rows @ w, residual, self.weight)
            rows = torch.relu(x @ self.up)
        return x, residual


with unisono.init() as comm:
    block, tokens = Block(comm), randn(TOKENS, HIDDEN, seed=7)
    own = tokens.chunk(comm.size)[comm.rank]
    assert torch.equal(block.sequence_parallel(own, True), block.sequence_parallel(own, False))
    fused, apart = (block.tensor_parallel(tokens, tokens, how) for how in (True, False))
    assert torch.equal(fused[0], apart[0]) and torch.equal(fused[1], apart[1])

    # the fused calls have gradients, which are collective too, and torch.compile traces through them
    own = own.clone().requires_grad_()
    block.sequence_parallel(own, True).square().sum().backward()
    if comm.rank == 0:
        print(
            f"{comm.size} ranks: the same bits, apart and fused; a gradient of shape {tuple(own.grad.shape)}"
        )
