#!/usr/bin/env python3
"""Measures a training step by Unisono and by torch's own backend, in the same processes and in turn.

  torchrun --standalone --nproc-per-node 2 tools/train-step.py --out FILE
  torchrun --standalone --nproc-per-node 2 tools/train-step.py --device cuda --form fsdp --batch 64

torch's own backend is gloo on CPUs and nccl on GPUs. The model is a ResNet-18 (11.7 million parameters, 1000
classes). A step is forward, backward and SGD. A round has a step of each kind, in random order, each after
one that is not timed:
  unisono, gloo or nccl  DDP, or FSDP2's fully_shard of each block, as a program has it
  silent                 DDP that sends nothing; not with fsdp
  alone                  the model itself, on each rank
The time of a step is that of the slowest rank. Time outside compute is a step less the round's step alone.
Waiting is a step less the round's silent one. All are medians of rounds, with exact intervals of 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unisono.bench import provenance
from unisono.records import stats

PEERS = {"cpu": "gloo", "cuda": "nccl"}


class Block(nn.Module):  # type: ignore[misc]
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        shortcut = [nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Identity() if stride == 1 else nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Returns the same network on every rank."""
    torch.manual_seed(0)
    widths = (64, 128, 256, 512)
    blocks = [
        Block(width if again else widths[max(0, i - 1)], width, 1 if again or i == 0 else 2)
        for i, width in enumerate(widths)
        for again in (False, True)
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class Kinds:
    """The models of each kind, by name."""

    def __init__(self, device: str, form: str) -> None:
        self.device, self.form, self.peer = device, form, PEERS[device]
        theirs = dist.new_group(backend=self.peer)
        assert dist.group.WORLD is not None and theirs is not None
        self.groups = {"unisono": dist.group.WORLD, self.peer: theirs}
        names = (*self.groups, *(["silent"] if form == "ddp" else []), "alone")
        self.models = {name: self.model(name) for name in names}

    def model(self, name: str) -> nn.Module:
        model = resnet18().to(self.device)
        if name == "alone":
            return model
        if self.form == "fsdp":
            mesh = DeviceMesh.from_group(self.groups[name], self.device)
            for layer in model:
                if isinstance(layer, Block | nn.Linear):
                    fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)
        silent = name == "silent"
        ddp = DistributedDataParallel(
            model, process_group=self.groups.get(name), broadcast_buffers=not silent
        )
        if silent:
            ddp.register_comm_hook(None, noop_hook)
        return ddp

    def parameters(self, name: str) -> list[torch.Tensor]:
        """Returns whole ones, detached."""
        of = [one.full_tensor() if self.form == "fsdp" else one for one in self.models[name].parameters()]
        return [one.detach() for one in of]

    def check(self) -> None:
        """Raises unless the ranks have the same parameters, and Unisono's are the peer's to rounding."""
        for mine, theirs in zip(self.parameters("unisono"), self.parameters(self.peer), strict=True):
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            if not all(torch.equal(one, mine) for one in everyone):
                raise SystemExit("the ranks' parameters differ.")
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


def step_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def measure(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of the slowest rank by kind and round."""
    order = random.Random(0)
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind in order.sample(list(steps), len(steps)):
            steps[kind]()
            dist.barrier()
            begin = time.perf_counter()
            steps[kind]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[kind].append(1e3 * (time.perf_counter() - begin))
    for found in times.values():
        slowest = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[:] = slowest.tolist()
    return times


def interval(values: list[float]) -> dict[str, float]:
    found = stats.median_interval(values)
    return {"median": round(found.median, 4), "low": round(found.low, 4), "high": round(found.high, 4)}


def less(times: dict[str, list[float]], kind: str, base: str) -> list[float]:
    return [a - b for a, b in zip(times[kind], times[base], strict=True)]


def summary(times: dict[str, list[float]], peer: str) -> dict[str, Any]:
    """Returns medians with intervals: of steps, of time beyond a base, of Unisono's share of the peer's."""
    found: dict[str, Any] = {"step_ms": {kind: interval(times[kind]) for kind in times}}
    for name, base in (("outside_compute", "alone"), ("waiting", "silent")):
        if base not in times:
            continue
        beyond = {kind: less(times, kind, base) for kind in ("unisono", peer)}
        found[f"{name}_ms"] = {kind: interval(values) for kind, values in beyond.items()}
        shares = [mine / theirs for mine, theirs in zip(beyond["unisono"], beyond[peer], strict=True)]
        found[f"{name}_share_of_{peer}"] = interval(shares)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2, help="images of a rank")
    parser.add_argument("--pixels", type=int, default=64, help="of an image's side")
    parser.add_argument("--device", choices=PEERS, default="cpu")
    parser.add_argument("--form", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.deterministic = True
    dist.init_process_group("unisono")
    kinds = Kinds(asked.device, asked.form)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(asked.batch, 3, asked.pixels, asked.pixels).to(asked.device)
    y = torch.randint(1000, (asked.batch,)).to(asked.device)
    steps = {name: step_of(model, x, y) for name, model in kinds.models.items()}
    losses = {name: step() for name, step in steps.items()}
    kinds.check()
    times = measure(steps, asked.rounds)
    if dist.get_rank() == 0:
        machine = provenance.machine()
        what = {
            "ranks": dist.get_world_size(),
            "form": asked.form,
            "batch": asked.batch,
            "pixels": asked.pixels,
            "parameters": sum(p.numel() for p in kinds.models["alone"].parameters()),
            "torch": torch.__version__,
            "cpu": machine.cpu,
            "gpu": torch.cuda.get_device_name() if asked.device == "cuda" else None,
            "cores": len(os.sched_getaffinity(0)),
            "losses": losses,
        }
        found = summary(times, kinds.peer)
        text = json.dumps(
            {**what, **found, "steps_ms": {k: [round(v, 3) for v in t] for k, t in times.items()}}
        )
        print(json.dumps({"losses": losses, **found}, indent=1))
        if asked.out:
            asked.out.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
