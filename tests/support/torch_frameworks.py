"""Frameworks that train over torch.distributed, each by Unisono and by gloo, with 2 ranks on CPUs.

  python tests/support/torch_frameworks.py [NAME ...]

prints a table: what ran, with which version, and how far its losses are from those by gloo. Frameworks that
are not installed are left out. In the environment of torchrun the file is the program itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_training
from torch_ranks import data, model, train

RANKS = 2


class Pairs(torch.utils.data.Dataset[Any]):
    """Inputs and targets, as the Trainer names them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": data((20,), torch.float32, at), "labels": data((5,), torch.float32, at, 1)}


def torch_ddp(backend: str) -> list[float]:
    """DistributedDataParallel."""
    dist.init_process_group(backend)
    return train(4, nn.parallel.DistributedDataParallel(model()), dist.get_rank())


def torch_compile(backend: str) -> list[float]:
    """torch.compile of a step with collectives."""
    dist.init_process_group(backend)
    return torch_training.compiled(dist.group.WORLD)


def torch_elastic(backend: str) -> list[float]:
    """torchrun starts all again after a rank has been killed. Gloo does not come up again: see PEERS."""
    dist.init_process_group(backend)

    def after(step: int) -> None:
        if step == 1 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    return train(4, nn.parallel.DistributedDataParallel(model()), dist.get_rank(), after)


def accelerate(backend: str) -> list[float]:
    """Accelerator on CPUs, which takes the group that there is, or under gloo's name."""
    from accelerate import Accelerator

    begin_first(backend)
    accelerator = Accelerator(cpu=True)
    net = model()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters()), torch.utils.data.DataLoader(Pairs(), batch_size=8)
    )
    losses = []
    for batch in loader:
        loss = nn.functional.mse_loss(net(batch["x"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.net(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def transformers(backend: str) -> list[float]:
    """The Trainer on CPUs."""
    from transformers import Trainer, TrainingArguments

    begin_first(backend)
    with tempfile.TemporaryDirectory() as folder:
        how = TrainingArguments(
            folder, use_cpu=True, max_steps=4, logging_steps=1, report_to=[], save_strategy="no",
            per_device_train_batch_size=4, disable_tqdm=True, ddp_backend="gloo", seed=1,
        )  # fmt: skip
        trainer = Trainer(Regression(), how, train_dataset=Pairs())
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def lightning(backend: str) -> list[float]:
    """Lightning's Trainer with its DDPStrategy."""
    import lightning as pl
    from lightning.pytorch.strategies import DDPStrategy

    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch["x"]), batch["labels"])
            losses.append(self.all_gather(loss.detach()).mean().item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=DDPStrategy(process_group_backend=backend), max_steps=4,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Pairs(), batch_size=8))
    return losses


def deepspeed(backend: str) -> list[float]:
    """DeepSpeed's ZeRO-2."""
    import deepspeed as ds

    ds.init_distributed(dist_backend=backend)
    how = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = ds.initialize(model=Regression(), config=how)
    losses = []
    for step in range(4):
        seed = dist.get_rank(), step
        loss = engine(data((8, 20), torch.float32, *seed), data((8, 5), torch.float32, *seed, 1))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def begin_first(backend: str) -> None:
    """Makes the group for a framework that takes gloo alone, unless Unisono has that name."""
    if backend != "gloo" and "GLOO" not in dist.Backend._plugins:
        dist.init_process_group(backend)


PROGRAMS = {
    f.__name__: f
    for f in (torch_ddp, torch_compile, torch_elastic, accelerate, transformers, lightning, deepspeed)
}

PEERS = {"torch_elastic": "torch_ddp"}  # what is compared by gloo, if it is another program


def run(name: str, backend: str, folder: Path) -> list[list[float]]:
    """Returns the losses of each rank. Raises RuntimeError with the output of a run that failed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "UNISONO_LOG": "1", "OUT": str(folder)}
    if backend == "unisono" and name in ("accelerate", "transformers") and torch.__version__ >= (2, 14):
        env["UNISONO_TORCH_REPLACE"] = "gloo"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    argv = [*torchrun, "--nproc-per-node", str(RANKS), __file__, name, backend]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stdout[-1500:] + ended.stderr[-3000:])
    if ("shared memory carries it" in ended.stderr) != (backend == "unisono"):
        raise RuntimeError(f"{name} by {backend} went another way: {ended.stderr[-3000:]}")
    return [json.loads((folder / str(rank)).read_text()) for rank in range(RANKS)]


def package(name: str) -> str:
    """Returns the version of the framework's package, or nothing."""
    try:
        return version(name.partition("_")[0])
    except PackageNotFoundError:
        return ""


def compare(names: list[str]) -> int:
    """Runs programs by both and prints a row of each. Returns how many failed."""
    failed = 0
    for name in names:
        if not package(name):
            print(f"| {name} | not installed |")
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                mine = torch.tensor(run(name, "unisono", Path(folder)))
                theirs = torch.tensor(run(PEERS.get(name, name), "gloo", Path(folder)))
            apart = ((mine - theirs).abs() / theirs.abs()).max().item()
            right = len(mine[0]) > 0 and apart < 1e-3
            print(f"| {name} {package(name)} | {'runs' if right else 'DIFFERS'} | {apart:.1e} |", flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            right = False
            print(f"| {name} {package(name)} | FAILS |\n{error}", flush=True)
        failed += not right
    return failed


def main() -> int:
    if "RANK" not in os.environ:
        return compare(sys.argv[1:] or list(PROGRAMS))
    name, backend = sys.argv[1:]
    torch.set_num_threads(1)
    losses = PROGRAMS[name](backend)
    Path(os.environ["OUT"], str(dist.get_rank())).write_text(json.dumps(losses))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
