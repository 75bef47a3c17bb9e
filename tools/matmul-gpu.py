#!/usr/bin/env python3
"""Measures on one GPU what fused matmuls cost beside the matmul: chunks, gates, copies beside, one rank, the sum.

  python tools/matmul-gpu.py --json matmul.json

Times are of the GPU, medians of --samples turns of the compared forms, each --calls calls in a CUDA graph:
- chunks: torch.mm of the chunks that are planned for --ranks ranks, over torch.mm of the whole.
- gates: the same chunks, each behind an event of another stream that has set 4 bytes; in us for each chunk.
- copies: the whole, while as many bytes as the other ranks' shards are copied within the GPU, or from the host.
- one rank: the fused calls of a communicator of one rank over torch.mm, also called one by one (eager).
- sum: combine_arrays of a part of each rank, beside a copy that reads and writes as many bytes together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import unisono
import unisono.torch as ut
from unisono._core import combine_arrays
from unisono.torch.matmul import plan

ROWS = (1024, 2048, 4096, 8192, 16384)
# name, collective, K, N of one rank; Llama-70B cut among 8 ranks, and K2's shapes
LLAMA = (
    ("qkv", "all_gather", 8192, 1280),
    ("gate_up", "all_gather", 8192, 7168),
    ("o", "reduce_scatter", 1024, 8192),
    ("down", "reduce_scatter", 3584, 8192),
)
SQUARE = (("8192x8192x2048", "all_gather", 8192, 2048), ("8192x8192x2048", "reduce_scatter", 2048, 8192))
Call = Callable[[], object]


def graph_of(call: Call, calls: int) -> Any:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def timed(asked: argparse.Namespace, forms: Sequence[Call], eager: bool = False) -> list[float]:
    """Returns the microseconds of a call of each form."""
    if eager:
        for form in forms:
            form()
        runs: list[Call] = [partial(_several, form, asked.calls) for form in forms]
    else:
        runs = [graph_of(form, asked.calls).replay for form in forms]
    found: list[list[float]] = [[] for _ in forms]
    for turn in range(asked.samples + 1):
        for times, run in zip(found, runs, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if turn:
                times.append(1e3 * begin.elapsed_time(end) / asked.calls)
    return [statistics.median(times) for times in found]


def _several(form: Call, calls: int) -> None:
    for _ in range(calls):
        form()


class Case:
    """A matmul and its planned chunks."""

    def __init__(self, asked: argparse.Namespace, name: str, collective: str, m: int, k: int, n: int) -> None:
        self.a = torch.randn(m, k, device="cuda").bfloat16()
        self.b = torch.randn(k, n, device="cuda").bfloat16() / k**0.5
        self.out = self.a.new_empty(m, n)
        owned = plan.shares(m, asked.ranks)
        most = max(plan.MOST_CHUNKS, asked.ranks)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        cuts = [plan.by_shares(owned, number) for number in range(1, most + 1)]
        self.panels = plan.best(cuts, [(range(m), range(n))], False, 2 * k, sms)
        self.about: dict[str, Any] = {"case": name, "collective": collective, "m": m, "k": k, "n": n}
        self.about["chunks"] = [len(panel) for panel in self.panels]

    def whole(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def chunk(self, panel: range) -> None:
        rows = slice(panel.start, panel.stop)
        torch.mm(self.a[rows], self.b, out=self.out[rows])

    def chunks(self) -> None:
        for panel in self.panels:
            self.chunk(panel)

    def gated(self, side: Any, flag: torch.Tensor) -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        for panel in self.panels:
            with torch.cuda.stream(side):
                flag.zero_()
            here.wait_stream(side)
            self.chunk(panel)

    def beside(self, side: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        self.whole()
        here.wait_stream(side)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    comm = unisono.init(rank=0, size=1, device=0)
    side = torch.cuda.Stream(priority=-1)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    began = time.monotonic()
    results: list[dict[str, Any]] = []

    def add(what: str, about: dict[str, Any], **numbers: float) -> None:
        results.append({"what": what, **about, **numbers})
        label = f"{about['case']} {about['collective']} m={about['m']}" if "case" in about else ""
        told = ", ".join(f"{name} {number:.3f}" for name, number in numbers.items())
        print(f"{what:9} {label:42} {about.get('chunks', '')!s:24} {told}", flush=True)

    cases = [(name, collective, 8192, k, n) for name, collective, k, n in SQUARE]
    cases += [(name, collective, m, k, n) for name, collective, k, n in LLAMA for m in ROWS]
    for name, collective, m, k, n in cases:
        case = Case(asked, name, collective, m, k, n)
        if len(case.panels) == 1:
            add("chunks", case.about, ratio=1.0)
            continue
        whole, chunks, gated = timed(asked, [case.whole, case.chunks, partial(case.gated, side, flag)])
        add("chunks", case.about, whole_us=whole, chunks_us=chunks, ratio=chunks / whole)
        add("gates", case.about, gap_us=(gated - chunks) / len(case.panels))

    for name, collective, k, n in SQUARE:
        case = Case(asked, name, collective, 8192, k, n)
        # what the other ranks' shards are: of A for an all_gather, of the product otherwise
        piece = (case.a if collective == "all_gather" else case.out)[: 8192 // asked.ranks]
        device = [(torch.empty_like(piece), torch.empty_like(piece)) for _ in range(asked.ranks - 1)]
        pinned = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
        host = [(to, pinned) for to, _ in device]
        copies = {}
        for where, pairs in (("device", device), ("host", host)):
            # the host's link carries less: as much as it brings within the matmul
            alone, copied = timed(asked, [case.whole, partial(_copy, pairs)])
            fits = max(1, min(len(pairs), int(0.8 * len(pairs) * alone / copied)))
            alone, both = timed(asked, [case.whole, partial(case.beside, side, pairs[:fits])])
            copies |= {f"{where}_mb": fits * piece.nbytes / 1e6, f"{where}_ratio": both / alone}
        add("copies", case.about, **copies)

    for name, collective, k, n in SQUARE:
        case = Case(asked, name, collective, 8192, k, n)
        a, b = case.a, case.b
        forms: dict[str, Call] = {
            "all_gather": lambda: ut.fused_all_gather_matmul(comm, a, [b], return_A=False),  # noqa: B023
            "reduce_scatter": lambda: ut.fused_matmul_reduce_scatter(comm, a, b),  # noqa: B023
            "all_reduce": lambda: ut.matmul_all_reduce(comm, a, b),  # noqa: B023
        }
        for eager in (False, True):
            mm, *fused = timed(asked, [partial(torch.mm, a, b), *forms.values()], eager)
            ratios = {form: one / mm for form, one in zip(forms, fused, strict=True)}
            add("one rank", {**case.about, "eager": eager}, mm_us=mm, **ratios)

    parts = [torch.randn(1024, 8192, device="cuda").bfloat16() for _ in range(asked.ranks)]
    out = torch.empty_like(parts[0])
    half = torch.empty((asked.ranks + 1) * out.nbytes // 2, dtype=torch.uint8, device="cuda")
    summed, copied = timed(asked, [lambda: combine_arrays(parts, out=out), lambda: half.clone()])
    add("sum", {"parts": asked.ranks, "part_mb": out.nbytes / 1e6}, sum_us=summed, share=copied / summed)

    print(f"{time.monotonic() - began:.0f} s on {torch.cuda.get_device_name()}")
    if asked.json is not None:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            **vars(asked),
            "json": None,
            "unisono": unisono.__version__,
        }
        asked.json.write_text(json.dumps({**about, "results": results}, indent=1))
    comm.close()


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)


main()
