#!/usr/bin/env python3
"""Measures the parts of a dispatch on GPUs: rows by a known routing, plain or quantised, and the routing.
`unisono bench --moe --device cuda` measures whole calls beside peers, and checks them.

  python tools/moe-gpu.py --json parts.json
  unisono run -n 4 python tools/moe-gpu.py

Times are of the GPU: of a call among --calls in a CUDA graph, the median of --samples, of the slowest rank.
Routing is what a dispatch with new routes takes beyond one by a handle. One rank alone only permutes: its
share is of the time of a copy of as much traffic, measured here too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import unisono
from unisono import launch

FORMS = (("expert_major", None), ("flat", None), ("flat", "e4m3_128"), ("flat", "mx"))


def timed(comm: unisono.Communicator, asked: argparse.Namespace, call: Callable[[], object]) -> float:
    """Returns the microseconds of a call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(asked.calls):
            call()
    found = []
    for _ in range(asked.samples + 2):
        comm.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / asked.calls)
    return float(comm.all_reduce(np.array([statistics.median(found[2:])]), op="max")[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("tokens", 4096), ("hidden", 7168), ("experts", 256), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    tokens, hidden, experts, top_k = asked.tokens, asked.hidden, asked.experts, asked.top_k
    device = launch.from_env(os.environ).local_rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    comm = unisono.init(device=device)
    generator = torch.Generator().manual_seed(1 + comm.rank)
    idx = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.cuda()
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().cuda()
    say = print if comm.rank == 0 else lambda _: None
    say(f"{comm.size} on {torch.cuda.get_device_name()}: {tokens} x {hidden} bf16, top-{top_k} of {experts}")
    say(f"{'us':24}{'dispatch':>10}{'by handle':>11}{'routing':>9}{'copy':>8}{'share':>7}")
    results = []
    for layout, scales in FORMS:
        options = unisono.MoeOptions(layout=layout, scales=scales, device="cuda")
        moe = comm.moe(experts, top_k, hidden, tokens, options=options)
        d = moe.dispatch(x, idx)
        known = timed(comm, asked, partial(moe.dispatch, x, None, handle=d.handle))
        whole = timed(comm, asked, partial(moe.dispatch, x, idx))
        found = {"layout": layout, "scales": scales, "dispatch_us": whole, "by_handle_us": known}
        text = f"{layout} {scales or '':10}"
        text = f"{text:24}{whole:10.1f}{known:11.1f}{whole - known:9.1f}"
        if comm.size == 1:
            written = hidden * 2 if d.scales is None else hidden + d.scales[0].nbytes
            rows = tokens * (top_k if layout == "expert_major" else 1)
            half = torch.empty((x.nbytes + rows * written) // 2, dtype=torch.uint8, device="cuda")
            found["copy_us"] = copy = timed(comm, asked, partial(torch.empty_like(half).copy_, half))
            text += f"{copy:8.1f}{copy / known:7.0%}"
        say(text)
        results.append(found)
    if asked.json is not None and comm.rank == 0:
        about = {"ranks": comm.size, "gpu": torch.cuda.get_device_name(), **vars(asked), "json": None}
        asked.json.write_text(json.dumps({**about, "results": results}))
    comm.close()


main()
