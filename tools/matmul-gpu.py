#!/usr/bin/env python3
"""Measures on one GPU what fused matmuls cost beside the matmul itself.

  python tools/matmul-gpu.py --json matmul.json

Times are of the GPU, medians of --samples turns of the compared forms, each --calls calls in a CUDA graph:
- chunks: torch.mm of 1 to 8 chunks of as many shares each, for --ranks ranks, over torch.mm of the whole.
- gates: the planned chunks, each behind a wait for a signal of another rank of this GPU, which has come:
  us of a wait, beside by how much two runs without waits differ.
- copies: the whole, while as many bytes are copied as the other ranks' shards have, within the GPU or from
  the host (as many of them as fit).
- one rank: the fused calls of a communicator of one rank over torch.mm, also called one by one (eager).
- sum: combine_arrays of a part of each rank, beside a copy that reads and writes as many bytes together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from streams import Ranks, prepare

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
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        owned = plan.shares(m, asked.ranks)
        cuts = {plan.by_shares(owned, number) for number in range(1, plan.MOST_CHUNKS + 1)}
        even = [cut for cut in cuts if len({len(panel) for panel in cut}) == 1]
        self.cuts = sorted(even, key=len)
        self.panels = plan.of_shares(owned, (n,), k, 2, sms, collective == "all_gather")
        self.about: dict[str, Any] = {"case": name, "collective": collective, "m": m, "k": k, "n": n}

    def whole(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def chunk(self, panel: range) -> None:
        rows = slice(panel.start, panel.stop)
        torch.mm(self.a[rows], self.b, out=self.out[rows])

    def chunks(self, panels: plan.Ranges) -> None:
        for panel in panels:
            self.chunk(panel)

    def beside(self, side: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            copy(pairs)
        self.whole()
        here.wait_stream(side)


class Gates:
    """Two ranks: one multiplies chunks when the puts of the other have come."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.ranks = Ranks(2)
        self.windows = self.ranks.comms.each(lambda comm: comm.window(256))
        self.word = torch.zeros(1, dtype=torch.int32, device="cuda")

    def round(self, case: Case, gated: bool, rank: int) -> None:
        window, stream = self.windows[rank], torch.cuda.current_stream()
        panels = case.panels * self.asked.calls
        window.begin(stream=stream)
        if rank == 1:
            for _ in panels:
                window.put_signal(self.word, 0, 0, stream=stream)
            return
        window.wait_signals([1], len(panels), stream=stream)
        for count, panel in enumerate(panels, 1):
            if gated:
                window.wait_signals([1], count, stream=stream)
            case.chunk(panel)

    def gap_us(self, case: Case) -> dict[str, float]:
        """Returns what a wait costs, and by how much two runs without waits differ."""
        without, gated = [self.ranks.capture(partial(self.round, case, gated), 1) for gated in (False, True)]
        waits = len(case.panels) * self.asked.calls
        gaps, noise = [], []
        for turn in range(self.asked.samples + 1):
            before, waiting, after = map(self.ranks.replay, (without, gated, without))
            if turn:
                gaps.append((waiting - (before + after) / 2) / waits)
                noise.append(abs(after - before) / waits)
        return {"gap_us": statistics.median(gaps), "noise_us": statistics.median(noise)}


class Bench:
    """What is measured, and the results."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.gates = Gates(asked)
        self.results: list[dict[str, Any]] = []
        self.side = torch.cuda.Stream(priority=-1)

    def add(self, what: str, about: dict[str, Any], **numbers: float) -> None:
        self.results.append({"what": what, **about, **numbers})
        told = ", ".join(f"{name} {number:.3f}" for name, number in numbers.items())
        label = f"{about['case']} {about['collective']} m={about['m']}" if "case" in about else ""
        print(f"{what:9} {label:42} {about.get('planned', '')!s:2} {told}", flush=True)

    def squares(self) -> Iterator[Case]:
        for name, collective, k, n in SQUARE:
            yield Case(self.asked, name, collective, 8192, k, n)

    def chunks(self) -> None:
        llama = (Case(self.asked, name, by, m, k, n) for name, by, k, n in LLAMA for m in ROWS)
        for case in chain(self.squares(), llama):
            whole, *others = timed(self.asked, [partial(case.chunks, cut) for cut in case.cuts])
            ratios = {str(len(cut)): one / whole for cut, one in zip(case.cuts[1:], others, strict=True)}
            about = {**case.about, "planned": len(case.panels)}
            self.add("chunks", about, whole_us=whole, **ratios)
            if len(case.panels) > 1:
                self.add("gates", about, **self.gates.gap_us(case))

    def copies(self) -> None:
        for case in self.squares():
            others = self.asked.ranks - 1
            source = case.a if case.about["collective"] == "all_gather" else case.out
            piece = source[: len(source) // self.asked.ranks]
            places = [torch.empty_like(piece) for _ in range(others)]
            pinned = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
            found = {}
            for name, one in (("device", piece), ("host", pinned)):
                pairs = [(place, one) for place in places]
                alone, copied = timed(self.asked, [case.whole, partial(copy, pairs)])
                fits = max(1, min(others, int(0.8 * others * alone / copied)))
                both = partial(case.beside, self.side, pairs[:fits])
                alone, together = timed(self.asked, [case.whole, both])
                found |= {f"{name}_mb": fits * piece.nbytes / 1e6, f"{name}_ratio": together / alone}
            self.add("copies", case.about, **found)

    def one_rank(self, comm: unisono.Communicator) -> None:
        for case in self.squares():
            a, b = case.a, case.b
            forms: dict[str, Call] = {
                "all_gather": partial(ut.fused_all_gather_matmul, comm, a, [b], return_A=False),
                "reduce_scatter": partial(ut.fused_matmul_reduce_scatter, comm, a, b),
                "all_reduce": partial(ut.matmul_all_reduce, comm, a, b),
            }
            for eager in (False, True):
                mm, *fused = timed(self.asked, [partial(torch.mm, a, b), *forms.values()], eager)
                ratios = {form: one / mm for form, one in zip(forms, fused, strict=True)}
                self.add("one rank", {**case.about, "eager": eager}, mm_us=mm, **ratios)

    def sum(self) -> None:
        parts = [torch.randn(1024, 8192, device="cuda").bfloat16() for _ in range(self.asked.ranks)]
        out = torch.empty_like(parts[0])
        half = torch.empty((self.asked.ranks + 1) * out.nbytes // 2, dtype=torch.uint8, device="cuda")
        forms: list[Call] = [partial(combine_arrays, parts, out=out), half.clone]
        summed, copied = timed(self.asked, forms)
        about = {"parts": self.asked.ranks, "part_mb": out.nbytes / 1e6}
        self.add("sum", about, sum_us=summed, share=copied / summed)


def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    prepare()
    bench, began = Bench(asked), time.monotonic()
    with unisono.init(rank=0, size=1, device=0) as comm:
        bench.chunks()
        bench.copies()
        bench.one_rank(comm)
        bench.sum()
    print(f"{time.monotonic() - began:.0f} s on {torch.cuda.get_device_name()}")
    if asked.json is not None:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **vars(asked), "json": None}
        asked.json.write_text(json.dumps({**about, "results": bench.results}, indent=1) + "\n")


main()
