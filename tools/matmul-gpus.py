#!/usr/bin/env python3
"""Measures matmuls fused with their collective, on several GPUs, beside other ways to the same product.

  torchrun --standalone --nproc-per-node 2 tools/matmul-gpus.py --json FILE

Shapes are one of 8192 x 8192 x 2048 for each GPU, and those of Llama-70B cut among the ranks. Forms:
  matmul      torch.mm of the whole, nothing sent
  collective  Unisono's collective, nothing multiplied
  fused       unisono.torch's call, with its planned chunks
  apart       the same call with chunks=1: the collective as a whole and the matmul as a whole
  nccl        torch.mm and NCCL's collective, one after the other
  torch       torch.ops.symm_mem's fused operation (async tensor parallelism); there is none for all_reduce
Every form's product is compared with NCCL's. A time is that of --calls calls one after the other, after one
that is not timed; the host is ahead of the GPU. It is the median of --samples turns, of the slowest rank.
Hidden is the share of the shorter of matmul and collective that the fused call saves beside both in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers torch.ops.symm_mem

import unisono
import unisono.torch as ut
from unisono.bench import provenance

ROWS = (2048, 8192, 16384)
AHEAD = 10_000_000  # cycles of the GPU, in which the host enqueues the calls
Call = Callable[[], Any]


def shapes(ranks: int) -> Iterator[tuple[str, str, int, int, int]]:
    """Yields a name, the collective, and M, K and N of one rank's matmul."""
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        wide = collective == "all_gather"
        yield "square", collective, 8192, 8192 if wide else 2048, 2048 if wide else 8192
    for m in ROWS:
        yield "qkv", "all_gather", m, 8192, 10240 // ranks
        yield "gate_up", "all_gather", m, 8192, 57344 // ranks
        for collective in ("reduce_scatter", "all_reduce"):
            yield "o", collective, m, 8192 // ranks, 8192
            yield "down", collective, m, 28672 // ranks, 8192


def forms(comm: unisono.Communicator, collective: str, m: int, k: int, n: int) -> dict[str, Call]:
    """Returns the call of each form, by name."""
    ranks = comm.size
    a, b = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((m, k), (k, n)))
    b /= (k * ranks) ** 0.5
    product = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    group, mm = dist.group.WORLD.group_name, partial(torch.mm, a, b, out=product)
    if collective == "all_gather":
        mine, gathered = a[: m // ranks].clone(), torch.empty_like(a)
        ours = partial(ut.fused_all_gather_matmul, comm, mine, [b], return_A=False)
        torchs = partial(torch.ops.symm_mem.fused_all_gather_matmul, mine, [b], 0, group, return_A=False)

        def theirs() -> torch.Tensor:
            dist.all_gather_into_tensor(gathered, mine)
            return torch.mm(gathered, b, out=product)

        return {
            "matmul": mm,
            "collective": partial(comm.all_gather, mine, out=gathered.view(ranks, m // ranks, k)),
            "fused": lambda: ours()[1][0],
            "apart": lambda: ours(chunks=1)[1][0],
            "nccl": theirs,
            "torch": lambda: torchs()[1][0],
        }
    if collective == "reduce_scatter":
        share = product.new_empty(m // ranks, n)
        ours = partial(ut.fused_matmul_reduce_scatter, comm, a, b)

        def theirs() -> torch.Tensor:
            dist.reduce_scatter_tensor(share, mm())
            return share

        return {
            "matmul": mm,
            "collective": partial(comm.reduce_scatter, product.view(ranks, m // ranks, n), out=share),
            "fused": ours,
            "apart": partial(ours, chunks=1),
            "nccl": theirs,
            "torch": partial(torch.ops.symm_mem.fused_matmul_reduce_scatter, a, b, "sum", 0, group),
        }
    ours, out = partial(ut.matmul_all_reduce, comm, a, b), torch.empty_like(product)

    def theirs() -> torch.Tensor:
        dist.all_reduce(mm())
        return product

    return {
        "matmul": mm,
        "collective": partial(comm.all_reduce, product, out=out),
        "fused": ours,
        "apart": partial(ours, chunks=1),
        "nccl": theirs,
    }


def check(found: dict[str, Call]) -> None:
    """Raises if a product is not NCCL's to rounding."""
    right = found["nccl"]().clone()
    for name in ("fused", "apart", "torch"):
        if name in found:
            torch.testing.assert_close(found[name](), right, rtol=2e-2, atol=5e-2, msg=f"{name} is wrong")


def timed(comm: unisono.Communicator, asked: argparse.Namespace, calls: Sequence[Call]) -> list[float]:
    """Returns the microseconds of each call, of the slowest rank."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(asked.samples + 1):
        for times, call in zip(found, calls, strict=True):
            torch.cuda.synchronize()
            comm.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)
            call()
            begin.record()
            for _ in range(asked.calls):
                call()
            end.record()
            end.synchronize()
            if turn:
                times.append(1e3 * begin.elapsed_time(end) / asked.calls)
    medians = np.array([statistics.median(times) for times in found])
    return [float(one) for one in comm.all_reduce(medians, op="max")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    comm = unisono.init(device=device)
    torch.manual_seed(1 + comm.rank)
    results = []
    for name, collective, m, k, n in shapes(comm.size):
        of = forms(comm, collective, m, k, n)
        check(of)
        us = dict(zip(of, timed(comm, asked, [*of.values()]), strict=True))
        alone, sent, fused = us["matmul"], us["collective"], us["fused"]
        hidden = (alone + sent - fused) / min(alone, sent)
        results.append({"case": name, "collective": collective, "m": m, "k": k, "n": n, "us": us})
        if comm.rank == 0:
            told = ", ".join(f"{form} {one:.1f}" for form, one in us.items())
            what = f"{name} {collective} m={m}"
            print(f"{what:30} {told}; over matmul {fused / alone - 1:.1%}, hidden {hidden:.0%}", flush=True)
    if comm.rank == 0 and asked.json is not None:
        about = {"gpu": torch.cuda.get_device_name(), "gpus": comm.size, "torch": torch.__version__}
        about |= {"calls": asked.calls, "samples": asked.samples, "unisono": provenance.commit()}
        asked.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
