#!/usr/bin/env python3
"""Measures all_reduce_rms_norm on one GPU: the tail of one rank, and ranks that share the GPU, a stream each.

Beside the copy of as many bytes, our calls apart, torch's add and rms_norm, torch.compile of the two, and
FlashInfer's fused kernel in one step. That comes from --peers, a folder with tvm_ffi's unpacked wheel and
trtllm_allreduce_fusion.so, which nvcc makes of one file of flashinfer-python 0.7.2.post1:
  cd flashinfer/data && nvcc -std=c++17 -arch=sm_90a -O3 --expt-relaxed-constexpr -Xcompiler -fPIC -shared \
    -DFLASHINFER_ENABLE_F16 -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -Icsrc -Iinclude \
    -Icutlass/include -Ispdlog/include -I TVM_FFI/include csrc/trtllm_allreduce_fusion.cu -o PEERS/...so

Kernels of one rank may start before the last one has ended if --ranks is 1 alone.
Times are of calls in CUDA graphs, of the slowest rank, the median of --samples; the libraries take turns.
FlashInfer's blocks wait for each other's, so that it is measured only if all of them are resident at once.
Results are checked: Unisono's by bits against its calls apart, the others within two roundings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from streams import Ranks, prepare

import unisono

EPS = 1e-6
ALGORITHMS = ("one_shot", "one_shot_ll128", "two_shot", "two_shot_ll128")


class Case:
    """The arrays of every rank, by seed."""

    def __init__(self, n: int, rows: int, hidden: int) -> None:
        torch.manual_seed(n * 1000 + rows)
        self.n, self.rows, self.hidden = n, rows, hidden
        self.x = torch.randn(n, rows, hidden, device="cuda").bfloat16()
        self.residual = torch.randn(rows, hidden, device="cuda").bfloat16().expand(n, -1, -1).contiguous()
        self.weight = torch.randn(hidden, device="cuda").bfloat16()
        self.sum, self.out, self.joined = (torch.empty_like(self.x) for _ in range(3))
        self.codes = torch.empty(n, rows, hidden, dtype=torch.float8_e4m3fn, device="cuda")
        self.scales = torch.empty(n, rows, hidden // 128, device="cuda")

    def ours(self, ranks: Ranks, algorithm: str | None, quant: str | None = None) -> Callable[[int], Any]:
        def call(rank: int) -> None:
            outs = {"out": self.out[rank]}
            if quant is not None:
                outs = {"out": self.codes[rank], "scales_out": self.scales[rank]}
            options = unisono.NormOptions(
                residual_out=self.joined[rank], quant=quant, algorithm=algorithm, **outs
            )
            ranks.comms[rank].all_reduce_rms_norm(
                self.x[rank], self.residual[rank], self.weight, EPS, options=options
            )

        return call

    def by_torch(self, ranks: Ranks, tail: Callable[..., Any]) -> Callable[[int], Any]:
        def call(rank: int) -> None:
            x = self.x[rank]
            if self.n > 1:
                x = ranks.comms[rank].all_reduce(x, out=self.sum[rank])
            tail(x, self.residual[rank], self.weight, self.joined[rank], self.out[rank])

        return call

    def copy(self, rank: int) -> None:
        """Copies as many bytes as the tail moves: x and the residual, to two outputs."""
        self.sum[rank].copy_(self.x[rank])
        self.joined[rank].copy_(self.residual[rank])


def tail_of_torch(x: Any, residual: Any, weight: Any, joined: Any, out: Any) -> None:
    torch.add(x, residual, out=joined)
    out.copy_(torch.nn.functional.rms_norm(joined, (x.shape[-1],), weight, EPS))


def tail_to_compile(x: Any, residual: Any, weight: Any) -> Any:
    joined = x + residual
    wide = joined.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype), joined


class FlashInfer:
    """trtllm_allreduce_fusion, pattern 1, on the workspace that FlashInfer describes: for every rank the
    pointers of each rank's buffer, flags and Lamport buffer, and one to five numbers of its own."""

    def __init__(self, peers: Path, n: int, rows: int, hidden: int) -> None:
        sys.path.insert(0, str(peers))
        import tvm_ffi

        self.run = tvm_ffi.load_module(str(peers / "trtllm_allreduce_fusion.so"))["trtllm_allreduce_fusion"]
        size = n * rows * hidden * 2
        self.held: list[Any] = []
        parts = []
        for bytes_, fill in ((size, 0), (n * 256 * 4, 0), (3 * size, None)):
            part = [torch.zeros(bytes_ // 2, dtype=torch.int16, device="cuda") for _ in range(n)]
            for one in part if fill is None else ():
                one.fill_(-32768)  # -0.0 marks what has not come
            self.held += part
            parts.append([one.data_ptr() for one in part])
        self.workspaces = []
        for _ in range(n):
            numbers = torch.tensor([0, 0, 0, size, 0], dtype=torch.int32, device="cuda")
            self.held.append(numbers)
            every = [*parts[0], *parts[1], *parts[2], numbers.data_ptr()]
            self.workspaces.append(torch.tensor(every, dtype=torch.int64, device="cuda"))

    def call(self, case: Case) -> Callable[[int], Any]:
        import tvm_ffi

        def call(rank: int) -> None:
            with tvm_ffi.use_torch_stream(torch.cuda.current_stream()):
                rows = case.x[rank], case.n, rank, case.rows, case.hidden
                how = False, True, True, True, 1  # no early launch; one step; sums in f32; the pattern
                outs = None, case.residual[rank], case.joined[rank], case.out[rank], None, None
                self.run(*rows, self.workspaces[rank], *how, *outs, case.weight, EPS, None, 0, None, None)

        return call


def check(case: Case, ranks: Ranks, call: Callable[[int], Any], exact: tuple[Any, Any]) -> float:
    """Returns the largest difference from the right rows, of residual_out and out."""
    case.out.zero_()
    case.joined.zero_()
    ranks.run(call)
    pairs = zip((case.joined, case.out), exact, strict=True)
    return max(float((got.float() - right.float()).abs().max()) for got, right in pairs)


def measure(
    ranks: Ranks, calls: dict[str, Callable[[int], Any]], count: int, samples: int
) -> dict[str, list[float]]:
    """Returns the microseconds of each call, samples of the slowest rank."""
    graphs = {name: ranks.capture(call, count) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(samples + 2):
        for name, of_ranks in graphs.items():
            found[name].append(round(ranks.replay(of_ranks) / count, 3))
    return {name: all_[2:] for name, all_ in found.items()}


def one(ranks: Ranks, case: Case, asked: argparse.Namespace, compiled: Any) -> dict[str, list[float]]:
    n, rows = case.n, case.rows
    calls = {"unisono": case.ours(ranks, None)}
    if n > 1:
        calls |= {name: case.ours(ranks, name) for name in ALGORITHMS if "two" not in name or rows >= n}
        calls["apart"] = case.ours(ranks, "apart")
    else:
        calls["fp8_128"] = case.ours(ranks, None, "fp8_128")
        calls["copy"] = case.copy
        if compiled is not None:
            calls["torch.compile"] = lambda rank: compiled(case.x[rank], case.residual[rank], case.weight)
    calls["torch"] = case.by_torch(ranks, tail_of_torch)
    if n > 1:
        calls["all_reduce"] = lambda rank: ranks.comms[rank].all_reduce(case.x[rank], out=case.sum[rank])
    # FlashInfer starts up to 8 blocks for each row
    if asked.peers is not None and n > 1 and rows * n <= asked.flashinfer_rows:
        calls["flashinfer"] = FlashInfer(asked.peers, n, rows, asked.hidden).call(case)
    ranks.run(calls["apart" if n > 1 else "unisono"])
    exact = case.joined.clone(), case.out.clone()
    for name, call in calls.items():
        if name in ("copy", "fp8_128", "torch.compile", "all_reduce"):
            ranks.run(call)
            continue
        off = check(case, ranks, call, exact)
        if off > (0.25 if name in ("torch", "flashinfer") else 0):
            raise SystemExit(f"{name} of {n} ranks and {rows} rows is wrong by {off}.")
    return measure(ranks, calls, asked.calls, asked.samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("ranks", "1,2,4,8"), ("rows", "1,4,16,73,256,1024"), ("tail-rows", "1,16,128,4096")):
        parser.add_argument(f"--{name}", default=value)
    for name, value in (("hidden", 7168), ("calls", 10), ("samples", 20), ("flashinfer-rows", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too")
    parser.add_argument("--peers", type=Path, help="folder of FlashInfer's kernel")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    prepare(shared=asked.ranks != "1")
    compiled = torch.compile(tail_to_compile) if asked.compile else None
    results, gpu = [], torch.cuda.get_device_name()
    print(f"{gpu}; hidden {asked.hidden}, bf16; times in us")
    for n in map(int, asked.ranks.split(",")):
        ranks = Ranks(n)
        for rows in map(int, (asked.tail_rows if n == 1 else asked.rows).split(",")):
            found = one(ranks, Case(n, rows, asked.hidden), asked, compiled)
            results.append({"ranks": n, "rows": rows, "samples": found})
            text = ", ".join(f"{name} {statistics.median(of):.2f}" for name, of in found.items())
            print(f"{n} ranks {rows:4} rows  {text}", flush=True)
            if asked.json is not None:
                asked.json.write_text(json.dumps({"gpu": gpu, "hidden": asked.hidden, "results": results}))
        for comm in ranks.comms:
            comm.close()


main()
