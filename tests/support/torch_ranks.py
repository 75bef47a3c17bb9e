"""What programs of torch.distributed share: the group, data of a seed, a model and its training."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

DEVICE = os.environ.get("UNISONO_TEST_TORCH_DEVICE", "cpu")  # of the tensors that go into calls


@contextmanager
def world(store: str, seconds: float = 60, bound: bool = False) -> Iterator[tuple[int, int]]:
    """Makes the default process group of the backend. bound: to the rank's GPU. Gives rank and size."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_default_device(DEVICE)
    dist.init_process_group(
        "unisono",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=torch.device("cuda", torch.cuda.current_device()) if bound else None,
    )
    try:
        yield rank, size
    finally:
        dist.destroy_process_group()


def several(store: str, *programs: str) -> list[Any]:
    """Runs programs MODULE:FUNCTION in turn, each with a store of its own, since a process takes seconds to
    import torch. Returns their results."""
    results = []
    for number, program in enumerate(programs):
        module, _, function = program.partition(":")
        try:
            results.append(getattr(importlib.import_module(module), function)(f"{store}-{number}"))
        except Exception as error:
            raise RuntimeError(f"{program}: {type(error).__name__}: {error}") from error
    return results


def data(shape: tuple[int, ...], dtype: torch.dtype, *seed: int, strided: bool = False) -> torch.Tensor:
    """Returns random data of a seed; strided: not contiguous."""
    generator = torch.Generator().manual_seed(sum((7 + s) * 31**i for i, s in enumerate(seed)))
    whole = (*shape[:-1], 2 * shape[-1]) if strided and shape else shape
    numbers = torch.randint(-4, 5, whole, generator=generator, device="cpu")
    if dtype.is_floating_point and dtype.itemsize > 1:
        tensor = (numbers + torch.rand(whole, generator=generator, device="cpu")).to(dtype)
    else:
        tensor = (numbers.abs() if dtype == torch.uint8 else numbers).to(torch.float32).to(dtype)
    tensor = tensor.to(DEVICE)
    return tensor[..., ::2] if strided and shape else tensor


def same(mine: torch.Tensor, theirs: torch.Tensor, *what: object) -> None:
    """Fails unless two results are equal, sums of floats to rounding."""
    if mine.dtype.itemsize == 1 and mine.dtype.is_floating_point:
        mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)
    rounding = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4, torch.float64: 1e-10}
    near = rounding.get(mine.dtype, 0)
    torch.testing.assert_close(
        mine.cpu(), theirs.cpu(), rtol=near, atol=near, msg=lambda text: f"{what}: {text}"
    )


def settle() -> None:
    """Waits for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def again(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def model() -> nn.Module:
    torch.manual_seed(3)
    with torch.device("cpu"):
        layers = nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 33), nn.BatchNorm1d(33), nn.Linear(33, 5)
    return nn.Sequential(*layers).to(DEVICE)


def train(
    steps: int, wrapped: nn.Module, rank: int, after: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Returns the losses of some steps of SGD on this rank's data."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    losses, device = [], next(wrapped.parameters()).device
    for step in range(steps):
        x, y = data((16, 20), torch.float32, rank, step), data((16, 5), torch.float32, rank, step, 1)
        x, y = x.to(device), y.to(device)
        loss = nn.functional.mse_loss(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(step)
    return losses
