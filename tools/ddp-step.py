#!/usr/bin/env python3
"""Measures a step of DDP on CPUs by Unisono and by gloo, in the same processes and in turn.

  torchrun --standalone --nproc-per-node 2 tools/ddp-step.py --out FILE

The model is a ResNet-18 (11.7 million parameters, 1000 classes). A step is forward, backward and SGD. A round
has a step of each kind, in random order, each after one that is not timed:
  unisono, gloo  DDP as a program has it
  silent         DDP that sends nothing
  alone          the model itself, without DDP
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
from torch.nn.parallel import DistributedDataParallel

from unisono.bench import provenance
from unisono.records import stats

KINDS = ("unisono", "gloo", "silent", "alone")


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


def wrapped(kind: str, gloo: Any) -> nn.Module:
    if kind == "alone":
        return resnet18()
    silent = kind == "silent"
    group = gloo if kind == "gloo" else None
    ddp = DistributedDataParallel(resnet18(), process_group=group, broadcast_buffers=not silent)
    if silent:
        ddp.register_comm_hook(None, noop_hook)
    return ddp


def step_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def check(models: dict[str, nn.Module]) -> None:
    """Raises unless the ranks have the same parameters, and Unisono's are gloo's to rounding."""
    for mine, theirs in zip(models["unisono"].parameters(), models["gloo"].parameters(), strict=True):
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine.detach())
        if not all(torch.equal(one, mine) for one in everyone):
            raise SystemExit("the ranks' parameters differ.")
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


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


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Returns medians with intervals: of steps, of time beyond a base, and of Unisono's share of gloo's."""
    found: dict[str, Any] = {"step_ms": {kind: interval(times[kind]) for kind in times}}
    for name, base in (("outside_compute", "alone"), ("waiting", "silent")):
        beyond = {kind: less(times, kind, base) for kind in ("unisono", "gloo")}
        found[f"{name}_ms"] = {kind: interval(values) for kind, values in beyond.items()}
        shares = [mine / theirs for mine, theirs in zip(beyond["unisono"], beyond["gloo"], strict=True)]
        found[f"{name}_share_of_gloo"] = interval(shares)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2, help="images of a rank")
    parser.add_argument("--pixels", type=int, default=64, help="of an image's side")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(asked.batch, 3, asked.pixels, asked.pixels), torch.randint(1000, (asked.batch,))
    models = {kind: wrapped(kind, gloo) for kind in KINDS}
    steps = {kind: step_of(model, x, y) for kind, model in models.items()}
    for step in steps.values():
        step()
    check(models)
    times = measure(steps, asked.rounds)
    if dist.get_rank() == 0:
        what = {
            "ranks": dist.get_world_size(),
            "batch": asked.batch,
            "pixels": asked.pixels,
            "parameters": sum(p.numel() for p in models["alone"].parameters()),
            "torch": torch.__version__,
            "cpu": provenance.machine().cpu,
            "cores": len(os.sched_getaffinity(0)),
        }
        text = json.dumps(
            {**what, **summary(times), "steps_ms": {k: [round(v, 3) for v in t] for k, t in times.items()}}
        )
        print(json.dumps(summary(times), indent=1))
        if asked.out:
            asked.out.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
