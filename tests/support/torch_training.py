"""Ways of training that torch has. Each takes a process group, and returns what must not depend on it."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torch_ranks import data, model, train, world


def compressed(group: Any) -> list[float]:
    """DDP whose gradients travel as f16."""
    ddp = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01)
    ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return train(3, ddp, dist.get_rank())


def power_sgd(group: Any) -> list[float]:
    """DDP by PowerSGD: factors of the gradients travel."""
    ddp = DistributedDataParallel(model(), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(4, ddp, dist.get_rank())


class Branches(nn.Module):
    """A step uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(20, 5) for _ in range(2))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.layers[(self.steps + dist.get_rank()) % 2](x)


def unused(group: Any) -> list[float]:
    """DDP that finds out which parameters a step has left unused."""
    ddp = DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True)
    return train(3, ddp, dist.get_rank())


def joined(group: Any) -> list[float]:
    """DDP of ranks with more batches and fewer, and an optimizer whose state is sharded."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(Branches().layers[0], process_group=group)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, group, lr=0.05)
    rank, losses = dist.get_rank(), []
    with Join([ddp, optimizer]):
        for step in range(2 + rank):
            loss = ddp(data((4, 20), torch.float32, rank, step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def tensor_parallel(group: Any) -> list[float]:
    """A layer cut by columns, and one by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 5))
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(3, net, 0)


def pipeline(group: Any) -> list[float]:
    """Stages on different ranks, which send each other activations and gradients."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage = PipelineStage(nn.Linear(6, 6), rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss)
    x, y = data((8, 6), torch.float32, 1), data((8, 6), torch.float32, 2)
    losses: list[torch.Tensor] = []
    first, last = rank == 0, rank == size - 1
    schedule.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
    return [loss.item() for loss in losses] + [stage.submod.weight.grad.norm().item()]


def checkpoint(group: Any) -> list[float]:
    """Sharded parameters that are saved, and loaded into others."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    nets = [model()[:3] for _ in range(2)]
    mesh = DeviceMesh.from_group(group, "cpu")
    for net in nets:
        fully_shard(net, mesh=mesh)
    losses = train_sharded(nets[0])
    places: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(places, group=group)
    state = nets[1].state_dict()
    dcp.save(nets[0].state_dict(), checkpoint_id=Path(places[0]), process_group=group)
    dcp.load(state, checkpoint_id=Path(places[0]), process_group=group)
    for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    return losses


def train_sharded(net: nn.Module) -> list[float]:
    optimizer = torch.optim.Adam(net.parameters())
    losses = []
    for step in range(3):
        loss = net(data((4, 20), torch.float32, dist.get_rank(), step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(group: Any) -> list[float]:
    """A step with collectives in it, compiled as one graph."""
    import torch.distributed._functional_collectives as functional

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(torch.tanh(x @ weight), "sum", group)
        parts = functional.reduce_scatter_tensor(y, "avg", 0, group)
        return functional.all_gather_tensor(parts, 0, group).square().mean()

    weight = data((20, 6), torch.float32, 9)
    fast = torch.compile(step, fullgraph=True)
    return [fast(data((8, 20), torch.float32, dist.get_rank(), i), weight).item() for i in range(3)]


QUICK = (compressed, power_sgd, unused, joined, tensor_parallel, pipeline, checkpoint)


def compare(programs: tuple[Callable[[Any], list[float]], ...]) -> None:
    """Fails unless each gives by Unisono, the default group's backend, what it gives by gloo."""
    peer = dist.new_group(backend="gloo")
    for program in programs:
        mine, theirs = program(dist.group.WORLD), program(peer)
        torch.testing.assert_close(
            mine, theirs, rtol=1e-3, atol=1e-4, msg=lambda text, name=program.__name__: f"{name}: {text}"
        )


def quick(store: str) -> None:
    with world(store):
        compare(QUICK)
        gc.collect()  # gloo's threads end with its group: at Python's end they would abort the process
