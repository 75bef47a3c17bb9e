#!/usr/bin/env python3
"""Measures dispatch and combine of a mixture of experts among ranks that share one GPU, a stream each.

Beside FlashInfer's one-sided kernels, which come from --peers, a folder that holds unpacked wheels:
  pip download --no-deps -d W flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2 nvidia-ml-py
  for w in W/*.whl; do unzip -qo $w -d PEERS; done
Its kernels are compiled at first use, by nvcc and ninja. Both libraries send x, experts and weights by the
same routes, and combine from where the experts have written: in the library's own memory (with Unisono over
the rows that have come), or, named copying, in memory of theirs. Results are checked before and after.

FlashInfer's combine has a block for each token, which waits for the other ranks. Where a rank might find no
place on the GPU for its first one, the combine is left out. TLLM_MOE_A2A_COMBINE_BLOCK_SIZE, which FlashInfer
reads, makes blocks smaller than 256 threads, so that more fit.

Times are of calls in CUDA graphs, of the slowest rank, the median of --samples; the libraries take turns. All
ranks begin at once. A round is a dispatch and its combine. A dispatch or a combine by itself is followed by a
meeting of all ranks, since FlashInfer's may not follow itself; the meetings' own time is taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from streams import SMS, Ranks, prepare

import unisono
from unisono.bench.backends.by_path import load

EXPERTS, TOP_K = 256, 8  # of DeepSeek-V3


def flashinfer_of(peers: Path | None) -> Any:
    """Returns FlashInfer's module, or None. The __init__ of its packages would import all of it."""
    if peers is None or not (peers / "flashinfer").is_dir():
        return None
    sys.path.insert(0, str(peers))
    return load("flashinfer", "comm.trtllm_moe_alltoall", ("jit",))


