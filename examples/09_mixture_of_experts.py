"""A layer with a mixture of experts, in training: tokens go to the ranks of their experts, and back.

unisono run -n 2 examples/09_mixture_of_experts.py         # on GPUs, if each rank has one, else on CPUs
unisono run -n 2 examples/09_mixture_of_experts.py cpu
"""

import os
import sys

import torch
from torch import nn

import unisono
import unisono.torch
from unisono import launch

EXPERTS, TOP_K, HIDDEN, TOKENS, STEPS = 12, 2, 16, 64, 20

torch.set_num_threads(1)  # the ranks are as many threads
place = launch.from_env(os.environ)  # by the launcher's variables
gpu = sys.argv[1:] != ["cpu"] and torch.cuda.device_count() >= place.local_size
device = torch.device("cuda", place.local_rank) if gpu else torch.device("cpu")


class Layer(nn.Module):
    """A router, the same on every rank, and this rank's experts."""

    def __init__(self, comm: unisono.Communicator) -> None:
        super().__init__()
        self.moe = comm.moe(EXPERTS, TOP_K, HIDDEN, TOKENS, dtype="float32")
        torch.manual_seed(0)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        torch.manual_seed(1 + comm.rank)
        experts = [
            nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))
            for _ in range(self.moe.local_experts)
        ]
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP_K)
        received = unisono.torch.moe.dispatch(self.moe, x, chosen, weights)
        y = torch.zeros_like(received.x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(received.topk_idx == number)
            weighed = expert(received.x[rows]) * received.topk_weights[rows, places, None]
            y = y.index_add(0, rows, weighed)
        return unisono.torch.moe.combine(y, received)


with unisono.init(device=place.local_rank if gpu else None) as comm:
    layer = Layer(comm).to(device)
    x = torch.randn(TOKENS - comm.rank, HIDDEN, device=device)  # other tokens on each rank
    target = torch.sin(2 * x.flip(1))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        for parameter in layer.router.parameters():
            comm.all_reduce(parameter.grad, out=parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    if comm.rank == 0:
        print(f"{comm.size} ranks on {device.type}: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")
