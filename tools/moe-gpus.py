#!/usr/bin/env python3
"""Measures dispatch and combine of a mixture of experts on several GPUs, a rank each.

  unisono run -n 4 python tools/moe-gpus.py --json moe.json

Beside it NCCL: rows gathered by index_select, all_to_all_single, and index_add_ back. Its routes and counts
are known before, which no user has: it is the best that a program with NCCL can reach. Both send a token once to
each rank that has an expert of its own. Every result is checked against sums on the host first.

Times are of the GPU: of one call among --calls in a CUDA graph, which hides that ranks start apart; the median
of --samples, of the slowest rank. GB/s are logical: received rows, this rank's own included. Ranks that share a
GPU are checked, and have no peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import unisono
from unisono import launch

EXPERTS, TOP_K = 256, 8  # of DeepSeek-V3


class Case:
    """A rank's tokens and routes by seed, and where they go."""

    def __init__(self, comm: unisono.Communicator, tokens: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(1 + comm.rank)
        self.comm, self.tokens, self.hidden = comm, tokens, hidden
        idx = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
        self.goes = torch.zeros(tokens, comm.size, dtype=torch.bool)
        self.goes.scatter_(1, idx // (EXPERTS // comm.size), True)
        self.idx = idx.int().cuda()
        self.x = torch.randn(tokens, hidden, generator=generator).bfloat16().cuda()
        self.out = torch.empty_like(self.x)
        self.sends = self.goes.sum(0).tolist()
        everyones = comm.all_gather(np.array(self.sends, np.int64)).reshape(comm.size, comm.size)
        self.receives = everyones[:, comm.rank].tolist()
        # the ranks give rows back as they are, and every rank's sum is rounded once
        wide = self.x.float() * self.goes.sum(1, keepdim=True).cuda()
        self.sum = wide.bfloat16()

    def of_unisono(self, scales: str | None = None) -> dict[str, Callable[[], Any]]:
        options = unisono.MoeOptions(scales=scales, device="cuda")
        moe = self.comm.moe(EXPERTS, TOP_K, self.hidden, self.tokens, options=options)
        kept: dict[str, Any] = {"d": moe.dispatch(self.x, self.idx)}

        def dispatch() -> None:
            kept["d"] = moe.dispatch(self.x, self.idx)

        def dispatch_by_handle() -> None:
            moe.dispatch(self.x, None, handle=kept["d"].handle)

        if scales is not None:
            return {"dispatch": dispatch}

        def combine() -> torch.Tensor:
            moe.combine(kept["d"].x, kept["d"].handle, out=self.out)
            return self.out

        def both() -> torch.Tensor:
            dispatch()
            return combine()

        return {"dispatch": dispatch, "by handle": dispatch_by_handle, "combine": combine, "round": both}

    def of_nccl(self) -> dict[str, Callable[[], Any]]:
        tokens = torch.cat([self.goes[:, r].nonzero()[:, 0] for r in range(self.comm.size)]).cuda()
        sent = torch.empty(sum(self.sends), self.hidden, dtype=torch.bfloat16, device="cuda")
        came = torch.empty(sum(self.receives), self.hidden, dtype=torch.bfloat16, device="cuda")
        back, wide = torch.empty_like(sent), torch.empty(self.tokens, self.hidden, device="cuda")

        def dispatch() -> None:
            torch.index_select(self.x, 0, tokens, out=sent)
            dist.all_to_all_single(came, sent, self.receives, self.sends)

        def combine() -> torch.Tensor:
            dist.all_to_all_single(back, came, self.sends, self.receives)
            wide.zero_().index_add_(0, tokens, back.float())
            return self.out.copy_(wide)

        def both() -> torch.Tensor:
            dispatch()
            return combine()

        return {"dispatch": dispatch, "combine": combine, "round": both}


def timed(comm: unisono.Communicator, call: Callable[[], Any], calls: int, samples: int) -> float:
    """Returns the microseconds of a call, of the slowest rank."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    found = []
    for _ in range(samples + 2):
        comm.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / calls)
    mine = np.array([statistics.median(found[2:])])
    return float(comm.all_reduce(mine, op="max")[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,16,64,128,256,1024,4096")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    world = launch.from_env(os.environ)
    device = world.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    comm = unisono.init(device=device)
    alone = torch.cuda.device_count() >= world.local_size
    if alone and comm.size > 1:
        name = np.zeros(256, np.uint8)
        path = os.path.join(tempfile.mkdtemp(), "store").encode() if comm.rank == 0 else b""
        name[: len(path)] = list(path)
        name = comm.broadcast(name)
        store = dist.FileStore(bytes(name).rstrip(b"\0").decode(), comm.size)
        dist.init_process_group("nccl", store=store, rank=comm.rank, world_size=comm.size)
    results = []
    if comm.rank == 0:
        print(
            f"{comm.size} ranks on {torch.cuda.get_device_name()}; hidden {asked.hidden}, bf16, times in us"
        )
    for tokens in map(int, asked.tokens.split(",")):
        case = Case(comm, tokens, asked.hidden)
        makers = {"unisono": case.of_unisono, "unisono e4m3": lambda of=case: of.of_unisono("e4m3_128")}
        if alone and comm.size > 1:
            makers["nccl"] = case.of_nccl
        for library, make in makers.items():
            calls = make()
            if "round" in calls and not torch.equal(calls["round"](), case.sum):
                raise SystemExit(f"{library}: the sums of rank {comm.rank} are wrong.")
            times = {name: timed(comm, call, asked.calls, asked.samples) for name, call in calls.items()}
            gbytes = sum(case.receives) * asked.hidden * 2 / 1e9
            results.append({"tokens": tokens, "library": library, "us": times, "rows_gb": gbytes})
            if comm.rank == 0:
                text = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
                rate = "" if library != "unisono" else f" ({gbytes / times['dispatch'] * 1e6:.0f} GB/s)"
                print(f"{tokens:6} tokens  {library:13} {text}{rate}", flush=True)
    if asked.json is not None and comm.rank == 0:
        asked.json.write_text(
            json.dumps({"ranks": comm.size, "gpu": torch.cuda.get_device_name(), "results": results})
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    comm.close()


main()
