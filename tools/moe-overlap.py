#!/usr/bin/env python3
"""Measures rounds of a mixture of experts between GPUs by kernels and by copy engines, alone and beside a
matmul that has the SMs meanwhile.

  unisono run -n 2 python tools/moe-overlap.py --json overlap.json

A round dispatches flat rows, and combines them as they have come: each phase begins, and ends, and beside a
matmul that is enqueued between. Copy engines need to know the counts, so that the host waits for them. `by
handle` keeps a routing: nobody waits. All forms take turns, in --samples rounds; times are medians of the
slowest rank, from the first call to the end of the work on the GPU. Overlap is (matmuls + round - both) / the
smaller of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import unisono
from unisono import launch


class Round:
    """A round of one form."""

    def __init__(self, moe: unisono.Moe, x: torch.Tensor, idx: torch.Tensor, kept: bool) -> None:
        self._moe, self._x, self._idx, self._out = moe, x, idx, torch.empty_like(x)
        self._handle = moe.dispatch(x, idx).handle if kept else None

    def run(self, beside: Callable[[], object] = lambda: None) -> None:
        idx = None if self._handle else self._idx
        self._moe.dispatch_begin(self._x, idx, handle=self._handle)
        beside()
        d = self._moe.dispatch_end()
        self._moe.combine_begin(d.x, d.handle, out=self._out)
        beside()
        self._moe.combine_end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("hidden", 7168), ("experts", 256), ("top-k", 8), ("samples", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    device = launch.from_env(os.environ).local_rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    comm = unisono.init(device=device)
    say = print if comm.rank == 0 else lambda _: None
    say(f"{comm.size} on {torch.cuda.get_device_name()}: hidden {asked.hidden} bf16, us")
    generator = torch.Generator().manual_seed(1 + comm.rank)
    results = []
    for tokens in asked.tokens:
        idx = torch.rand(tokens, asked.experts, generator=generator).topk(asked.top_k).indices.cuda()
        x = torch.randn(tokens, asked.hidden, generator=generator).bfloat16().cuda()
        a, b = (torch.randn(n, asked.hidden, device="cuda").bfloat16() for n in (tokens, 2048))
        product = torch.empty(tokens, 2048, dtype=torch.bfloat16, device="cuda")

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = product) -> None:
            torch.mm(a, b.T, out=out)

        def moe(counts: bool, tokens: int = tokens) -> unisono.Moe:
            options = unisono.MoeOptions(host_counts=counts, device="cuda")
            return comm.moe(asked.experts, asked.top_k, asked.hidden, tokens, options=options)

        rounds = {
            "kernels": Round(moe(False), x, idx, False),
            "copy engines": Round(moe(True), x, idx, False),
            "kernels, by handle": Round(moe(False), x, idx, True),
            "copy engines, by handle": Round(moe(True), x, idx, True),
        }
        works: dict[str, Callable[[], object]] = {"matmuls": lambda m=multiply: (m(), m())}
        for name, one in rounds.items():
            works[name] = lambda one=one: one.run()
            works[f"{name}, matmuls"] = lambda one=one, m=multiply: one.run(m)
        taken: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(asked.samples + 2):
            for name, work in works.items():
                torch.cuda.synchronize()
                comm.barrier()
                began = time.perf_counter()
                work()
                torch.cuda.synchronize()
                slowest = np.array([1e6 * (time.perf_counter() - began)])
                taken[name].append(float(comm.all_reduce(slowest, op="max")[0]))
        found = {name: statistics.median(times[2:]) for name, times in taken.items()}
        say(f"{tokens} tokens; matmuls alone {found['matmuls']:.0f}")
        for name in rounds:
            alone, both = found[name], found[f"{name}, matmuls"]
            overlap = (found["matmuls"] + alone - both) / min(found["matmuls"], alone)
            say(f"  {name:24} alone {alone:7.0f}  beside {both:7.0f}  overlap {overlap:5.2f}")
        results.append({"tokens": tokens, "us": found, "samples": taken})
        del rounds, works
    if asked.json is not None and comm.rank == 0:
        about = {"ranks": comm.size, "gpu": torch.cuda.get_device_name(), **vars(asked), "json": None}
        asked.json.write_text(json.dumps({**about, "results": results}))
    comm.close()


main()
