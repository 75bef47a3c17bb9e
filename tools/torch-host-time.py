#!/usr/bin/env python3
"""Measures what a call of torch.distributed on GPU tensors takes of the host, by Unisono and by NCCL.

  python tools/torch-host-time.py --json times.json
  UNISONO_SHARE_DEVICE=1 UNISONO_MAX_SMS=64 unisono run -n 2 python tools/torch-host-time.py \\
    --only unisono --store /tmp/store

A sample is the time in which the host makes --calls calls, over their number; the GPU is waited for between
samples. Backends take turns, sample by sample. `direct` calls the communicator itself. Given are the median
and the quartiles of --samples samples, of rank 0. A rank alone moves nothing: its calls cost what torch and
the backend do. NCCL takes one rank a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono
import unisono_torch
from unisono import launch


def in_torch(group: Any, elements: int, size: int) -> dict[str, Callable[[], object]]:
    """Returns the calls of a process group, by name."""
    x = torch.zeros(elements, device="cuda")
    whole = torch.zeros(elements * size, device="cuda")

    def waited(call: Callable[..., Any], *args: Any) -> None:
        call(*args, group=group, async_op=True).wait()

    return {
        "all_reduce": partial(dist.all_reduce, x, group=group),
        "all_reduce, async_op": partial(waited, dist.all_reduce, x),
        "all_gather_into_tensor": partial(dist.all_gather_into_tensor, whole, x, group=group),
        "reduce_scatter_tensor": partial(dist.reduce_scatter_tensor, x, whole, group=group),
        "all_to_all_single": partial(dist.all_to_all_single, torch.zeros_like(whole), whole, group=group),
        "broadcast": partial(dist.broadcast, x, 0, group=group),
    }


def sample(call: Callable[[], object], calls: int) -> float:
    """Returns the microseconds of a call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * took / calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=2048, help="of f32, of a rank")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--store", help="a new file, by which several ranks meet")
    parser.add_argument("--only", choices=("unisono", "nccl"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    unisono_torch.register()
    here = launch.from_env(os.environ)
    device = here.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    comm = unisono.init(device=device)
    store = dist.FileStore(asked.store, comm.size) if asked.store else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    names = [name for name in ("unisono", "nccl") if asked.only in (None, name)]
    groups = {name: dist.new_group(list(range(comm.size)), backend=name) for name in names}
    ways = {name: in_torch(group, asked.elements, comm.size) for name, group in groups.items()}
    x = torch.zeros(asked.elements, device="cuda")
    ways["direct"] = {"all_reduce": partial(comm.all_reduce, x, out=x)}
    results = []
    for name in next(iter(ways.values())):
        calls = {way: of[name] for way, of in ways.items() if name in of}
        found: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(asked.samples + 3):
            for way, call in calls.items():
                found[way].append(sample(call, asked.calls))
        row: dict[str, Any] = {"call": name}
        for way, samples in found.items():
            low, middle, high = statistics.quantiles(samples[3:], n=4)
            row[way] = {"us": middle, "quartiles_us": [low, high]}
        results.append(row)
        if comm.rank == 0:
            print(f"{name:24}" + "".join(f"  {way} {row[way]['us']:6.2f} us" for way in calls), flush=True)
    if asked.json and comm.rank == 0:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "unisono": unisono.__version__,
            "ranks": comm.size,
            "bytes": 4 * asked.elements,
            "calls": asked.calls,
            "samples": asked.samples,
        }
        asked.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