class Case:
    """Tokens and routes of all ranks by seed, and what they must become."""

    def __init__(self, n: int, tokens: int, hidden: int) -> None:
        torch.manual_seed(n * 1000 + tokens)
        self.n, self.tokens, self.hidden = n, tokens, hidden
        self.x = torch.randn(n, tokens, hidden, device="cuda").bfloat16()
        self.idx = torch.rand(n, tokens, EXPERTS, device="cuda").topk(TOP_K).indices.int()
        self.weights = torch.rand(n, tokens, TOP_K, device="cuda")
        self.rank_of = self.idx // (EXPERTS // n)
        self.goes = [(self.rank_of == r).any(2) for r in range(n)]  # [source, token] of each receiver
        self.out, total = torch.empty_like(self.x), torch.zeros(n, tokens, hidden, device="cuda")
        for r, goes in enumerate(self.goes):
            total += torch.where(goes[:, :, None], self.experts(r, self.x).float(), 0)
        self.sum = total.bfloat16()

    def experts(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        return rows * (rank + 1)

    def check(self, rank: int, arrays: Any, by_rank: bool, of_all: bool) -> None:
        """Raises if not the right rows have come, in any order. of_all: with other ranks' experts."""
        goes = self.goes[rank]
        here = (self.rank_of == rank)[goes] | of_all
        first = 0 if of_all else rank * (EXPERTS // self.n)
        right = [self.x[goes], torch.where(here, self.idx[goes] - first, -1)]
        right.append(torch.where(here, self.weights[goes], 0))
        filled = torch.arange(self.tokens, device="cuda") < goes.sum(1, keepdim=True)
        rows = filled.flatten().nonzero()[:, 0] if by_rank else torch.arange(len(here), device="cuda")
        seen = [array.flatten(0, -2)[rows] for array in arrays]
        orders = [x[:, :4].contiguous().view(torch.int64)[:, 0].argsort() for x in (seen[0], right[0])]
        for one, other in zip(seen, right, strict=True):
            if not torch.equal(one[orders[0]], other[orders[1]]):
                raise SystemExit(f"what rank {rank} has received is wrong.")

    def check_sums(self) -> None:
        if not torch.allclose(self.out.float(), self.sum.float(), rtol=2**-7, atol=0):
            raise SystemExit("the sums are wrong.")
        self.out.zero_()


class Library:
    calls: tuple[str, ...] = ("combine", "dispatch", "round")

    def __init__(self, case: Case) -> None:
        self.case = case

    def round(self, rank: int) -> None:
        self.combine(rank, self.dispatch(rank))

    def check(self, ranks: Ranks) -> None:
        """Dispatches and combines. A dispatch may give rows of a source other places than the one before."""
        self.got = ranks.run(self.dispatch)
        self.take(self.got)
        if "combine" in self.calls:
            ranks.run(self.combine)
            self.case.check_sums()


class Unisono(Library):
    """copies: the experts have written elsewhere, so that a combine pushes sums and does not read rows."""

    def __init__(self, ranks: Ranks, case: Case, layout: str, copies: bool) -> None:
        super().__init__(case)
        self.copies = copies
        options = unisono.MoeOptions(layout=layout, device="cuda")
        shape = EXPERTS, TOP_K, case.hidden, case.tokens
        with ThreadPoolExecutor(case.n) as pool:
            self.moes = list(pool.map(lambda comm: comm.moe(*shape, options=options), ranks.comms))

    def take(self, got: list[Any]) -> None:
        self.y = [self.case.experts(r, d.x) for r, d in enumerate(got)]
        for r, (moe, d) in enumerate(zip(self.moes, got, strict=True)):
            self.case.check(r, (d.x, d.topk_idx, d.topk_weights), moe.options.layout == "rank_major", False)
            if not self.copies:
                self.y[r] = d.x.copy_(self.y[r])

    def dispatch(self, rank: int) -> Any:
        case = self.case
        return self.moes[rank].dispatch(case.x[rank], case.idx[rank], case.weights[rank])

    def combine(self, rank: int, of: Any = None) -> None:
        y = self.y[rank] if of is None or self.copies else of.x
        self.moes[rank].combine(y, (of or self.got[rank]).handle, out=self.case.out[rank])


class FlashInfer(Library):
    """copies: the experts have written outside of the workspace, as they may with Unisono."""

    def __init__(self, case: Case, api: Any, copies: bool) -> None:
        super().__init__(case)
        n, tokens, row = case.n, case.tokens, 2 * case.hidden
        held = api.moe_a2a_get_workspace_size_per_rank(n, tokens, row + 8 * TOP_K, row)
        self.api, self.copies = api, copies
        self.workspace = torch.zeros(n, held, dtype=torch.uint8, device="cuda")
        about = [api.moe_a2a_initialize(self.workspace, r, n, tokens) for r in range(n)]
        self.rest = [(self.workspace, about[r], tokens, r, n, TOP_K) for r in range(n)]
        resident = 65536 // (104 * int(os.environ.get("TLLM_MOE_A2A_COMBINE_BLOCK_SIZE", "256")))  # registers
        if (n - 1) * tokens >= SMS * resident:
            self.calls = () if copies else ("dispatch",)
        elif copies:  # its copying blocks wait for a dispatch, and may take the room of another rank's
            self.calls = ("combine",)

    def take(self, got: list[Any]) -> None:
        n, tokens, row = self.case.n, self.case.tokens, 2 * self.case.hidden
        self.y = [self.case.experts(r, arrays[0]) for r, (arrays, _, _) in enumerate(got)]
        for r, (arrays, offset, _) in enumerate(got):
            self.case.check(r, arrays, True, True)
            if self.copies:
                continue
            first = r * self.workspace.shape[1] + offset
            place = [n, tokens], first, first + n * tokens * row, torch.bfloat16
            own = self.api.moe_a2a_wrap_payload_tensor_in_workspace(self.workspace, *place)
            self.y[r] = own.copy_(self.y[r])

    def dispatch(self, rank: int) -> Any:
        payloads = [of[rank] for of in (self.case.x, self.case.idx, self.case.weights)]
        return self.api.moe_a2a_dispatch(payloads[1], payloads, *self.rest[rank], EXPERTS)

    def combine(self, rank: int, of: Any = None) -> None:
        rest = self.case.tokens, *self.rest[rank], (of or self.got[rank])[1], not self.copies
        self.api.moe_a2a_combine(self.y[rank], *rest, output=self.case.out[rank])


def measure(
    ranks: Ranks, libraries: dict[str, Library], calls: int, samples: int
) -> dict[str, dict[str, Any]]:
    """Returns the samples of each library and call, in microseconds."""
    graphs = {("", "meeting"): ranks.capture(ranks.meet, calls)}
    for name, library in libraries.items():
        library.check(ranks)
        for call in library.calls:  # combine first: a handle is kept for a few dispatches
            one = getattr(library, call)
            alone = call == "round"
            graphs[name, call] = ranks.capture(
                lambda rank, one=one, alone=alone: (one(rank), alone or ranks.meet(rank)), calls
            )
    found: dict[str, dict[str, list[float]]] = {name: {} for name, _ in graphs}
    for _ in range(samples + 2):
        for (name, call), of_ranks in graphs.items():
            found[name].setdefault(call, []).append(round(ranks.replay(of_ranks) / calls, 3))
    for library in libraries.values():
        library.check(ranks)
    return {name: {call: all_[2:] for call, all_ in of.items()} for name, of in found.items()}


def main() -> None:
    prepare()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("ranks", "2,4,8"), ("tokens", "1,16,64,128,512")):
        parser.add_argument(f"--{name}", default=value)
    for name, value in (("hidden", 7168), ("calls", 10), ("samples", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peers", type=Path, help="folder of unpacked wheels")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    api, results, gpu = flashinfer_of(asked.peers), [], torch.cuda.get_device_name()
    print(f"{gpu}; hidden {asked.hidden}, bf16, top-{TOP_K} of {EXPERTS}; times in us")
    for n in map(int, asked.ranks.split(",")):
        ranks = Ranks(n)
        for tokens in map(int, asked.tokens.split(",")):
            case = Case(n, tokens, asked.hidden)
            libraries: dict[str, Library] = {
                of + (", copying" if copies else ""): Unisono(ranks, case, of, copies)
                for of, copies in (("flat", False), ("rank_major", False), ("flat", True))
            }
            if api is not None:
                libraries["flashinfer"] = FlashInfer(case, api, copies=False)
                libraries["flashinfer, copying"] = FlashInfer(case, api, copies=True)
            found = measure(ranks, libraries, asked.calls, asked.samples)
            meeting = statistics.median(found.pop("")["meeting"])
            for name, samples in found.items():
                us = {call: statistics.median(all_) for call, all_ in samples.items()}
                us = {call: one if call == "round" else one - meeting for call, one in us.items()}
                results.append({"ranks": n, "tokens": tokens, "library": name, "us": us, "samples": samples})
                text = ", ".join(f"{call} {one:.1f}" for call, one in us.items())
                print(f"{n} ranks {tokens:4} tokens  {name:19} {text} (meeting {meeting:.1f})", flush=True)
            if asked.json is not None:
                asked.json.write_text(json.dumps({"gpu": gpu, "hidden": asked.hidden, "results": results}))
        for comm in ranks.comms:
            comm.close()


main()
